"""Drives a Scheduler with the FakeRunner, checking and poisoning after every event."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.events import Event, Finished, Preempted, TokenEvent
from headrace.serving.core.plan import StepPlan
from headrace.serving.core.request import (
    CancelReason,
    Priority,
    Rejection,
    Request,
    RequestId,
    SamplingParams,
    StopRule,
)
from headrace.serving.core.scheduler import Scheduler
from headrace.serving.engine.fake_runner import FakeRunner, FakeTicket, expected_tokens

VOCAB = 64


def make_config(**changes: Any) -> SchedulerConfig:
    """4 slots, 63 usable pages of 4 tokens, chunks of 16 tokens, two steps in flight."""
    values: dict[str, Any] = {
        "num_slots": 4,
        "page_size": 4,
        "num_pages": 64,
        "max_context": 128,
        "chunk_tokens": 16,
        "block_tokens": 4,
    } | changes
    slots, chunk, block = values["num_slots"], values["chunk_tokens"], values["block_tokens"]
    ladders = {"decode_rows": tuple(sorted({1, slots})), "prefill_tokens": tuple(sorted({block, chunk}))}
    return SchedulerConfig(**(ladders | values))


def make_request(
    request_id: int,
    prompt: tuple[int, ...] | int,
    max_tokens: int = 8,
    *,
    min_tokens: int = 0,
    stop_ids: tuple[int, ...] = (),
    namespace: bytes = b"",
    tenant: str = "",
    weight: float = 1.0,
    priority: Priority = Priority.NORMAL,
    deadline_ms: float | None = None,
    shared: tuple[int, bytes] = (0, b""),
    **sampling: Any,
) -> Request:
    """prompt as a length: distinct tokens that depend on the request id."""
    ids = tuple((request_id * 17 + i * i + 5) % VOCAB for i in range(prompt)) if isinstance(prompt, int) else prompt
    return Request(
        request_id=RequestId(request_id),
        prompt_ids=ids,
        sampling=SamplingParams(**sampling),
        stop=StopRule(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stop_ids),
        cache_namespace=namespace,
        tenant=tenant,
        weight=weight,
        priority=priority,
        deadline_ms=deadline_ms,
        shared_prefix_tokens=shared[0],
        shared_namespace=shared[1],
    )


def ids_alone(request: Request) -> list[int]:
    return [token.token_id for token in expected_tokens(request, VOCAB)]


@dataclass
class Drive:
    """now_s advances by one second per plan and per result."""

    config: SchedulerConfig
    scheduler: Scheduler = None  # type: ignore[assignment]
    non_finite: frozenset[tuple[RequestId, int]] = frozenset()
    now_s: float = 0.0
    in_flight: deque[tuple[StepPlan, FakeTicket]] = field(default_factory=deque)
    plans: list[StepPlan] = field(default_factory=list)
    tokens: dict[int, list[TokenEvent]] = field(default_factory=dict)
    finished: dict[int, Finished] = field(default_factory=dict)
    preempted: list[Preempted] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.scheduler is None:
            self.scheduler = Scheduler(self.config)
        self.runner = FakeRunner(self.config, vocab_size=VOCAB, non_finite=self.non_finite)

    def submit(self, *requests: Request) -> None:
        for request in requests:
            assert self.scheduler.submit(request, self.now_s) is None
            self.tokens[request.request_id] = []

    def refused(self, request: Request) -> Rejection:
        rejection = self.scheduler.submit(request, self.now_s)
        assert rejection is not None
        return rejection

    def plan(self) -> StepPlan | None:
        """Plan and dispatch one step."""
        self.now_s += 1.0
        self.take(self.scheduler.expire(self.now_s))
        plan = self.scheduler.plan_step(self.now_s)
        if plan is not None:
            self.plans.append(plan)
            self.in_flight.append((plan, self.runner.dispatch(plan)))
        self._settled()
        return plan

    def collect(self) -> list[Event]:
        """Apply the result of the oldest step in flight."""
        self.now_s += 1.0
        plan, ticket = self.in_flight.popleft()
        return self.take(self.scheduler.apply_result(plan, self.runner.collect(ticket), self.now_s))

    def fail(self, code: str = "device_error") -> list[Event]:
        """The oldest step in flight fails."""
        plan, ticket = self.in_flight.popleft()
        self.runner.collect(ticket)
        return self.take(self.scheduler.fail_plan(plan, code, "it broke", self.now_s))

    def cancel(self, request_id: int, reason: CancelReason = CancelReason.CLIENT) -> list[Event]:
        return self.take(self.scheduler.cancel(RequestId(request_id), reason, self.now_s))

    def take(self, events: list[Event]) -> list[Event]:
        for event in events:
            assert event.request_id not in self.finished
            if isinstance(event, TokenEvent):
                assert event.index == len(self.tokens[event.request_id])
                self.tokens[event.request_id].append(event)
            elif isinstance(event, Preempted):
                self.preempted.append(event)
            else:
                self.finished[event.request_id] = event
        self._settled()
        return events

    def tick(self) -> None:
        """Plan if possible; collect when nothing was planned or the pipeline is full."""
        plan = self.plan()
        if self.in_flight and (plan is None or len(self.in_flight) == self.config.max_steps_in_flight):
            self.collect()

    def run(self, max_ticks: int = 2_000) -> None:
        """Until idle."""
        for _ in range(max_ticks):
            if self.scheduler.is_idle:
                return
            self.tick()
        raise AssertionError("not idle in time")

    def ids(self, request_id: int) -> list[int]:
        return [event.token_id for event in self.tokens[request_id]]

    def _settled(self) -> None:
        self.scheduler.check(deep=True)
        for lane in self.scheduler.lanes:
            for page in lane.memory.pool.free_pages:
                self.runner.poison(page)
            for page in lane.host.free_pages:
                self.runner.poison_host(page)
