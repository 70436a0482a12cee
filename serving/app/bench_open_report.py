"""What an open loop found, as tables for a person and as JSON with every request."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from headrace.serving.app.bench_report import FORMAT, client_versions, goodput_text, record_of, server_text
from headrace.serving.bench.objective import Objective
from headrace.serving.bench.open_loop import OpenRun
from headrace.serving.bench.workload_file import WorkloadFile

LATENCIES = {
    "first_token": "first token",
    "inter_token": "between tokens",
    "mean_gap": "their mean in a request",
    "largest_pause": "longest pause",
    "whole_answer": "whole answer",
}
SERVER_TIMES = {
    "queue_ms": "server: queue",
    "prefill_ms": "server: prefill",
    "first_token_ms": "server: first token",
    "decode_ms": "server: decode",
    "outside_ms": "first token, outside it",
}
COLUMNS = ("p50_ms", "p95_ms", "p99_ms", "max_ms")
SPREADS = {
    "goodput/s": ("goodput", "per_s"),
    "good share": ("goodput", "share"),
    "first token p50": ("first_token", "p50_ms"),
    "first token p95": ("first_token", "p95_ms"),
    "first token p99": ("first_token", "p99_ms"),
    "mean between tokens p50": ("mean_gap", "p50_ms"),
    "mean between tokens p95": ("mean_gap", "p95_ms"),
    "whole answer p50": ("whole_answer", "p50_ms"),
    "whole answer p95": ("whole_answer", "p95_ms"),
    "output tokens/s": ("output_tokens_per_s",),
    "refused": ("refused",),
    "failed": ("failed",),
}


def open_result(
    base: str,
    api: str,
    started: str,
    workload: WorkloadFile,
    name: str | None,
    contract: dict[str, Any] | None,
    objective: Objective | None,
    figures: Sequence[dict[str, Any]],
    runs: Sequence[OpenRun],
) -> dict[str, Any]:
    """name: of the workload's file, None for one from a rate. runs: of the same plan, with the seed raised by one each
    time. spread: None for a single run."""
    return {
        "format": FORMAT,
        "loop": "open",
        "started": started,
        "workload": {
            "file": name,
            "hash": workload.hash,
            "seed": workload.seed,
            "description": workload.description,
            "requests": len(workload.requests),
            "duration_s": workload.duration_s,
            "offered_per_s": round(workload.offered_per_s, 4),
        },
        "client": client_versions(),
        "server": {"url": base, "api": api, "contract": contract},
        "slo": None if objective is None else str(objective),
        "interrupted": any(run.stopped_s is not None for run in runs),
        "spread": spread_of(figures) if len(runs) > 1 else None,
        "runs": [
            {
                "seed": workload.seed + number,
                "figures": found,
                "requests": [
                    record_of(outcome, run.start_s)
                    | ({} if objective is None else {"missed": objective.missed_by(outcome)})
                    for outcome in run.outcomes
                ],
            }
            for number, (found, run) in enumerate(zip(figures, runs, strict=True))
        ],
    }


def spread_of(figures: Sequence[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Of the main figures over several runs; None where a run has none of it."""
    found: dict[str, dict[str, float | None]] = {}
    for name, path in SPREADS.items():
        values = [_at(each, path) for each in figures]
        if all(value is None for value in values):
            continue
        numbers = [value for value in values if value is not None]
        is_whole = len(numbers) == len(values)
        found[name] = {
            "min": min(numbers) if is_whole else None,
            "median": float(np.median(numbers)) if is_whole else None,
            "max": max(numbers) if is_whole else None,
        }
    return found


def _at(value: Any, path: tuple[str, ...]) -> float | None:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def print_open(result: dict[str, Any], console: Console) -> None:
    """The workload, what it ran on, and the figures of each run."""
    work = result["workload"]
    source = work["file"] or "planned here"
    console.print(
        f"{work['requests']:,} requests in {work['duration_s']:g} s ({work['offered_per_s']:g}/s), {source}: "
        f"{work['description'] or 'no description'}; workload {work['hash'][:12]}",
        highlight=False,
        soft_wrap=True,
    )
    if result["interrupted"]:
        console.print("interrupted: the last run has the part of the plan that was offered", style="yellow")
    console.print(server_text(result["server"]), highlight=False, soft_wrap=True)
    for run in result["runs"]:
        if len(result["runs"]) > 1:
            console.print(f"\nseed {run['seed']}:", highlight=False)
        _print_figures(run["figures"], result["server"]["api"], console)


def _print_figures(figures: dict[str, Any], api: str, console: Console) -> None:
    table = _table("ms", *(column.removesuffix("_ms") for column in COLUMNS), "of", "never")
    titles = LATENCIES | ({"inter_token": "between pieces of text"} if api != "native" else {})
    rows = [(title, figures[name]) for name, title in titles.items()]
    rows += [(title, figures["server"][name]) for name, title in SERVER_TIMES.items() if name in figures["server"]]
    rows.append(("sent late, by this client", figures["client"]["late"]))
    for title, row in rows:
        table.add_row(title, *(_cell(row, column) for column in COLUMNS), f"{row['count']:,}", f"{row['never'] or ''}")
    console.print(table, highlight=False)
    console.print(
        f"{figures['answered']:,} answered, {figures['refused']:,} refused, {figures['failed']:,} failed of "
        f"{figures['requests']:,}; {figures['output_tokens_per_s']:,.1f} output tokens/s, {figures['prompt_tokens']:,} "
        f"prompt tokens, of which {figures['cached_tokens']:,} were cached; {figures['seconds']:.1f} s to the last end",
        highlight=False,
        soft_wrap=True,
    )
    if (server := figures["server"]).get("preemptions", {"sum": 0})["sum"]:
        kinds = [name for name in server if name.startswith("preempted_") and not name.endswith("_ms")]
        reasons = ", ".join(f"{server[name]['sum']:,} {name.removeprefix('preempted_')}" for name in kinds)
        text = f"{server['preemptions']['sum']:,} preemptions" + (f": {reasons}" if reasons else "")
        console.print(text, highlight=False, soft_wrap=True)
    if figures["cancels"]["planned"]:
        cancels = figures["cancels"]
        console.print(
            f"{cancels['sent']:,} of {cancels['planned']:,} planned cancels were sent; no latency counts them"
        )
    _print_errors(figures["errors"], console)
    if "goodput" in figures:
        console.print(goodput_text(figures["goodput"]), style="bold", highlight=False, soft_wrap=True)
    _print_tenants(figures, console)
    for warning in figures["client"]["warnings"]:
        console.print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True)


def _print_errors(errors: dict[str, Any], console: Console) -> None:
    if not errors:
        return
    table = _table("not answered", "times", "p50 ms", "p99 ms", "max ms", "come again after")
    for code, row in errors.items():
        again = row["retry_after"]
        hint = "" if again is None else f"{_cell(again, 'p50_ms')} to {_cell(again, 'max_ms')} ms"
        kind = " (refused)" if row["refusals"] == row["count"] else ""
        cells = (_cell(row["latency"], column) for column in ("p50_ms", "p99_ms", "max_ms"))
        table.add_row(code + kind, f"{row['count']:,}", *cells, hint)
    console.print(table, highlight=False)


def _print_tenants(figures: dict[str, Any], console: Console) -> None:
    if "tenants" not in figures:
        return
    table = _table("tenant", "requests", "refused", "failed", "good", "first token p50", "p95", "tokens/s")
    for name, part in figures["tenants"].items():
        first = part["first_token"]
        share = f"{part['goodput']['share']:.1%}" if "goodput" in part else "-"
        counts = (f"{part[key]:,}" for key in ("requests", "refused", "failed"))
        rate = f"{part['output_tokens_per_s']:,.1f}"
        table.add_row(name or "(none)", *counts, share, _cell(first, "p50_ms"), _cell(first, "p95_ms"), rate)
    console.print(table, highlight=False)


def print_spread(result: dict[str, Any], console: Console) -> None:
    """Over several runs; nothing for one."""
    if result["spread"] is None:
        return
    table = _table(f"over {len(result['runs'])} runs", "min", "median", "max")
    for name, row in result["spread"].items():
        table.add_row(name, *("never" if row[key] is None else f"{row[key]:,.2f}" for key in ("min", "median", "max")))
    console.print()
    console.print(table, highlight=False)


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(first)
    for heading in others:
        table.add_column(heading, justify="right")
    return table


def _cell(row: dict[str, Any], name: str) -> str:
    """Of waits: "never" where the percentile falls on what never came."""
    if row[name] is not None:
        return f"{row[name]:,.1f}"
    return "never" if row["never"] else "-"
