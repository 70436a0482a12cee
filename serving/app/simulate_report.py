"""What a simulation of a service found: a table, a JSON object, a CSV line for each request, and pictures."""

import csv
import importlib.util
import io
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from headrace.serving.app.simulate_run import Simulated
from headrace.serving.core.cost_model import CostModel
from headrace.serving.core.errors import ConfigError
from headrace.serving.core.simulated_service import ServiceOutcome

FORMAT = "headrace-simulation/1"
PLOTS = (".html", ".svg", ".png", ".pdf")
COLUMNS = (
    "index", "at_s", "tenant", "replica", "prompt_tokens", "cached_tokens", "output_tokens", "first_token_ms",
    "mean_gap_ms", "largest_gap_ms", "whole_ms", "preemptions", "outcome", "retry_after_ms",
)  # fmt: skip
LATENCIES = (
    ("first_token", "first token"),
    ("inter_token", "between tokens"),
    ("largest_pause", "largest gap"),
    ("whole_answer", "whole answer"),
)


def check_files(**files: Path | None) -> None:
    """By option name, before anything is simulated. Raises: ConfigError naming the option."""
    for name, path in files.items():
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"--{name} {path}: there is no folder {path.absolute().parent}")
    plot = files.get("plot")
    if plot is not None and plot.suffix not in PLOTS:
        raise ConfigError(f"--plot {plot}: its name must end in {', '.join(PLOTS)}")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--plot {plot} needs matplotlib, which the plot extra of this package brings")


def result_of(found: Simulated, cost: CostModel, replicas: int, workload_hash: str, description: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "workload": {"hash": workload_hash, "description": description},
        "replicas": replicas,
        "routing": "to the replica with the fewest tokens that are not done",
        "config": msgspec.to_builtins(found.config),
        "cost_model": {
            "source": cost.source,
            "edge_is_measured": cost.edge_is_measured,
            "model_hash": cost.context.get("model_hash"),
            "contract": cost.context.get("contract"),
            "guessed_programs": found.guessed,
        },
        "figures": found.figures,
    }


def print_result(result: dict[str, Any], console: Console) -> None:
    figures, config = result["figures"], result["config"]
    console.print(
        f"{figures['requests']:,} requests at {figures['offered_per_s']:g}/s for {figures['planned_s']:g} s on "
        f"{result['replicas']} × {config['num_lanes'] * config['num_slots']} streams, {config['num_pages']:,} pages of "
        f"{config['page_size']} tokens, chunks of {config['chunk_tokens']}; workload {result['workload']['hash'][:12]}",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("ms", "mean", "p50", "p95", "p99", "of", "never"):
        table.add_column(heading, justify="left" if heading == "ms" else "right")
    for name, text in LATENCIES:
        row = figures[name]
        cells = [row.get(key) for key in ("mean_ms", "p50_ms", "p95_ms", "p99_ms")]
        shown = ["-" if cell is None else f"{cell:,.1f}" for cell in cells]
        table.add_row(text, *shown, f"{row['count']:,}", f"{row.get('never', 0):,}")
    console.print(table, highlight=False)
    for line in result_lines(result):
        console.print(line, highlight=False, soft_wrap=True)


def result_lines(result: dict[str, Any]) -> list[str]:
    """Goodput, refusals, and what is doubtful, in sentences."""
    figures = result["figures"]
    lines = [
        f"{figures['answered']:,} answered, {figures['refused']:,} refused, {figures['failed']:,} failed; "
        f"{figures['output_tokens_per_s']:,.1f} output tokens/s, {figures['cached_tokens']:,} cached prompt tokens"
    ]
    for code, error in figures["errors"].items():
        hint = error["retry_after"]
        again = f", told to retry after {hint['p50_ms']:,.0f} ms (p50)" if hint and hint["p50_ms"] is not None else ""
        lines.append(f"  {error['count']:,} {code}{again}")
    if "goodput" in figures:
        good = figures["goodput"]
        low, high = good["per_s_interval"]
        lines.append(
            f"goodput {good['per_s']:.3g} requests/s ({low:.3g} to {high:.3g}), {good['share']:.1%} of those offered, "
            f"by {good['slo']}"
        )
    for name, part in figures.get("tenants", {}).items():
        first = part["first_token"]["p95_ms"]
        share = f", {part['goodput']['share']:.1%} good" if "goodput" in part else ""
        first_text = "never" if first is None else f"{first:,.0f} ms"
        lines.append(
            f"  tenant {name or '-'}: {part['answered']:,} of {part['requests']:,} answered, first p95 {first_text}"
            f"{share}"
        )
    cost = result["cost_model"]
    if cost["guessed_programs"]:
        pairs = ", ".join(f"{name} by {other}" for name, other in cost["guessed_programs"].items())
        lines.append(f"doubtful: programs that were never measured take the times of others: {pairs}")
    if not cost["edge_is_measured"]:
        lines.append("doubtful: the time of edge and network is a constant; headrace cost-model --bench measures it")
    return lines


def write_csv(path: Path, outcomes: Sequence[ServiceOutcome]) -> None:
    """One line for each request. Raises: ConfigError."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for index, outcome in enumerate(outcomes):
        gaps = outcome.gaps_ms
        finished = outcome.finished
        writer.writerow(
            (
                index,
                round(outcome.at_s, 6),
                outcome.request.tenant,
                outcome.replica,
                len(outcome.request.prompt_ids),
                0 if finished is None else finished.cached_tokens,
                len(outcome.tokens_s),
                _rounded(outcome.first_token_ms),
                _rounded(sum(gaps) / len(gaps) if gaps else None),
                _rounded(max(gaps, default=None)),
                _rounded(1e3 * (outcome.ended_s - outcome.at_s)),
                outcome.num_preempted,
                _outcome_word(outcome),
                "" if outcome.refused is None else outcome.refused.retry_after_ms,
            )
        )
    write_text("csv", path, text.getvalue())


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Raises: ConfigError."""
    write_text("json", path, json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def html_page(result: dict[str, Any], svg: str) -> str:
    """A report of one file: the sentences, a table of latencies, the pictures."""
    rows = "".join(
        "<tr><td>"
        + "</td><td>".join([text, *(_cell(result["figures"][name].get(key)) for key in _KEYS)])
        + "</td></tr>"
        for name, text in LATENCIES
    )
    lines = "".join(f"<p>{escape(line)}</p>" for line in result_lines(result))
    head = "".join(f"<th>{name}</th>" for name in ("ms", "mean", "p50", "p95", "p99"))
    style = "body{font:15px system-ui;margin:2em;max-width:70em}td,th{padding:.2em 1em;text-align:right}"
    title = escape(result["workload"]["description"] or "A service in simulated time")
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>headrace simulate</title><style>{style}</style>"
        f"<h1>{title}</h1><table><tr>{head}</tr>{rows}</table>{lines}{svg[svg.index('<svg') :]}</html>\n"
    )


def write_text(option: str, path: Path, text: str) -> None:
    """Raises: ConfigError naming the option."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--{option} {path} cannot be written: {error.strerror}") from error


_KEYS = ("mean_ms", "p50_ms", "p95_ms", "p99_ms")


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _rounded(value: float | None) -> float | str:
    return "" if value is None else round(value, 3)


def _outcome_word(outcome: ServiceOutcome) -> str:
    if outcome.refused is not None:
        return f"refused: {outcome.refused.reason.value}"
    if outcome.finished is None:
        return "no end"
    reason = outcome.finished.cancel_reason
    return outcome.finished.reason.value if reason is None else f"cancelled: {reason.value}"
