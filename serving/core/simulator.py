"""Deterministic simulation: the very scheduler that serves, in a seeded world, checked after every event.

The model is passed in. It must compute what it reads through the page tables (``engine.fake_runner`` does), so that
any wrong use of memory changes an output or raises. A failing seed fails again, in the same tick.
"""

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.serving.core.events import Event, Finished, Preempted, TokenEvent
from headrace.serving.core.plan import SampledToken, StepPlan, StepResult
from headrace.serving.core.policy import MAX_OPTIMISTIC_PREEMPTIONS
from headrace.serving.core.prefix_cache import PageHash, sha256_page
from headrace.serving.core.request import CancelReason, FinishReason, RejectionReason, Request, RequestId
from headrace.serving.core.scheduler import NON_FINITE, Scheduler
from headrace.serving.core.simulated_world import Draw, World

FAILED_STEP = "failed_step"
"""error_code of requests whose step the simulator let fail."""
SECONDS_PER_TICK = 0.01


class Model(Protocol):
    """The part of ``engine.ports.Runner`` that a simulation needs, and poison."""

    def dispatch(self, plan: StepPlan) -> Any: ...

    def collect(self, ticket: Any) -> StepResult: ...

    def poison(self, page: int) -> None:
        """The page is free now: a later read of what it holds is an error."""
        ...


class SimulationFailure(AssertionError):
    """A broken promise; the text holds seed, tick and the last events."""


@dataclass(slots=True)
class Log:
    """What the outside has seen of one request."""

    request: Request
    tokens: list[TokenEvent] = field(default_factory=list)
    finished: Finished | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """trace_hash covers every plan and event."""

    num_ticks: int
    num_steps: int
    num_preemptions: int
    num_hit_tokens: int
    num_refused: int
    finished: tuple[Finished, ...]
    trace_hash: str


def weak_page_hash(num_digests: int) -> PageHash:
    """A prefix hash of at most 256 values, which collides all the time."""

    def hash_page(parent: bytes, token_ids: tuple[int, ...]) -> bytes:
        return bytes([sha256_page(parent, token_ids)[0] % num_digests])

    return hash_page


class Simulation:
    """One run of one world. expected gives all tokens of a request that runs to its end alone."""

    def __init__(
        self,
        world: World,
        model: Model,
        expected: Callable[[Request], tuple[SampledToken, ...]],
    ) -> None:
        self._world = world
        self._model = model
        self._expected = expected
        hash_page = sha256_page if world.num_digests is None else weak_page_hash(world.num_digests)
        self._scheduler = Scheduler(world.config, hash_page=hash_page)
        self._draw = Draw(world.seed ^ 0x5EED)
        self._in_flight: deque[tuple[StepPlan, Any]] = deque()
        self._logs: dict[RequestId, Log] = {}
        self._num_refused = 0
        self._tick = 0
        self._trace: list[str] = []

    def run(self) -> Report:
        """Raises SimulationFailure with the first broken promise."""
        try:
            last_tick = self._last_tick()
            while self._tick <= self._last_scheduled() or not self._scheduler.is_idle:
                self._require(self._tick <= last_tick, "work remains, but nothing ends any more")
                self._run_tick()
                self._tick += 1
            self._check_end()
        except SimulationFailure:
            raise
        except Exception as error:
            raise self._failure(f"{type(error).__name__}: {error}") from error
        stats = self._scheduler.stats()
        return Report(
            num_ticks=self._tick,
            num_steps=stats.steps,
            num_preemptions=stats.preemptions,
            num_hit_tokens=stats.prefix_hits_tokens,
            num_refused=self._num_refused,
            finished=tuple(log.finished for log in self._logs.values() if log.finished is not None),
            trace_hash=hashlib.sha256("\n".join(self._trace).encode()).hexdigest(),
        )

    @property
    def _now_s(self) -> float:
        return self._tick * SECONDS_PER_TICK

    def _run_tick(self) -> None:
        world, scheduler = self._world, self._scheduler
        if self._tick == world.drain_tick:
            scheduler.drain()
        for tick, request in world.arrivals:
            if tick == self._tick:
                self._submit(request)
        self._cancel()
        plan = scheduler.plan_step(self._now_s)
        if plan is not None:
            self._check_plan(plan)
            self._note(plan)
            self._in_flight.append((plan, self._model.dispatch(plan)))
        self._after_event()
        is_full = len(self._in_flight) == world.config.max_steps_in_flight
        if self._in_flight and (plan is None or is_full or self._draw.chance(world.collect_early_percent)):
            self._collect()
        else:
            self._require(plan is not None or scheduler.is_idle, "work waits, but no step is planned or in flight")

    def _submit(self, request: Request) -> None:
        rejection = self._scheduler.submit(request, self._now_s)
        config = self._world.config
        size = len(request.prompt_ids) + request.stop.max_tokens
        fits = size <= min(config.max_context, (config.num_pages - 1) * config.page_size + 1)
        if rejection is None:
            self._require(fits, f"request {request.request_id} can never fit, but was accepted")
            self._require(self._scheduler.stats().waiting <= config.max_queued_requests, "the queue takes too many")
            self._logs[request.request_id] = Log(request)
        else:
            self._num_refused += 1
            is_size = rejection.reason in (RejectionReason.CONTEXT_EXCEEDED, RejectionReason.NEVER_FITS)
            is_late = rejection.reason == RejectionReason.SHUTTING_DOWN
            drain_tick = self._world.drain_tick
            self._require(is_late == (drain_tick is not None and drain_tick <= self._tick), "refused by drain wrongly")
            self._require(is_late or is_size != fits, f"request {request.request_id} was refused wrongly: {rejection}")
        self._after_event()

    def _cancel(self) -> None:
        for tick, request_id in self._world.cancels:
            if tick == self._tick:
                log = self._logs.get(request_id)
                is_live = log is not None and log.finished is None
                events = self._scheduler.cancel(request_id, CancelReason.CLIENT, self._now_s)
                self._require(len(events) == is_live, "a cancel must end a live request, and do nothing else")
                self._take(events)
                self._after_event()

    def _collect(self) -> None:
        plan, ticket = self._in_flight.popleft()
        result = self._model.collect(ticket)
        if self._tick in self._world.fail_ticks:
            self._take(self._scheduler.fail_plan(plan, FAILED_STEP, "the step failed", self._now_s))
        else:
            self._take(self._scheduler.apply_result(plan, result, self._now_s))
        self._after_event()

    def _take(self, events: list[Event]) -> None:
        for event in events:
            self._note(event)
            log = self._logs.get(event.request_id)
            if log is None:
                raise self._failure(f"an event for request {event.request_id}, which was never accepted")
            self._require(log.finished is None, f"request {event.request_id} has an event after its end")
            if isinstance(event, TokenEvent):
                self._require(event.index == len(log.tokens), f"request {event.request_id} repeats or skips a token")
                log.tokens.append(event)
            elif isinstance(event, Preempted):
                self._require(bool(event.num_pages), f"request {event.request_id} was preempted without a page")
            else:
                log.finished = event
                self._check_finished(log, event)

    def _after_event(self) -> None:
        """Internal invariants, pages of plans in flight, bounds, poison."""
        scheduler, config = self._scheduler, self._world.config
        scheduler.check(deep=True)
        for plan, _ in self._in_flight:
            for row in plan.decode + plan.prefill:
                pool = scheduler.lanes[config.lane_of_slot(row.slot.slot)].memory.pool
                self._require(
                    all(pool.num_holders(page) for page in row.page_ids), "a page of a plan in flight was given back"
                )
        for lane in scheduler.lanes:
            for page in lane.memory.pool.free_pages:
                self._model.poison(page)
        self._require(
            scheduler.stats().running <= config.num_lanes * config.num_slots, "more sequences run than there are slots"
        )

    def _check_plan(self, plan: StepPlan) -> None:
        """Pages that get written have one owner and are unknown to the cache."""
        config = self._world.config
        pools, size = [lane.memory.pool for lane in self._scheduler.lanes], config.page_size
        written = [row.page_ids[row.position // size] for row in plan.decode]
        written += [page for segment in plan.prefill for page in segment.page_ids[segment.start // size :]]
        self._require(len(set(written)) == len(written), "two rows write one page")
        self._require(
            all(
                pool.num_holders(page) == 1 and not pool.is_published(page)
                for page in written
                for pool in [pools[config.lane_of_page(page)]]
            ),
            "a plan writes a shared page",
        )

    def _check_finished(self, log: Log, finished: Finished) -> None:
        request, name = log.request, f"request {log.request.request_id}"
        tokens = [SampledToken(token_id=t.token_id, logprobs=t.logprobs) for t in log.tokens]
        expected = list(self._expected(request))
        if finished.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._require(tokens == expected, f"{name} differs from its run alone")
            stops = tokens[-1].token_id in request.stop.stop_token_ids and len(tokens) >= request.stop.min_tokens
            self._require(
                finished.stop_token_id == (tokens[-1].token_id if stops else None)
                and stops == (finished.reason == FinishReason.STOP),
                f"{name} ended with the wrong reason",
            )
        else:
            self._require(tokens == expected[: len(tokens)], f"{name} differs from its run alone before its end")
        is_non_finite = (request.request_id, len(tokens)) in self._world.non_finite
        if finished.reason == FinishReason.ERROR:
            code = finished.error_code
            self._require(code == FAILED_STEP or (code == NON_FINITE and is_non_finite), f"{name} failed for no reason")
        elif finished.reason != FinishReason.CANCELLED:
            lost = any((request.request_id, i) in self._world.non_finite for i in range(len(tokens)))
            self._require(not lost, f"{name} has a token from logits that are not finite")
        cached, times = finished.cached_tokens, finished.timings
        self._require(
            0 <= cached < len(request.prompt_ids) and cached % self._world.config.page_size == 0,
            f"{name} has an impossible cached_tokens",
        )
        self._require(
            finished.prompt_tokens == len(request.prompt_ids) and finished.completion_tokens == len(tokens),
            f"{name} has wrong usage",
        )
        self._require(times.preemptions <= MAX_OPTIMISTIC_PREEMPTIONS, f"{name} was preempted too often")
        self._require(min(times.queue_ms, times.prefill_ms, times.decode_ms) >= 0, f"{name} has a negative time")

    def _check_end(self) -> None:
        stats = self._scheduler.stats()
        finished = [log.finished for log in self._logs.values() if log.finished is not None]
        self._require(len(finished) == len(self._logs), "an accepted request has not ended")
        self._require(not self._in_flight and stats.running == stats.waiting == 0, "idle, but something is left")
        self._require(stats.pages_free + stats.pages_cached == stats.pages_total, "pages have not come back")
        self._require(
            stats.prompt_tokens == sum(f.prompt_tokens for f in finished)
            and stats.generation_tokens == sum(f.completion_tokens for f in finished)
            and stats.preemptions == sum(f.timings.preemptions for f in finished)
            and stats.prefix_hits_tokens == sum(f.cached_tokens for f in finished),
            "counters differ from the sums over requests",
        )

    def _last_scheduled(self) -> int:
        return max(tick for tick, _ in self._world.arrivals)

    def _last_tick(self) -> int:
        """By then all must have ended: all requests one after the other, each recomputed as often as may be."""
        chunk = self._world.config.chunk_tokens
        steps = sum(
            (MAX_OPTIMISTIC_PREEMPTIONS + 1)
            * (-(-(len(r.prompt_ids) + r.stop.max_tokens) // chunk) + r.stop.max_tokens + 4)
            for _, r in self._world.arrivals
        )
        return self._last_scheduled() + 2 * steps

    def _note(self, what: StepPlan | Event) -> None:
        self._trace.append(f"{self._tick} {what!r}")

    def _require(self, holds: bool, text: str) -> None:
        if not holds:
            raise self._failure(text)

    def _failure(self, text: str) -> SimulationFailure:
        recent = "\n".join(self._trace[-8:])
        return SimulationFailure(f"seed {self._world.seed}, tick {self._tick}: {text}\n{recent}")
