"""Runs a comparison: servers up, turns taken, tables, JSON and report."""

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from headrace.serving.app.bench_html import check_html, write_page
from headrace.serving.app.bench_keys import read_key
from headrace.serving.app.bench_progress import ProgressLine
from headrace.serving.app.bench_report import check_writable, write_json
from headrace.serving.app.bench_run import INTERRUPTED, TIME_FORMAT, say_failed, stopping
from headrace.serving.app.compare_page import comparison_page
from headrace.serving.app.compare_report import comparison_result, print_comparison, turn_text
from headrace.serving.bench.compare import ComparisonRun
from headrace.serving.bench.compare_plan import Comparison
from headrace.serving.bench.targets import BenchError
from headrace.serving.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRequest:
    """What the flags said besides servers and workloads. minutes: by which it should be done. logs: folder,
    None for one that is kept only while a server may still fail."""

    comparison: Comparison
    json_file: Path | None = None
    html_file: Path | None = None
    baseline: str | None = None
    minutes: float | None = None
    logs: Path | None = None


def run_compare(wanted: CompareRequest) -> int:
    """The exit code. Raises: ConfigError."""
    names = [server.name for server in wanted.comparison.servers]
    if wanted.baseline is not None and wanted.baseline not in names:
        raise ConfigError(f"--baseline {wanted.baseline!r} is none of {', '.join(names)}")
    if wanted.json_file is not None:
        check_writable(wanted.json_file)
    if wanted.html_file is not None:
        check_html(wanted.html_file)
    try:
        result = measure_comparison(wanted, Console(stderr=True))
    except BenchError as error:
        return say_failed(error)
    if result is None:
        return INTERRUPTED
    print_comparison(result, wanted.baseline, Console())
    if wanted.json_file is not None:
        write_json(wanted.json_file, result)
    if wanted.html_file is not None:
        write_page(wanted.html_file, comparison_page(result, wanted.baseline))
    if result["interrupted"]:
        return INTERRUPTED
    if any(server["lost"] is not None for server in result["servers"].values()):
        return 1
    return 0 if all(check["passed"] for each in result["workloads"] for check in each["checks"]) else 1


def measure_comparison(wanted: CompareRequest, console: Console) -> dict[str, Any] | None:
    """What came of it; None where it was interrupted before a turn. Raises: BenchError."""
    started = time.strftime(TIME_FORMAT, time.gmtime())
    with tempfile.TemporaryDirectory(prefix="headrace-compare-") as folder:
        logs = Path(folder) if wanted.logs is None else wanted.logs
        logs.mkdir(parents=True, exist_ok=True)
        try:
            run = asyncio.run(_measure(wanted, logs, console))
        except asyncio.CancelledError:
            return None
    if not run.done:
        return None
    return comparison_result(started, run)


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """A signal that would end this process ends the task first, and with it the servers that were started or stopped:
    they are in sessions of their own and would go on, or stay stopped."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    numbers = (signal.SIGTERM, signal.SIGHUP)
    try:
        for number in numbers:
            loop.add_signal_handler(number, task.cancel if task is not None else loop.stop)
    except (NotImplementedError, RuntimeError, ValueError):  # not the main thread: whoever runs it sees to that
        yield
        return
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _measure(wanted: CompareRequest, logs: Path, console: Console) -> ComparisonRun:
    began_s, stop = time.monotonic(), asyncio.Event()
    keys = {
        server.name: read_key(None if server.api_key_file is None else Path(server.api_key_file))
        for server in wanted.comparison.servers
    }
    with ProgressLine(console) as line, stopping(stop, console), ending():
        run = ComparisonRun(
            comparison=wanted.comparison,
            keys=keys,
            logs=logs,
            environment=dict(os.environ),
            tell=lambda text: line.show(time.monotonic() - began_s, text),
            kept=lambda done: console.print(turn_text(done), highlight=False, soft_wrap=True),
            stop=stop,
            until_s=None if wanted.minutes is None else began_s + 60 * wanted.minutes,
        )
        await run.run()
    return run
