"""The step loop when steps raise, books do not balance, or nothing can be planned."""

import pytest

from headrace.serving.core.errors import InvariantError
from headrace.serving.core.events import Finished
from headrace.serving.core.plan import StepPlan
from headrace.serving.core.request import (
    FinishReason,
)
from headrace.serving.core.scheduler import Scheduler
from headrace.serving.engine.engine import StepLoop
from headrace.serving.engine.fake_runner import FakeRunner
from headrace.serving.engine.ports import EngineFailure
from tests.serving.engine.bench import VOCAB, Bench, FakeEdge, close_when_idle, expected_ids, request


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


@pytest.mark.parametrize("failing_step", range(1, 30))
def test_one_failed_step_takes_at_most_the_one_that_overlaps_it_down(failing_step: int) -> None:
    """Nothing of the failed step is written, and new requests join in every step: its fault must not travel on."""
    bench = Bench(num_slots=4)

    def fail_once(plan: StepPlan) -> None:
        if plan.step_id == failing_step:
            raise RuntimeError("once")

    runner = FakeRunner(bench.config, vocab_size=VOCAB, on_collect=fail_once)
    loop = StepLoop(bench.scheduler, runner, bench.clock)
    finished: dict[int, Finished] = {}
    for number in range(1, 60):
        if number <= 40:
            assert loop.submit(request(number, max_tokens=2 + number % 3)) is None
        output = loop.turn()
        for event in output.events if output is not None else ():
            if isinstance(event, Finished):
                finished[event.request_id] = event
    while not loop.is_idle:
        output = loop.turn()
        assert output is not None
        finished |= {event.request_id: event for event in output.events if isinstance(event, Finished)}
    failed = [i for i, end in finished.items() if end.reason is FinishReason.ERROR]
    assert len(finished) == 40 and 1 <= len(failed) <= 2 * bench.config.num_slots
    loop.check_idle()


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
            bench.scheduler.lanes[0].memory.pool.alloc()  # a page that nobody will give back

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
