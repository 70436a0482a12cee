"""Runs a bench: connects, loops, prints what came of it."""

import asyncio
import contextlib
import functools
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from headrace.serving.app.bench_html import check_html, write_page
from headrace.serving.app.bench_keys import read_key, read_keys
from headrace.serving.app.bench_levels import described, levels_result, print_levels, work_text
from headrace.serving.app.bench_open_report import open_result, print_open, print_spread
from headrace.serving.app.bench_page import bench_page
from headrace.serving.app.bench_plot import save_open_plot
from headrace.serving.app.bench_progress import ProgressLine
from headrace.serving.app.bench_report import check_writable, print_table, result_of, write_json
from headrace.serving.app.plan_plot import check_plot
from headrace.serving.bench import closed_loop
from headrace.serving.bench.closed_plan import ClosedPlan
from headrace.serving.bench.dialect import Door, dialect_of
from headrace.serving.bench.native_target import NativeTarget
from headrace.serving.bench.objective import Objective
from headrace.serving.bench.open_figures import goodput, open_figures
from headrace.serving.bench.open_loop import OpenLoop, OpenRun
from headrace.serving.bench.openai_target import OpenAITarget
from headrace.serving.bench.outcome import Outcome, summarize
from headrace.serving.bench.targets import BenchError, Server, base_of, contract_of, model_of
from headrace.serving.bench.workload import MAX_TOKENS_IN_ALL, Workload
from headrace.serving.bench.workload_file import WorkloadFile
from headrace.serving.core.errors import ConfigError

INTERRUPTED = 130
"""Exit code."""
TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """What the flags said besides the workload. kind, extra: of other servers, see ``serving.bench.dialect``; fields
    for every body."""

    url: str
    api: str
    model: str | None
    api_key_file: Path | None
    keys: Path | None
    timeout_s: float
    sockets: int
    connections: int
    objective: Objective | None
    json_file: Path | None
    plot: Path | None
    html_file: Path | None = None
    kind: str = "any"
    extra: Mapping[str, object] = field(default_factory=dict)

    def server(self) -> Server:
        """Raises: ConfigError."""
        if self.json_file is not None:
            check_writable(self.json_file)
        if self.plot is not None:
            check_plot(self.plot)
        if self.html_file is not None:
            check_html(self.html_file)
        return Server(
            base=base_of(self.url),
            key=read_key(self.api_key_file),
            keys={} if self.keys is None else read_keys(self.keys),
            limit_s=self.timeout_s,
        )

    async def target(self, server: Server, connections: int) -> NativeTarget | OpenAITarget:
        """Not connected yet. Raises: BenchError."""
        if self.api == "native":
            return NativeTarget(server, self.model, sockets=self.sockets)
        return OpenAITarget(
            server,
            self.model or await model_of(server),
            connections,
            door=Door.CHAT if self.api == "chat" else Door.COMPLETIONS,
            dialect=dialect_of(self.kind),
            extra=self.extra,
        )

    def save(self, result: dict[str, Any]) -> None:
        """Into the files that were asked for. Raises: ConfigError."""
        if self.json_file is not None:
            write_json(self.json_file, result)
        if self.html_file is not None:
            write_page(self.html_file, bench_page(result))


def run_closed(wanted: BenchRequest, runs: Sequence[Workload | ClosedPlan]) -> int:
    """The exit code. runs: one after the other. Raises: ConfigError."""
    server, console = wanted.server(), Console(stderr=True)
    for run in runs:
        if isinstance(run, ClosedPlan):
            check_workload(run.plan, server)
    started = time.strftime(TIME_FORMAT, time.gmtime())

    async def measure() -> tuple[dict[str, Any] | None, list[list[Outcome]]]:
        contract, found = await contract_of(server), []
        with ProgressLine(console) as line:
            async with await wanted.target(server, max(run.streams for run in runs)) as target:
                for number, run in enumerate(runs, 1):
                    title = f"run {number} of {len(runs)}, {run.streams} streams: " if len(runs) > 1 else ""
                    watch = functools.partial(line.show_closed, title=title)
                    found.append(await closed_loop.run(run, target, watch))
        return contract, found

    try:
        contract, outcomes = asyncio.run(measure())
    except BenchError as error:
        return say_failed(error)
    figures = [_closed_figures(run, each, wanted.objective) for run, each in zip(runs, outcomes, strict=True)]
    if len(runs) > 1:
        result = levels_result(server.base, wanted.api, started, runs, contract, figures, outcomes)
        print_levels(result, Console())
    else:
        work = described(runs[0])
        result = result_of(server.base, wanted.api, started, work, contract, figures[0], outcomes[0])
        print_table(result, work_text(work, str(runs[0].streams)), Console())
    wanted.save(result)
    return 1 if any(each["failed"] for each in figures) else 0


def _closed_figures(
    run: Workload | ClosedPlan, outcomes: Sequence[Outcome], objective: Objective | None
) -> dict[str, Any]:
    found = summarize(outcomes, run.counts)
    if objective is not None:
        ordered = sorted(
            (outcome for outcome in outcomes if run.counts(outcome.index)), key=lambda outcome: outcome.sent_s
        )
        start_s = min(outcome.sent_s for outcome in outcomes)
        found["goodput"] = goodput(ordered, 0.0, start_s, objective)
    return found


def run_open(
    wanted: BenchRequest, workload: WorkloadFile, name: str | None, *, max_in_flight: int, repeat: int, warmup: int
) -> int:
    """The exit code. name: of the workload's file. Raises: ConfigError."""
    server, console = wanted.server(), Console(stderr=True)
    check_workload(workload, server)
    if not 0 <= warmup <= 10_000:
        raise ConfigError(f"--warmup is {warmup}; it must be from 0 to 10,000")
    if workload.tenants and not server.keys:
        console.print(f"{len(workload.tenants)} tenants are names only: without --keys all ask with one key, or none")
    started = time.strftime(TIME_FORMAT, time.gmtime())
    # Arrivals and lengths stay; drawn prompts are new, or all runs but the first would find them in a prefix cache.
    workloads = [replace(workload, seed=workload.seed + number) for number in range(repeat)]
    try:
        contract, runs = asyncio.run(_measure_open(wanted, server, workloads, console, max_in_flight, warmup))
    except BenchError as error:
        return say_failed(error)
    except asyncio.CancelledError:
        return INTERRUPTED
    if not runs:
        return INTERRUPTED
    offered = [run.offered(each) for run, each in zip(runs, workloads, strict=False)]
    found = [open_figures(run, each, wanted.objective) for run, each in zip(runs, offered, strict=True)]
    result = open_result(server.base, wanted.api, started, workload, name, contract, wanted.objective, found, runs)
    print_open(result, Console())
    print_spread(result, Console())
    wanted.save(result)
    if wanted.plot is not None:
        save_open_plot(result, wanted.objective, wanted.plot)
    if result["interrupted"]:
        return INTERRUPTED
    return 1 if any(figures["failed"] or not figures["answered"] for figures in found) else 0


async def _measure_open(
    wanted: BenchRequest,
    server: Server,
    workloads: Sequence[WorkloadFile],
    console: Console,
    max_in_flight: int,
    warmup: int,
) -> tuple[dict[str, Any] | None, list[OpenRun]]:
    """One run after the other, up to the one that was stopped, which is left out where it sent nothing."""
    contract, runs, stop = await contract_of(server), list[OpenRun](), asyncio.Event()
    with ProgressLine(console) as line, stopping(stop, console):
        async with await wanted.target(server, wanted.connections) as target:
            for number, each in enumerate(workloads, 1):
                title = f"run {number} of {len(workloads)}: " if len(workloads) > 1 else ""
                loop = OpenLoop(
                    workload=each,
                    target=target,
                    objective=wanted.objective,
                    max_in_flight=max_in_flight,
                    warmup=warmup if number == 1 else 0,
                    watch=lambda standing, title=title: line.show_open(standing, title),
                    stop=stop,
                )
                run = await loop.run()
                runs += [run] if run.outcomes else []
                if stop.is_set():
                    break
    return contract, runs


@contextlib.contextmanager
def stopping(stop: asyncio.Event, console: Console) -> Iterator[None]:
    """The first interrupt sets stop, the next one ends the task that it was entered in."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def interrupt() -> None:
        if stop.is_set() and task is not None:
            task.cancel()
        else:
            stop.set()
            console.print("no more requests; waiting for those that run (interrupt again to give up)", soft_wrap=True)

    try:
        loop.add_signal_handler(signal.SIGINT, interrupt)
    except (NotImplementedError, RuntimeError, ValueError):  # Windows, or not the main thread: as Python has it
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def check_workload(workload: WorkloadFile, server: Server) -> None:
    """Raises: ConfigError for tenants without a key, or more tokens than can be kept."""
    missing = [tenant for tenant in workload.tenants if server.keys and tenant not in server.keys]
    if missing:
        raise ConfigError(f"--keys has no key for {', '.join(missing[:5])}, tenants of the workload; add tenant:key")
    tokens = sum(request.max_tokens for request in workload.requests)
    if tokens > MAX_TOKENS_IN_ALL:
        raise ConfigError(f"the workload asks for {tokens:,} tokens; {MAX_TOKENS_IN_ALL:,} are the most that are kept")


def say_failed(error: BenchError) -> int:
    """On standard error; the exit code."""
    click.echo(f"headrace: {error}", err=True)
    return 1
