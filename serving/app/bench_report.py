"""What a bench found: a table for a person, and a JSON file with everything that the figures belong to."""

import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace.serving.bench.outcome import PERCENTILES, Outcome
from headrace.serving.core.errors import ConfigError

FORMAT = "headrace-bench/2"
MISSED = {"answer": "not answered"}
LATENCIES = {
    "first_token": "first token",
    "inter_token": "between tokens",
    "whole_answer": "whole answer",
}


def result_of(
    base: str,
    api: str,
    started: str,
    workload: dict[str, Any],
    contract: dict[str, Any] | None,
    figures: dict[str, object],
    outcomes: Sequence[Outcome],
) -> dict[str, Any]:
    """workload: as ``bench_levels.described`` gives it. contract: ``/v1/contract`` as the server gave it, None for a
    server that has none."""
    origin = min((outcome.sent_s for outcome in outcomes), default=0.0)
    return {
        "format": FORMAT,
        "loop": "closed",
        "started": started,
        "workload": workload,
        "client": client_versions(),
        "server": {"url": base, "api": api, "contract": contract},
        "figures": figures,
        "requests": [record_of(outcome, origin) for outcome in outcomes],
    }


def client_versions() -> dict[str, str]:
    """What asked."""
    return {
        "headrace": version("headrace"),
        "python": platform.python_version(),
        "httpx": version("httpx"),
        "websockets": version("websockets"),
    }


def record_of(outcome: Outcome, origin_s: float) -> dict[str, Any]:
    """Of one request, for JSON. origin_s: the monotonic second from which its times count. Latencies in ms count from
    the planned start, where there is one. pauses_ms: between pieces of output; gaps_ms: between tokens, where pieces
    had several. request_id and server: the server's name of it, and what it says of it."""

    def at(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds - origin_s, 6)

    def ms(value: float | None) -> float | None:
        return None if value is None else round(value, 3)

    found = {
        "index": outcome.index,
        "planned_s": at(outcome.planned_s),
        "sent_s": at(outcome.sent_s),
        "first_s": at(outcome.first_s),
        "ended_s": at(outcome.ended_s),
        "first_token_ms": ms(outcome.first_token_ms),
        "mean_gap_ms": ms(outcome.mean_gap_ms),
        "whole_ms": ms(outcome.whole_ms),
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "output_tokens": outcome.output_tokens,
        "error": outcome.error,
        "is_refused": outcome.is_refused,
        "is_cancelled": outcome.is_cancelled,
        "retry_after_ms": outcome.retry_after_ms,
        "tenant": outcome.tenant,
        "request_id": outcome.request_id,
        "server": {name: ms(value) for name, value in outcome.server.items()},
        "pauses_ms": [ms(pause) for pause in outcome.pauses_ms],
    }
    if outcome.gaps_ms != outcome.pauses_ms:
        found["gaps_ms"] = [ms(gap) for gap in outcome.gaps_ms]
    return found


def print_table(result: dict[str, Any], title: str, console: Console) -> None:
    """title: the workload in words. Then what it ran on, the figures; a share of failures in words."""
    figures = result["figures"]
    console.print(title, highlight=False)
    console.print(server_text(result["server"]), highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("ms", "mean", *(f"p{p}" for p in PERCENTILES), "of"):
        table.add_column(heading, justify="left" if heading == "ms" else "right")
    for name, text in LATENCIES.items():
        row = figures[name]
        if name == "inter_token" and result["server"]["api"] != "native":
            text = "between pieces of text"
        cells = [row["mean_ms"], *(row[f"p{p}_ms"] for p in PERCENTILES)]
        table.add_row(text, *("-" if cell is None else f"{cell:,.1f}" for cell in cells), f"{row['count']:,}")
    console.print(table, highlight=False)
    console.print(
        f"{figures['output_tokens_per_s']:,.1f} output tokens/s ({figures['output_tokens']:,} in "
        f"{figures['seconds']:.1f} s), {figures['prompt_tokens']:,} prompt tokens, of which "
        f"{figures['cached_tokens']:,} were cached, {figures['requests_per_s']:.2f} requests/s",
        highlight=False,
    )
    if "goodput" in figures:
        console.print(goodput_text(figures["goodput"]), style="bold", highlight=False)
    if figures["failed"]:
        kinds = ", ".join(f"{count} {code}" for code, count in figures["errors"].items())
        console.print(f"{figures['failed']} of {figures['requests']} failed: {kinds}", style="red", highlight=False)


def goodput_text(good: dict[str, Any]) -> str:
    """In a line, with its interval and what was missed."""
    low, high = good["share_interval"]
    low_s, high_s = good["per_s_interval"]
    missed = ", ".join(f"{count:,} {MISSED.get(name, name)}" for name, count in good["missed"].items())
    return (
        f"goodput under {good['slo']}: {good['per_s']:.3g}/s (95%: {low_s:.3g} to {high_s:.3g}), {good['share']:.1%} "
        f"({low:.1%} to {high:.1%}) of {good['of']:,}; missed: {missed or 'nothing'}"
    )


def server_text(server: dict[str, Any]) -> str:
    """What was measured, in a line."""
    contract = server["contract"]
    if contract is None:
        return f"{server['url']} ({server['api']}), which has no contract: what it runs on is not known"
    runs, on, versions = (Parts(contract[name]) for name in ("contract", "topology", "versions"))
    return (
        f"{server['url']} ({server['api']}): headrace {versions['headrace']}, JAX {versions['jax']}, "
        f"{on['num_devices']} × {on['platform']}:{on['device_kind']}, mesh {on['mesh']}, link {on['link']}; "
        f"{runs['dtype']}, KV {runs['kv_dtype']}, model {runs['model']:.12}, "
        f"contract {str(contract.get('fingerprint'))[:19]}"
    )


class Parts(dict[str, Any]):
    """Of a contract: what another version of the server leaves out is not known."""

    def __missing__(self, name: str) -> str:
        return "not known"


def check_writable(path: Path) -> None:
    """Before a run of minutes. Raises: ConfigError."""
    if not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--json {path} cannot be written: is its directory there, and yours?")


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Raises: ConfigError where it cannot be written."""
    try:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.JSONEncoder(indent=1, ensure_ascii=False).iterencode(result))
            file.write("\n")
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}") from error
