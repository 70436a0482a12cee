"""A closed loop of requests against one target, told to whoever watches."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headrace.serving.bench.closed_plan import ClosedPlan
from headrace.serving.bench.outcome import Outcome
from headrace.serving.bench.targets import Target
from headrace.serving.bench.workload import Workload

TELL_S = 0.25
"""Between two calls of a watcher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How far a run is. output_tokens: of the answers that have ended well."""

    done: int
    requests: int
    failed: int
    output_tokens: int
    seconds: float


Watcher = Callable[[Standing], None]


async def run(workload: Workload | ClosedPlan, target: Target, watch: Watcher = lambda _: None) -> list[Outcome]:
    """Warm-up requests first, then those that count, by their indexes. Outcomes are in the order of the ends."""
    for index in range(-workload.warmup, 0):
        await target.ask(index, workload.body(index), workload.terms(index))
    outcomes: list[Outcome] = []
    indexes = iter(range(workload.requests))
    teller = asyncio.create_task(_tell(workload, outcomes, watch))
    try:
        await asyncio.gather(
            *(_stream(workload, target, indexes, outcomes) for _ in range(min(workload.streams, workload.requests)))
        )
    finally:
        teller.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await teller
    return outcomes


async def _stream(
    workload: Workload | ClosedPlan, target: Target, indexes: Iterator[int], outcomes: list[Outcome]
) -> None:
    """One of the streams: the next request that nobody has taken, until there is none."""
    for index in indexes:
        outcomes.append(await target.ask(index, workload.body(index), workload.terms(index)))


async def _tell(workload: Workload | ClosedPlan, outcomes: list[Outcome], watch: Watcher) -> None:
    start_s, seen, failed, tokens = time.monotonic(), 0, 0, 0
    while True:
        for outcome in outcomes[seen:]:
            failed += outcome.error is not None
            tokens += outcome.output_tokens if outcome.error is None else 0
        seen = len(outcomes)
        seconds = time.monotonic() - start_s
        watch(Standing(done=seen, requests=workload.requests, failed=failed, output_tokens=tokens, seconds=seconds))
        await asyncio.sleep(TELL_S)
