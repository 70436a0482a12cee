"""Deterministic simulation: the very scheduler that serves, in a seeded world, checked after every event.

The model is passed in. It must compute what it reads through the page tables (``engine.fake_runner`` does), so that
any wrong use of memory changes an output or raises. A failing seed fails again, in the same tick.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from headrace.serving.core.events import Event, Finished, Preempted
from headrace.serving.core.plan import SampledToken, StepPlan, StepResult
from headrace.serving.core.policy import MAX_PREEMPTIONS
from headrace.serving.core.prefix_cache import PageHash, sha256_page
from headrace.serving.core.request import CancelReason, RejectionReason, Request, RequestId
from headrace.serving.core.scheduler import Scheduler
from headrace.serving.core.simulated_checks import (
    FAILED_STEP,
    PlanChecks,
    check_answer,
    check_counters,
    check_finished,
    check_state,
)
from headrace.serving.core.simulated_draw import Draw
from headrace.serving.core.simulated_edge import Broken, Client, SimulatedEdge, need
from headrace.serving.core.simulated_trace import Trace, event_line, plan_line
from headrace.serving.core.simulated_world import Arrival, World
from headrace.serving.core.world_source import world_source

RETRY_ID = 1_000
"""Added to the id of a request that its client sends again after a restart."""
MAX_SILENT_TICKS = 400
"""Work that exists gives a token or an end within so many: the longest prompt here takes 64 steps, and may start over
a few times."""


class Model(Protocol):
    """The part of ``engine.ports.Runner`` that a simulation needs, and poison."""

    def dispatch(self, plan: StepPlan) -> Any: ...

    def collect(self, ticket: Any) -> StepResult: ...

    def poison(self, page: int) -> None:
        """The page is free now: a later read of what it holds is an error."""
        ...

    def poison_host(self, host_page: int) -> None:
        """The same for a host page."""
        ...


class SimulationFailure(AssertionError):
    """A broken promise; the text holds seed, tick, the world, the last events and the trace hash."""

    def __init__(self, world: World, tick: int, broken: str, trace: Trace) -> None:
        super().__init__(
            f"seed {world.seed}, tick {tick}: {broken}\n"
            f"again: make simulate SEED0={world.seed} SEEDS=1\ntrace {trace.hash}, last lines:\n{trace.recent}\n"
            f"world:\n{world_source(world)}"
        )
        self.world, self.tick, self.broken = world, tick, broken

    def __reduce__(self) -> tuple[type[Exception], tuple[str]]:
        return (AssertionError, (str(self),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """trace_hash covers every plan and event. covered: how often what happened, so that seeds which reach nothing are
    seen; its names are fixed, zeros left out."""

    num_ticks: int
    num_steps: int
    finished: tuple[Finished, ...]
    covered: Mapping[str, int]
    trace_hash: str


def weak_page_hash(num_digests: int) -> PageHash:
    """A prefix hash of at most 256 values, which collides all the time."""

    def hash_page(parent: bytes, token_ids: tuple[int, ...]) -> bytes:
        return bytes([sha256_page(parent, token_ids)[0] % num_digests])

    return hash_page


class Simulation:
    """One run of one world. make_model: a fresh model, one for each life of the engine. expected: all tokens of a
    request that runs to its end alone."""

    def __init__(
        self,
        world: World,
        make_model: Callable[[], Model],
        expected: Callable[[Request], tuple[SampledToken, ...]],
    ) -> None:
        self._world = world
        self._make_model = make_model
        self._expected = expected
        self._draw = Draw(world.seed ^ 0x5EED)
        self._edge = SimulatedEdge(world.stall_ticks)
        self._arrivals = deque(world.arrivals)
        self._covered: Counter[str] = Counter()
        self._trace = Trace()
        self._tick = 0
        self._now_us = 0
        self._num_steps = 0
        self._is_draining = False
        self._last_news = 0
        self._start_engine()

    def run(self) -> Report:
        """Raises SimulationFailure with the first broken promise."""
        world = self._world
        try:
            last_tick = self._last_tick()
            while self._arrivals or self._tick <= world.faults.last_tick or not self._is_idle:
                need(self._tick <= last_tick, "I10", "work remains, but nothing ends any more")
                self._run_tick()
                self._tick += 1
            need(not self._in_flight, "I10", "idle, but a step is in flight")
            check_counters(world, self._scheduler, self._own_clients)
        except Broken as broken:
            raise SimulationFailure(world, self._tick, str(broken), self._trace) from None
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise SimulationFailure(world, self._tick, text, self._trace) from error
        self._cover_world()
        clients = self._edge.clients.values()
        return Report(
            num_ticks=self._tick,
            num_steps=self._num_steps + self._scheduler.stats().steps,
            finished=tuple(client.finished for client in clients if client.finished is not None),
            covered={name: self._covered[name] for name in sorted(self._covered) if self._covered[name]},
            trace_hash=self._trace.hash,
        )

    @property
    def _is_idle(self) -> bool:
        return self._scheduler.is_idle and self._edge.is_idle

    @property
    def _now_s(self) -> float:
        return self._now_us / 1e6

    def _start_engine(self) -> None:
        world = self._world
        hash_page = sha256_page if world.num_digests is None else weak_page_hash(world.num_digests)
        self._scheduler = Scheduler(world.config, hash_page=hash_page)
        self._model = self._make_model()
        self._in_flight: deque[tuple[StepPlan, Any]] = deque()
        self._own_clients: list[Client] = []
        self._plan_checks = PlanChecks(world, self._scheduler, self._edge.clients)
        if self._is_draining:
            self._scheduler.drain()

    def _run_tick(self) -> None:
        if self._scheduler.is_idle and not self._arrivals and self._tick > self._world.faults.last_tick:
            self._edge.turn(self._tick)
            return
        self._break_things()
        while self._arrivals and self._arrivals[0].tick <= self._tick:
            self._submit(self._arrivals.popleft())
        self._cancel()
        plan = self._plan()
        is_full = len(self._in_flight) == self._world.config.max_steps_in_flight
        if self._in_flight and (plan is None or is_full or self._draw.chance(self._world.collect_early_percent)):
            self._collect()
        else:
            self._now_us += self._world.step_us
            need(plan is not None or self._scheduler.is_idle, "I10", "work waits, but no step is planned or in flight")
        for request_id in self._edge.turn(self._tick):
            self._end(request_id, CancelReason.SLOW_CLIENT)
        if self._scheduler.is_idle:
            self._last_news = self._tick
        need(self._tick - self._last_news <= MAX_SILENT_TICKS, "I9", "work exists, but gives no token and no end")

    def _plan(self) -> StepPlan | None:
        self._take(self._scheduler.expire(self._now_s))
        planned_us = self._now_us
        plan = self._scheduler.plan_step(self._now_s)
        if plan is not None:
            self._note(plan_line(plan))
            self._plan_checks.check(plan, planned_us)
            self._in_flight.append((plan, self._model.dispatch(plan)))
            self._covered["steps with prefill"] += bool(plan.prefill)
            self._covered["pages swapped out"] += len(plan.swap_out)
            self._covered["pages swapped in"] += len(plan.swap_in)
        self._check_state()
        return plan

    # What comes from outside

    def _break_things(self) -> None:
        faults, tick = self._world.faults, self._tick
        self._now_us += sum(1_000 * ms for at, ms in faults.jumps if at == tick)
        if tick in faults.restarts:
            self._restart()
        if tick == faults.drain_tick:
            self._is_draining = True
            self._scheduler.drain()
        for at, k in faults.evictions:
            for _ in range(k if at == tick else 0):
                self._evict()
        for at, k in faults.forced:
            if at == tick:
                self._force(k)

    def _restart(self) -> None:
        """All live requests end typed, by the edge, which alone knows that the engine died; clients try again."""
        self._num_steps += self._scheduler.stats().steps
        self._note("restart")
        lost = self._edge.live
        for client in lost:
            client.is_lost = True
        again = [
            Arrival(
                tick=self._tick + 1,
                request=replace(client.request, request_id=RequestId(client.request.request_id + RETRY_ID)),
                reader=client.reader,
            )
            for client in lost
        ]
        self._arrivals = deque(sorted((*self._arrivals, *again), key=lambda arrival: arrival.tick))
        self._covered["requests lost by a restart"] += len(lost)
        self._start_engine()

    def _evict(self) -> None:
        for lane in self._scheduler.lanes:
            if lane.memory.pool.num_cached:
                lane.memory.cache.evict()
                self._covered["evictions by force"] += 1
        self._check_state()

    def _force(self, k: int) -> None:
        """The k-th live request, counted around; the scheduler leaves one alone that waits."""
        ids = [client.request.request_id for client in self._edge.live]
        if ids:
            self._take(self._scheduler.preempt(ids[k % len(ids)], self._now_s))
            self._check_state()

    def _submit(self, arrival: Arrival) -> None:
        request = arrival.request
        waiting = self._scheduler.stats().waiting
        rejection = self._scheduler.submit(request, self._now_s)
        check_answer(self._world, self._scheduler, request, rejection, waiting, self._is_draining)
        if rejection is None:
            client = Client(request, arrival.reader, self._now_us, arrival.cancel_after)
            self._edge.open(client)
            self._own_clients.append(client)
            self._last_news = self._tick
            self._note(f"accepted #{request.request_id} {' '.join(map(str, request.prompt_ids))}")
        else:
            self._covered[f"refused: {rejection.reason.value}"] += 1
            self._note(f"refused #{request.request_id} {rejection.reason.value} {rejection.retry_after_ms}")
        self._check_state()

    def _cancel(self) -> None:
        for tick, request_id in self._world.faults.cancels:
            if tick == self._tick:
                self._end(request_id, CancelReason.CLIENT)
        for tick, request_id in self._world.faults.duplicates:
            client = self._edge.clients.get(request_id)
            if tick == self._tick and client is not None and client.is_live:
                rejection = self._scheduler.submit(client.request, self._now_s)
                reasons = (RejectionReason.SHUTTING_DOWN,) if self._is_draining else (RejectionReason.INVALID,)
                need(rejection is not None and rejection.reason in reasons, "I4", "an id in use was accepted again")
                self._covered["duplicate ids"] += 1
        for client in self._edge.live:
            if client.cancel_after is not None and len(client.tokens) >= client.cancel_after:
                self._covered["cancels with the last sample in flight"] += (
                    client.cancel_after == client.request.stop.max_tokens - 1
                )
                self._end(client.request.request_id, CancelReason.DISCONNECT)

    def _end(self, request_id: RequestId, reason: CancelReason) -> None:
        client = self._edge.clients.get(request_id)
        is_live = client is not None and client.is_live
        events = self._scheduler.cancel(request_id, reason, self._now_s)
        ended = [event.request_id for event in events if isinstance(event, Finished)]
        need(ended == [request_id] * is_live, "I4", "a cancel must end a live request, and no other")
        self._covered[f"cancelled: {reason.value}"] += is_live
        self._take(events)
        self._check_state()

    # What comes back

    def _collect(self) -> None:
        plan, ticket = self._in_flight.popleft()
        result = self._model.collect(ticket)
        self._now_us += self._world.step_us + self._world.token_us * plan.num_tokens
        if self._tick in self._world.faults.fails:
            self._note(f"step {plan.step_id} fails")
            self._covered["failed steps"] += 1
            self._take(self._scheduler.fail_plan(plan, FAILED_STEP, "the step failed", self._now_s))
        else:
            self._take(self._scheduler.apply_result(plan, result, self._now_s))
        self._check_state()

    def _take(self, events: list[Event]) -> None:
        for event in events:
            self._note(event_line(event))
            client = self._edge.take(event)
            if isinstance(event, Finished):
                check_finished(self._world, client, event, self._expected)
                self._cover_finished(event)
            elif isinstance(event, Preempted):
                self._covered[f"preempted: {event.reason.value}, {event.action.value}"] += 1
                continue
            self._last_news = self._tick

    def _check_state(self) -> None:
        check_state(self._world, self._scheduler, (plan for plan, _ in self._in_flight))
        for lane in self._scheduler.lanes:
            for page in lane.memory.pool.free_pages:
                self._model.poison(page)
            for page in lane.host.free_pages:
                self._model.poison_host(page)

    # Bookkeeping

    def _cover_finished(self, event: Finished) -> None:
        self._covered[f"ended: {event.reason.value}"] += 1
        if event.cancel_reason == CancelReason.DEADLINE:
            state = "queue" if not event.timings.prefill_ms else "prefill" if not event.completion_tokens else "decode"
            self._covered[f"deadline missed in {state}"] += 1
        if event.error_code is not None:
            self._covered[f"failed: {event.error_code}"] += 1
        self._covered["tokens from the cache"] += event.cached_tokens

    def _cover_world(self) -> None:
        config, faults = self._world.config, self._world.faults
        for name, holds in (
            ("worlds with several lanes", config.num_lanes > 1),
            ("worlds in deterministic mode", config.deterministic),
            ("worlds with an objective", config.inter_token_s is not None),
            ("worlds with swap", config.num_swap_pages > 0),
            ("worlds with a weak hash", self._world.num_digests is not None),
            ("worlds with clock jumps", bool(faults.jumps or faults.wall_jumps)),
            ("worlds that drain", faults.drain_tick is not None),
            ("worlds with a restart", bool(faults.restarts)),
        ):
            self._covered[name] += holds
        self._covered["slow clients given up"] += self._edge.num_stalled

    def _last_tick(self) -> int:
        """By then all must have ended: all requests one after the other, each started over as often as may be."""
        world = self._world
        tries = (MAX_PREEMPTIONS + 1 + len(world.faults.forced)) * (1 + len(world.faults.restarts))
        steps = sum(
            tries * (-(-(len(r.prompt_ids) + r.stop.max_tokens) // world.config.page_size) + r.stop.max_tokens + 4)
            for r in (arrival.request for arrival in world.arrivals)
        )
        return max(world.last_arrival, world.faults.last_tick) + 2 * steps + 2 * world.stall_ticks + 100

    def _note(self, what: str) -> None:
        self._trace.note(self._tick, what)
