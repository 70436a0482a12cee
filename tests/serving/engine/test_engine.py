"""The step loop with the fake runner, a clock that only the steps move, and an outlet that plays the edge."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.errors import InvariantError
from headrace.serving.core.events import Event, Finished, TokenEvent
from headrace.serving.core.plan import StepPlan, StepResult
from headrace.serving.core.request import (
    CancelReason,
    FinishReason,
    RejectionReason,
    Request,
    RequestId,
    SamplingParams,
    StopRule,
)
from headrace.serving.core.scheduler import Scheduler
from headrace.serving.engine.engine import Engine, EngineFailure, StepLoop
from headrace.serving.engine.fake_runner import FakeRunner, expected_tokens
from headrace.serving.engine.inbox import Inbox
from headrace.serving.engine.messages import Refused, Stats, Step, ToEdge
from headrace.serving.engine.ports import CompiledProgram, Progress, Ticket

VOCAB = 64
HOST_S, DEVICE_S = 0.25, 2.0


class StepClock:
    """Stands still but for what a test adds."""

    def __init__(self) -> None:
        self.now = 100.0

    def now_s(self) -> float:
        return self.now


class TracingRunner:
    """The fake runner; writes down the order of calls, moves the clock, and fails on demand."""

    def __init__(self, config: SchedulerConfig, clock: StepClock) -> None:
        self._inner = FakeRunner(config, vocab_size=VOCAB)
        self._clock = clock
        self.calls: list[str] = []
        self.fail_dispatch: Callable[[StepPlan], Exception | None] = lambda plan: None
        self.fail_collect: Callable[[int], Exception | None] = lambda step_id: None

    def warm_up(self, progress: Progress) -> tuple[CompiledProgram, ...]:
        return self._inner.warm_up(progress)

    def dispatch(self, plan: StepPlan) -> Ticket:
        self._clock.now += HOST_S
        self.calls.append(f"d{plan.step_id}")
        error = self.fail_dispatch(plan)
        if error is not None:
            raise error
        return self._inner.dispatch(plan)

    def collect(self, ticket: Ticket) -> StepResult:
        self._clock.now += DEVICE_S
        self.calls.append(f"c{ticket.step_id}")
        result = self._inner.collect(ticket)
        error = self.fail_collect(ticket.step_id)
        if error is not None:
            raise error
        return result

    def compiles_after_ready(self) -> int:
        return self._inner.compiles_after_ready()


@dataclass
class FakeEdge:
    """Takes the engine's messages; script runs after each, and may put commands into the inbox."""

    inbox: Inbox
    script: Callable[["FakeEdge"], None]
    messages: list[ToEdge] = field(default_factory=list)

    def send(self, message: ToEdge) -> None:
        self.messages.append(message)
        self.script(self)

    @property
    def steps(self) -> list[Step]:
        return [m for m in self.messages if isinstance(m, Step)]

    @property
    def tokens(self) -> list[TokenEvent]:
        return [t for step in self.steps for t in step.tokens]

    @property
    def finished(self) -> list[Finished]:
        return [f for step in self.steps for f in step.finished]

    @property
    def refused(self) -> list[Refused]:
        return [r for step in self.steps for r in step.refused]

    def ids(self, number: int) -> list[int]:
        return [t.token_id for t in self.tokens if t.request_id == number]


class Bench:
    """Everything joined; ``run`` lets the engine run until the edge closes."""

    def __init__(self, **config: int) -> None:
        values = {"num_slots": 4, "num_pages": 65, "max_context": 128, **config}
        self.config = SchedulerConfig(
            page_size=4,
            chunk_tokens=16,
            block_tokens=8,
            decode_rows=(values["num_slots"],),
            prefill_tokens=(8, 16),
            **values,
        )
        self.clock = StepClock()
        self.runner = TracingRunner(self.config, self.clock)
        self.scheduler = Scheduler(self.config)
        self.loop = StepLoop(
            self.scheduler, self.runner, self.clock, max_steps_in_flight=self.config.max_steps_in_flight
        )
        self.inbox = Inbox()

    def run(self, script: Callable[[FakeEdge], None]) -> FakeEdge:
        edge = FakeEdge(self.inbox, script)
        Engine(self.loop, self.clock, self.inbox, edge).run()
        return edge


def request(number: int, *, num_prompt: int = 6, max_tokens: int = 5) -> Request:
    return Request(
        request_id=RequestId(number),
        prompt_ids=tuple((number * 7 + i) % VOCAB for i in range(num_prompt)),
        sampling=SamplingParams(temperature=0.0),
        stop=StopRule(max_tokens=max_tokens),
    )


def expected_ids(r: Request) -> list[int]:
    return [t.token_id for t in expected_tokens(r, VOCAB)]


def close_when_idle(edge: FakeEdge) -> None:
    """The Stats frame comes when the engine is idle."""
    if isinstance(edge.messages[-1], Stats) and edge.messages[-1].nonce is None:
        edge.inbox.close()


def test_tokens_are_right_and_each_request_ends_once() -> None:
    bench = Bench()
    requests = [request(n, num_prompt=5 * n, max_tokens=3 + n) for n in range(1, 8)]
    for r in requests:
        bench.inbox.submit(r)
    edge = bench.run(close_when_idle)
    for r in requests:
        assert edge.ids(r.request_id) == expected_ids(r)
        assert [t.index for t in edge.tokens if t.request_id == r.request_id] == list(range(r.stop.max_tokens))
    assert Counter(f.request_id for f in edge.finished) == {r.request_id: 1 for r in requests}


def test_two_steps_are_in_flight_and_no_more() -> None:
    bench = Bench()
    bench.inbox.submit(request(1, max_tokens=6))
    bench.run(close_when_idle)
    assert bench.runner.calls == ["d0", "d1", "c0", "d2", "c1", "d3", "c2", "d4", "c3", "d5", "c4", "c5"]


def test_one_step_at_a_time_where_so_configured() -> None:
    bench = Bench(max_steps_in_flight=1)
    bench.inbox.submit(request(1, max_tokens=3))
    bench.run(close_when_idle)
    assert bench.runner.calls == ["d0", "c0", "d1", "c1", "d2", "c2"]


def test_one_frame_per_step_and_right_gauges_when_idle() -> None:
    bench = Bench()
    for n in (1, 2, 3):
        bench.inbox.submit(request(n))
    edge = bench.run(close_when_idle)
    assert [s.step_id for s in edge.steps] == sorted({s.step_id for s in edge.steps})
    last = edge.messages[-1]
    assert isinstance(last, Stats)
    assert (last.running, last.waiting, last.pages_free + last.pages_cached) == (0, 0, last.pages_total)
    assert last.steps == len(edge.steps)
    assert last.generation_tokens == len(edge.tokens) == 15
    assert last.prompt_tokens == 18


def test_host_and_device_time_are_told_apart() -> None:
    bench = Bench()
    bench.inbox.submit(request(1, max_tokens=6))
    edge = bench.run(close_when_idle)
    last = edge.messages[-1]
    assert isinstance(last, Stats)
    assert last.host_seconds == 6 * HOST_S
    # From the first dispatch to the last collect something is in flight all the time.
    assert last.device_seconds == 6 * HOST_S + 6 * DEVICE_S


def test_idle_time_counts_for_nobody() -> None:
    bench = Bench()
    bench.inbox.submit(request(1, max_tokens=1))

    def script(edge: FakeEdge) -> None:
        if isinstance(edge.messages[-1], Stats):
            if len(edge.finished) == 2:
                edge.inbox.close()
            else:
                bench.clock.now += 1000.0
                edge.inbox.submit(request(2, max_tokens=1))

    edge = bench.run(script)
    last = edge.messages[-1]
    assert isinstance(last, Stats)
    assert last.device_seconds == 2 * (HOST_S + DEVICE_S)


@pytest.mark.parametrize("after_messages", range(9))
def test_a_cancel_at_any_moment_ends_the_request_once(after_messages: int) -> None:
    """Before the first step, in prefill, in decode, in the step that ends it, and afterwards (O24)."""
    bench = Bench()
    victim, other = request(1, num_prompt=40, max_tokens=3), request(2, max_tokens=9)
    bench.inbox.submit(victim)
    bench.inbox.submit(other)
    if after_messages == 0:
        bench.inbox.cancel(RequestId(1), CancelReason.CLIENT)

    def script(edge: FakeEdge) -> None:
        if len(edge.messages) == after_messages:
            edge.inbox.cancel(RequestId(1), CancelReason.CLIENT)
            edge.inbox.cancel(RequestId(99), CancelReason.CLIENT)
        close_when_idle(edge)

    edge = bench.run(script)
    assert Counter(f.request_id for f in edge.finished) == {1: 1, 2: 1}
    assert edge.ids(2) == expected_ids(other)
    assert edge.ids(1) == expected_ids(victim)[: len(edge.ids(1))]
    (end,) = [f for f in edge.finished if f.request_id == 1]
    if end.reason is FinishReason.CANCELLED:
        assert end.cancel_reason is CancelReason.CLIENT
    else:
        assert edge.ids(1) == expected_ids(victim)
    index = next(i for i, s in enumerate(edge.steps) if end in s.finished)
    assert not [t for s in edge.steps[index + 1 :] for t in s.tokens if t.request_id == 1]


def test_a_mass_cancel_leaves_right_gauges_without_new_traffic() -> None:
    """O27: 64 streams dropped in one moment."""
    bench = Bench()
    for n in range(1, 65):
        bench.inbox.submit(request(n, max_tokens=20))

    def script(edge: FakeEdge) -> None:
        if len(edge.messages) == 3:
            for n in range(1, 65):
                edge.inbox.cancel(RequestId(n), CancelReason.DISCONNECT)
        close_when_idle(edge)

    edge = bench.run(script)
    last = edge.messages[-1]
    assert isinstance(last, Stats)
    assert (last.running, last.waiting, last.pages_free + last.pages_cached) == (0, 0, last.pages_total)
    assert Counter(f.request_id for f in edge.finished) == dict.fromkeys(range(1, 65), 1)
    assert sum(f.completion_tokens for f in edge.finished) == last.generation_tokens


def test_a_step_that_fails_at_collect_ends_its_requests_and_no_other() -> None:
    bench = Bench(num_slots=1)
    first, second = request(1), request(2)
    bench.inbox.submit(first)
    bench.inbox.submit(second)
    bench.runner.fail_collect = lambda step_id: RuntimeError("secret detail") if step_id == 1 else None
    edge = bench.run(close_when_idle)
    failed, done = edge.finished
    assert (failed.request_id, failed.reason, failed.error_code) == (1, FinishReason.ERROR, "step_failed")
    assert failed.error_message is not None
    assert "secret" not in failed.error_message
    assert edge.ids(1) == expected_ids(first)[:1]
    assert (done.request_id, done.reason) == (2, FinishReason.LENGTH)
    assert edge.ids(2) == expected_ids(second)


def test_a_step_that_fails_at_dispatch_waits_for_its_turn() -> None:
    bench = Bench(num_slots=1)
    bench.inbox.submit(request(1))
    bench.inbox.submit(request(2))
    bench.runner.fail_dispatch = lambda plan: RuntimeError("no memory") if plan.step_id == 2 else None
    edge = bench.run(close_when_idle)
    # Step 1 is collected before the failure of step 2 is dealt with; nothing is dispatched in between.
    assert bench.runner.calls[:6] == ["d0", "d1", "c0", "d2", "c1", "d3"]
    assert [(f.request_id, f.reason) for f in edge.finished] == [(1, FinishReason.ERROR), (2, FinishReason.LENGTH)]
    assert edge.ids(1) == expected_ids(request(1))[:2]
    assert edge.ids(2) == expected_ids(request(2))


def test_a_runner_that_only_fails_is_given_up() -> None:
    bench = Bench(num_slots=1)
    for n in range(1, 20):
        bench.inbox.submit(request(n))
    bench.runner.fail_collect = lambda step_id: RuntimeError("device lost")
    with pytest.raises(EngineFailure, match=r"3 steps in a row failed.*device lost"):
        bench.run(close_when_idle)


def test_failures_that_are_not_in_a_row_do_not_add_up() -> None:
    bench = Bench(num_slots=1)
    for n in range(1, 9):
        bench.inbox.submit(request(n, max_tokens=2))
    bench.runner.fail_collect = lambda step_id: RuntimeError("odd") if step_id % 4 == 0 else None
    edge = bench.run(close_when_idle)
    assert len(edge.finished) == 8
    assert {f.reason for f in edge.finished} == {FinishReason.ERROR, FinishReason.LENGTH}


def test_a_broken_invariant_of_the_runner_is_never_survived() -> None:
    bench = Bench()
    bench.inbox.submit(request(1))
    bench.runner.fail_collect = lambda step_id: InvariantError("two tenants")
    with pytest.raises(InvariantError, match="two tenants"):
        bench.run(close_when_idle)


def test_the_books_are_checked_when_the_engine_gets_idle() -> None:
    bench = Bench()
    bench.inbox.submit(request(1))

    def script(edge: FakeEdge) -> None:
        if len(edge.finished) == 1:
            bench.scheduler.memory.pool.alloc()  # a page that nobody will give back

    with pytest.raises(InvariantError):
        bench.run(script)


def test_a_scheduler_that_plans_nothing_while_requests_wait_is_an_error_not_a_busy_loop() -> None:
    class Stalled(Scheduler):
        def plan_step(self, now_s: float) -> StepPlan | None:
            return None

    bench = Bench()
    loop = StepLoop(Stalled(bench.config), bench.runner, bench.clock)
    assert loop.turn() is None
    loop.submit(request(1))
    with pytest.raises(InvariantError, match="plans no step"):
        loop.turn()


def test_refusals_are_answered() -> None:
    bench = Bench()
    bench.inbox.submit(request(1, num_prompt=200))
    bench.inbox.submit(request(2))
    edge = bench.run(close_when_idle)
    (refused,) = edge.refused
    assert refused.request_id == 1
    assert refused.rejection.reason is RejectionReason.CONTEXT_EXCEEDED
    assert [f.request_id for f in edge.finished] == [2]


def test_drain_finishes_what_was_sent_before_and_refuses_what_comes_after() -> None:
    """O28: streams go on at full pace during the drain."""
    bench = Bench()
    bench.inbox.submit(request(1))
    bench.inbox.drain()

    def script(edge: FakeEdge) -> None:
        if len(edge.messages) == 2:
            edge.inbox.submit(request(2))
        close_when_idle(edge)

    edge = bench.run(script)
    assert edge.ids(1) == expected_ids(request(1))
    assert [f.reason for f in edge.finished] == [FinishReason.LENGTH]
    assert [(r.request_id, r.rejection.reason) for r in edge.refused] == [(2, RejectionReason.SHUTTING_DOWN)]


def test_probes_are_answered_idle_and_busy() -> None:
    bench = Bench()
    bench.inbox.probe(11)

    def script(edge: FakeEdge) -> None:
        last = edge.messages[-1]
        if len(edge.messages) == 1:
            edge.inbox.submit(request(1))
        elif len(edge.messages) == 3:
            edge.inbox.probe(12)
        elif isinstance(last, Stats) and last.nonce is None:
            edge.inbox.close()

    edge = bench.run(script)
    assert [m.nonce for m in edge.messages if isinstance(m, Stats)] == [11, 12, None]


def test_an_edge_that_is_gone_ends_the_loop_though_requests_run() -> None:
    bench = Bench()
    bench.inbox.submit(request(1, max_tokens=100))

    def script(edge: FakeEdge) -> None:
        if len(edge.tokens) >= 3:
            edge.inbox.close()

    edge = bench.run(script)
    assert len(edge.tokens) == 3


def test_events_and_stats_do_not_depend_on_overlap() -> None:
    outcomes: list[list[Event]] = []
    for depth in (1, 2):
        bench = Bench(max_steps_in_flight=depth)
        for n in range(1, 6):
            bench.inbox.submit(request(n, num_prompt=9 * n, max_tokens=2 * n))
        edge = bench.run(close_when_idle)
        outcomes.append(sorted(edge.tokens, key=lambda t: (t.request_id, t.index)))
    assert outcomes[0] == outcomes[1]
