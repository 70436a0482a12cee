"""Several closed loops in a row: each number of streams, again and again, with intervals over the repetitions."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace.serving.app.bench_report import FORMAT, client_versions, record_of, server_text
from headrace.serving.app.compare_report import interval_text
from headrace.serving.bench.closed_plan import ClosedPlan
from headrace.serving.bench.intervals import median_of
from headrace.serving.bench.outcome import Outcome
from headrace.serving.bench.workload import Workload

METRICS = {
    "output_tokens_per_s": ("output tokens/s", ("output_tokens_per_s",)),
    "requests_per_s": ("requests/s", ("requests_per_s",)),
    "first_token_p50_ms": ("first token p50 ms", ("first_token", "p50_ms")),
    "first_token_p95_ms": ("first token p95 ms", ("first_token", "p95_ms")),
    "inter_token_p50_ms": ("between tokens p50 ms", ("inter_token", "p50_ms")),
    "inter_token_p95_ms": ("between tokens p95 ms", ("inter_token", "p95_ms")),
}
SHOWN = ("output_tokens_per_s", "first_token_p50_ms", "inter_token_p50_ms")
Closed = Workload | ClosedPlan


def levels_of(workload: Closed, streams: Sequence[int], repeat: int) -> list[Closed]:
    """Repetition by repetition, in each all levels: what slows the machine for a while slows several. Every run draws
    prompts of its own."""
    return [
        _seeded(workload, count, number * len(streams) + place)
        for number in range(repeat)
        for place, count in enumerate(streams)
    ]


def _seeded(workload: Closed, streams: int, more: int) -> Closed:
    warmup = workload.warmup if more == 0 else 0
    if isinstance(workload, Workload):
        return replace(workload, streams=streams, seed=workload.seed + more, warmup=warmup)
    plan = replace(workload.plan, seed=workload.plan.seed + more)
    return replace(workload, streams=streams, plan=plan, warmup=warmup)


def described(workload: Closed) -> dict[str, Any]:
    """A closed workload, for JSON."""
    if isinstance(workload, Workload):
        return {**asdict(workload), "arrivals": "closed", "hash": workload.hash}
    return {
        "arrivals": "closed",
        "streams": workload.streams,
        "requests": workload.requests,
        "warmup": workload.warmup,
        "seed": workload.plan.seed,
        "description": workload.plan.description,
        "hash": workload.hash,
    }


def work_text(work: dict[str, Any], streams: str) -> str:
    """Of one in words. work: as ``described`` gives it."""
    if "description" in work:
        return f"{work['requests']} requests in {streams} streams: {work['description']}; workload {work['hash'][:12]}"
    prompt = f"{work['prompt_words']} words" if work["prompt_words"] else f"{work['prompt_tokens']} ids"
    return (
        f"{work['requests']} requests in {streams} streams, prompts of {prompt}, {work['max_tokens']} new tokens, "
        f"temperature {work['temperature']:g}, seed {work['seed']}; workload {work['hash'][:12]}"
    )


def levels_result(
    base: str,
    api: str,
    started: str,
    runs: Sequence[Closed],
    contract: dict[str, Any] | None,
    figures: Sequence[dict[str, Any]],
    outcomes: Sequence[Sequence[Outcome]],
) -> dict[str, Any]:
    """runs, figures, outcomes: of each run in its order."""
    levels = []
    for streams in dict.fromkeys(run.streams for run in runs):
        own = [each for run, each in zip(runs, figures, strict=True) if run.streams == streams]
        metrics = {}
        for name, (_, path) in METRICS.items():
            values = [value for each in own if (value := _at(each, path)) is not None]
            middle = median_of(values)
            if middle is not None:
                metrics[name] = {**middle.as_json(), "values": values}
        levels.append({"streams": streams, "metrics": metrics, "failed": sum(each["failed"] for each in own)})
    return {
        "format": FORMAT,
        "loop": "levels",
        "started": started,
        "workload": described(runs[0]),
        "client": client_versions(),
        "server": {"url": base, "api": api, "contract": contract},
        "levels": levels,
        "runs": [
            {
                "streams": run.streams,
                "hash": run.hash,
                "figures": each,
                "requests": [record_of(outcome, min(o.sent_s for o in found)) for outcome in found],
            }
            for run, each, found in zip(runs, figures, outcomes, strict=True)
        ],
    }


def _at(value: Any, path: Sequence[str]) -> float | None:
    for name in path:
        value = value[name]
    return None if value is None else float(value)


def print_levels(result: dict[str, Any], console: Console) -> None:
    streams = ", ".join(str(level["streams"]) for level in result["levels"])
    console.print(work_text(result["workload"], streams), highlight=False, soft_wrap=True)
    console.print(server_text(result["server"]), highlight=False, soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("streams", *(METRICS[name][0] for name in SHOWN), "failed"):
        table.add_column(heading, justify="right")
    for level in result["levels"]:
        cells = (interval_text(level["metrics"].get(name)) for name in SHOWN)
        table.add_row(str(level["streams"]), *cells, str(level["failed"] or ""))
    console.print(table, highlight=False)
    found = next(iter(result["levels"][0]["metrics"].values()), {"confidence": None, "count": 1})
    if found["confidence"] is not None:
        console.print(f"medians of {found['count']} runs, with {found['confidence']:.1%} intervals", highlight=False)
