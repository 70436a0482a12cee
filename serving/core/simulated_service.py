"""A service in simulated time: the real scheduler, with steps that last as long as measured ones.

The loop of each replica is that of ``engine.StepLoop``: drain the inbox, plan what fits, collect the oldest step.
Tokens have no content here; a request ends at max_tokens, its deadline or its cancel. A request goes to the replica
with the fewest tokens (of prompt and answer) that are not done, the first of several.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.cost_model import CostModel, load_of_plan, quantile
from headrace.serving.core.events import Event, Finished, Preempted, TokenEvent
from headrace.serving.core.plan import SampledToken, StepPlan, StepResult
from headrace.serving.core.request import CancelReason, FinishReason, Rejection, Request, RequestId
from headrace.serving.core.scheduler import Scheduler, SchedulerStats
from headrace.serving.core.simulated_draw import Draw

NUM_SAMPLES = 2_000
"""Points of a replica's course that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRequest:
    """request.request_id: its index. cancel_after_s: from at_s on; None = never."""

    at_s: float
    request: Request
    cancel_after_s: float | None = None


@dataclass(slots=True, kw_only=True)
class ServiceOutcome:
    """Times in seconds from the start, as the client has them. refused: reason and hint; its ended_s is when it heard.
    finished: how it ended, if it was accepted. tokens_s: of every token."""

    at_s: float
    request: Request
    replica: int = 0
    refused: Rejection | None = None
    tokens_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    finished: Finished | None = None
    num_preempted: int = 0

    @property
    def is_good(self) -> bool:
        return self.finished is not None and self.finished.reason in (FinishReason.STOP, FinishReason.LENGTH)

    @property
    def first_token_ms(self) -> float | None:
        return 1e3 * (self.tokens_s[0] - self.at_s) if self.tokens_s else None

    @property
    def gaps_ms(self) -> list[float]:
        return [1e3 * (b - a) for a, b in zip(self.tokens_s, self.tokens_s[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Sample:
    """Of one replica at a time."""

    at_s: float
    replica: int
    stats: SchedulerStats


class Gate(Protocol):
    """What the edge does before a request reaches the engine of a replica."""

    def refuse(self, request: Request, now_s: float) -> Rejection | None:
        """None: it is counted from now on."""
        ...

    def see(self, events: list[Event], stats: SchedulerStats, now_s: float) -> None:
        """Of one step."""
        ...

    def forget(self, request_id: RequestId, now_s: float) -> None:
        """The engine refused it."""
        ...


class OpenGate:
    """Lets everything through; the scheduler's own limits remain."""

    def refuse(self, request: Request, now_s: float) -> Rejection | None:
        """See ``Gate``."""
        return None

    def see(self, events: list[Event], stats: SchedulerStats, now_s: float) -> None:
        """See ``Gate``."""

    def forget(self, request_id: RequestId, now_s: float) -> None:
        """See ``Gate``."""


@dataclass(slots=True)
class _InFlight:
    plan: StepPlan
    dispatched_s: float


class Replica:
    """One engine with its edge. Its clock runs ahead of a request's arrival by at most one turn of the loop, as a real
    loop is in the middle of a step when a request comes."""

    def __init__(
        self, index: int, config: SchedulerConfig, cost: CostModel, gate: Gate, draw: Draw, sample_s: float
    ) -> None:
        self.samples: list[Sample] = []
        self._index = index
        self._scheduler = Scheduler(config)
        self._max_in_flight = config.max_steps_in_flight
        self._cost, self._gate, self._draw = cost, gate, draw
        self._clock_s = 0.0
        self._free_s = 0.0
        """When the device has done the last step that was collected."""
        self._in_flight: deque[_InFlight] = deque()
        self._inbox: list[tuple[float, int, RequestId, CancelReason | None]] = []
        self._num_sent = 0
        self._outcomes: dict[RequestId, ServiceOutcome] = {}
        self._sample_s = sample_s
        self.num_undone_tokens = 0

    def offer(self, planned: ServiceRequest) -> ServiceOutcome:
        """At its time; run_until has been called with it."""
        outcome = ServiceOutcome(at_s=planned.at_s, request=planned.request, replica=self._index)
        rejection = self._gate.refuse(planned.request, planned.at_s)
        if rejection is not None:
            outcome.refused, outcome.ended_s = rejection, planned.at_s
            return outcome
        request_id = planned.request.request_id
        self._outcomes[request_id] = outcome
        self.num_undone_tokens += _num_tokens(planned.request)
        self._send(planned.at_s + quantile(self._cost.edge_s, self._uniform()), request_id, None)
        if planned.cancel_after_s is not None:
            self._send(planned.at_s + planned.cancel_after_s, request_id, CancelReason.CLIENT)
        return outcome

    def run_until(self, at_s: float) -> None:
        """Turns of the loop that begin before at_s."""
        while True:
            is_idle = self._scheduler.is_idle and not self._in_flight
            if is_idle:
                if not self._inbox or self._inbox[0][0] >= at_s:
                    return
                self._clock_s = max(self._clock_s, self._inbox[0][0])
            if self._clock_s >= at_s:
                return
            self._turn()

    def _turn(self) -> None:
        self._drain_inbox()
        self._take(self._scheduler.expire(self._clock_s))
        while len(self._in_flight) < self._max_in_flight:
            plan = self._scheduler.plan_step(self._clock_s)
            if plan is None:
                break
            self._in_flight.append(_InFlight(plan, self._clock_s))
        if not self._in_flight:
            return
        step = self._in_flight.popleft()
        lasts_s = self._cost.step_s(load_of_plan(step.plan), self._uniform())
        self._free_s = max(step.dispatched_s, self._free_s) + lasts_s
        self._clock_s = max(self._clock_s, self._free_s)
        self._take(self._scheduler.apply_result(step.plan, _result(step.plan), self._clock_s))
        self._clock_s += quantile(self._cost.host_s, self._uniform())
        if not self.samples or self._clock_s >= self.samples[-1].at_s + self._sample_s:
            self.samples.append(Sample(self._clock_s, self._index, self._scheduler.stats()))

    def _drain_inbox(self) -> None:
        while self._inbox and self._inbox[0][0] <= self._clock_s:
            _, _, request_id, cancel = heapq.heappop(self._inbox)
            outcome = self._outcomes.get(request_id)
            if outcome is None:
                continue
            if cancel is not None:
                self._take(self._scheduler.cancel(request_id, cancel, self._clock_s))
                continue
            rejection = self._scheduler.submit(outcome.request, self._clock_s)
            if rejection is not None:
                outcome.refused, outcome.ended_s = rejection, self._clock_s
                self._gate.forget(request_id, self._clock_s)
                self._close(request_id)

    def _take(self, events: list[Event]) -> None:
        for event in events:
            outcome = self._outcomes[event.request_id]
            if isinstance(event, TokenEvent):
                outcome.tokens_s.append(self._clock_s)
            elif isinstance(event, Preempted):
                outcome.num_preempted += 1
            else:
                outcome.finished, outcome.ended_s = event, self._clock_s
                self._close(event.request_id)
        self._gate.see(events, self._scheduler.stats(), self._clock_s)

    def _close(self, request_id: RequestId) -> None:
        self.num_undone_tokens -= _num_tokens(self._outcomes.pop(request_id).request)

    def _send(self, at_s: float, request_id: RequestId, cancel: CancelReason | None) -> None:
        self._num_sent += 1
        heapq.heappush(self._inbox, (at_s, self._num_sent, request_id, cancel))

    def _uniform(self) -> float:
        return self._draw.below(2**32) / 2**32


def simulate_service(
    arrivals: Iterable[ServiceRequest],
    config: SchedulerConfig,
    cost: CostModel,
    gates: list[Gate],
    *,
    seed: int = 0,
    duration_s: float = 60.0,
) -> tuple[list[ServiceOutcome], list[Sample]]:
    """arrivals: ascending by at_s. gates: one for each replica."""
    replicas = [
        Replica(i, config, cost, gate, Draw(seed * 1_000 + i), duration_s / NUM_SAMPLES) for i, gate in enumerate(gates)
    ]
    outcomes = list(_offer_all(arrivals, replicas))
    for replica in replicas:
        replica.run_until(float("inf"))
    samples = [sample for replica in replicas for sample in replica.samples]
    return outcomes, sorted(samples, key=lambda sample: (sample.at_s, sample.replica))


def _offer_all(arrivals: Iterable[ServiceRequest], replicas: list[Replica]) -> Iterator[ServiceOutcome]:
    for planned in arrivals:
        for replica in replicas:
            replica.run_until(planned.at_s)
        yield min(replicas, key=lambda replica: replica.num_undone_tokens).offer(planned)


def _num_tokens(request: Request) -> int:
    return len(request.prompt_ids) + request.stop.max_tokens


def _result(plan: StepPlan) -> StepResult:
    token = SampledToken(token_id=0)
    return StepResult(
        step_id=plan.step_id,
        decode=(token,) * len(plan.decode),
        prefill=tuple(token if segment.samples else None for segment in plan.prefill),
    )
