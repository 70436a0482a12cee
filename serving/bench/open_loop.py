"""An open loop: every request starts at its planned time, whatever became of the others.

Latencies count from the planned start, so what a slow server, or a slow client, holds up is not left out (coordinated
omission). How late the client itself was is in each outcome: sent_s less planned_s.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from headrace.serving.bench.objective import Objective
from headrace.serving.bench.outcome import Outcome
from headrace.serving.bench.targets import Target, Terms
from headrace.serving.bench.workload_file import Prompt, WorkloadFile

TELL_S = 0.25
"""Between two calls of a watcher."""
LEAD_S = 0.2
"""From the end of warm-up to the start of the plan."""
MAX_PREPARED_BYTES = 256 << 20
"""Of prompts that are drawn before the start; those of longer workloads are drawn just before they are sent."""
BYTES_PER_ID = 32
"""Of a token id in a Python list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStanding:
    """How far a run is. good: None without an objective. late_ms: the most that a request was late when it was
    sent."""

    requests: int
    planned_s: float
    seconds: float
    sent: int
    ended: int
    refused: int
    failed: int
    good: int | None
    late_ms: float

    @property
    def in_flight(self) -> int:
        return self.sent - self.ended


OpenWatcher = Callable[[OpenStanding], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """start_s: of the plan, monotonic. outcomes: by their index. seconds: from the start to the last end. cpu_s: what
    this process computed in them. stopped_s: seconds from the start to where it was stopped; None: it was not."""

    outcomes: tuple[Outcome, ...]
    start_s: float
    seconds: float
    cpu_s: float
    stopped_s: float | None = None

    def offered(self, workload: WorkloadFile) -> WorkloadFile:
        """What there was of the workload until it was stopped."""
        if self.stopped_s is None:
            return workload
        return replace(workload, requests=workload.requests[: len(self.outcomes)], duration_s=self.stopped_s)


@dataclass(slots=True)
class _Tally:
    """While it runs."""

    outcomes: list[Outcome] = field(default_factory=list)
    sent: int = 0
    refused: int = 0
    failed: int = 0
    good: int = 0
    late_ms: float = 0.0

    def take(self, outcome: Outcome, objective: Objective | None) -> None:
        self.outcomes.append(outcome)
        self.refused += outcome.is_refused
        self.failed += outcome.error is not None and not outcome.is_refused
        self.good += objective is not None and not objective.missed_by(outcome)
        self.late_ms = max(self.late_ms, (outcome.sent_s - outcome.start_s) * 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoop:
    """max_in_flight: requests without an end; what would be one more is not sent, and says so. warmup: requests before
    the start, one after the other, which do not count and leave nothing in a prefix cache that the others would find.
    stop: once set, no more requests start, and those that run are waited for: what is left is a shorter plan, kept.
    """

    workload: WorkloadFile
    target: Target
    objective: Objective | None = None
    max_in_flight: int = 8_192
    warmup: int = 0
    watch: OpenWatcher = lambda _: None
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> OpenRun:
        bodies, workload_hash = self._bodies(), self.workload.hash
        for index in range(self.warmup):
            if self.stop.is_set():
                break
            like = index % len(self.workload.requests)
            terms = Terms(tenant=self.workload.requests[like].tenant)
            await self.target.ask(-1 - index, self._warm_body(like, f"warm-up:{workload_hash}:{index}"), terms)
        tally = _Tally()
        start_s, cpu_s = time.monotonic() + LEAD_S, time.process_time()
        teller = asyncio.create_task(self._tell(tally, start_s))
        try:
            stopped_s = await self._offer(bodies, tally, start_s)
        finally:
            teller.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await teller
        return OpenRun(
            outcomes=tuple(sorted(tally.outcomes, key=lambda outcome: outcome.index)),
            start_s=start_s,
            seconds=max((outcome.ended_s for outcome in tally.outcomes), default=start_s) - start_s,
            cpu_s=time.process_time() - cpu_s,
            stopped_s=stopped_s,
        )

    async def _offer(self, bodies: dict[int, dict[str, object]], tally: _Tally, start_s: float) -> float | None:
        """Seconds after which it was stopped, None where all was offered; in both cases after the last end."""
        stopped_s: float | None = None
        async with asyncio.TaskGroup() as running:
            for index, request in enumerate(self.workload.requests):
                body = bodies.pop(index, None) or self.workload.body(index)
                planned_s = start_s + request.at_s
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, planned_s - time.monotonic())):
                        await self.stop.wait()
                if self.stop.is_set():
                    stopped_s = max(0.0, time.monotonic() - start_s)
                    break
                tally.sent += 1
                if tally.sent - len(tally.outcomes) > self.max_in_flight:
                    now_s = time.monotonic()
                    full = Outcome(
                        index=index, planned_s=planned_s, sent_s=now_s, ended_s=now_s, error="not_sent",
                        tenant=request.tenant,
                    )  # fmt: skip
                    tally.take(full, self.objective)
                    continue
                after_s = request.cancel_after_s
                terms = Terms(
                    planned_s=planned_s,
                    cancel_s=None if after_s is None else planned_s + after_s,
                    tenant=request.tenant,
                    priority=request.priority,
                    deadline_ms=request.deadline_ms,
                )
                running.create_task(self._one(index, body, terms, tally))
        return stopped_s

    async def _one(self, index: int, body: dict[str, object], terms: Terms, tally: _Tally) -> None:
        tally.take(await self.target.ask(index, body, terms), self.objective)

    def _warm_body(self, index: int, seed: str) -> dict[str, object]:
        """Of the request of that index, with another prompt of about its length."""
        body, length = self.workload.body(index), self.workload.estimated_prompt_tokens(index)
        prompt = Prompt(words=length) if isinstance(body["prompt"], str) else Prompt(tokens=length)
        return {**body, "prompt": prompt.drawn(seed)}

    def _bodies(self) -> dict[int, dict[str, object]]:
        """By index, as many as are drawn before the start, so that no request waits for the drawing of another's."""
        found: dict[int, dict[str, object]] = {}
        size = 0
        for index in range(len(self.workload.requests)):
            body = found[index] = self.workload.body(index)
            prompt = body["prompt"]
            size += len(prompt) if isinstance(prompt, str) else BYTES_PER_ID * len(prompt)  # type: ignore[arg-type]
            if size > MAX_PREPARED_BYTES:
                break
        return found

    async def _tell(self, tally: _Tally, start_s: float) -> None:
        while True:
            self.watch(
                OpenStanding(
                    requests=len(self.workload.requests),
                    planned_s=self.workload.duration_s,
                    seconds=max(0.0, time.monotonic() - start_s),
                    sent=tally.sent,
                    ended=len(tally.outcomes),
                    refused=tally.refused,
                    failed=tally.failed,
                    good=None if self.objective is None else tally.good,
                    late_ms=tally.late_ms,
                )
            )
            await asyncio.sleep(TELL_S)
