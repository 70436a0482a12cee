"""Deadlines, classes and the objective for first tokens: what is refused by estimate, and what ends late."""

import pytest

from headrace.serving.core.request import CancelReason, Priority
from headrace.serving.core.tenant_policy import TenantPolicy
from headrace.serving.edge.errors import ApiError
from headrace.serving.edge.generation import Delta, Failure
from headrace.serving.edge.terms import Terms
from tests.serving.edge.admission_bench import Bench, MeasuredEngine
from tests.serving.edge.fakes import FakeEngine
from tests.serving.edge.test_service import SlowTokenizer


async def test_weight_priority_and_the_rest_of_the_deadline_go_to_the_engine() -> None:
    policy = TenantPolicy(weight=3.0, max_priority=Priority.NORMAL, deadline_ms=5000)
    bench = Bench(policies={"t": policy, "late": TenantPolicy(max_priority=Priority.LOW)})
    await bench.start()
    await bench.start(priority=Priority.LOW, deadline_ms=700)
    await bench.start(tenant="late")
    one, two, three = bench.engine.submitted
    assert (one.weight, one.priority, one.deadline_ms) == (3.0, Priority.NORMAL, 5000)
    assert (two.priority, two.deadline_ms) == (Priority.LOW, pytest.approx(700))
    assert (three.weight, three.priority, three.deadline_ms) == (1.0, Priority.LOW, None)
    error = await bench.refused(priority=Priority.HIGH)
    assert (error.status, error.param) == (400, "priority")
    assert "normal, low" in error.message


async def test_time_before_the_engine_counts() -> None:
    bench = Bench()
    terms = Terms(arrival_s=bench.clock.now_s - 0.3, deadline_ms=1000)
    await bench.service.start("completion", {"prompt": "a"}, terms=terms)
    assert bench.engine.submitted[0].deadline_ms == pytest.approx(700)
    with pytest.raises(ApiError) as caught:
        await bench.service.start("completion", {"prompt": "a"}, terms=Terms(arrival_s=0.0, deadline_ms=1000))
    assert (caught.value.code, caught.value.status) == ("deadline_exceeded", 504)


async def test_preparation_is_given_up_at_the_deadline() -> None:
    tokenizer = SlowTokenizer()
    bench = Bench(tokenizer=tokenizer)
    error = await bench.refused(deadline_ms=30)
    assert error.code == "deadline_exceeded"
    tokenizer.go_on.set()
    assert bench.is_clean()


async def test_a_deadline_that_cannot_be_met_is_refused_before_rendering() -> None:
    """Nothing is entered: the tokenizer never sees the text."""
    tokenizer = SlowTokenizer()
    bench = Bench(MeasuredEngine(auto=False), tokenizer=tokenizer)
    error = await bench.refused("text", min_tokens=8, deadline_ms=79)
    assert (error.code, error.status, error.param) == ("deadline_unmeetable", 503, "deadline_ms")
    assert error.retry_after_ms is None and "idle server" in error.message
    assert not tokenizer.entered.is_set()
    tokenizer.go_on.set()
    await bench.start([[1] * 2], min_tokens=8, deadline_ms=83)
    assert (await bench.refused([[1] * 2], min_tokens=8, deadline_ms=81)).code == "deadline_unmeetable"
    assert bench.is_clean() is False


async def test_what_nothing_else_ends_takes_all_of_its_tokens() -> None:
    bench = Bench(MeasuredEngine(auto=False))
    await bench.start([[1] * 2], deadline_ms=81)
    assert (await bench.refused([[1] * 2], ignore_eos=True, deadline_ms=81)).code == "deadline_unmeetable"
    await bench.start([[1] * 2], ignore_eos=True, stop=["x"], deadline_ms=81)
    await bench.start([[1] * 2], ignore_eos=True, stop_token_ids=[5], deadline_ms=81)
    await bench.start([[1] * 2], ignore_eos=True, deadline_ms=90)


async def test_work_ahead_counts_and_leaves_a_hint() -> None:
    bench = Bench(MeasuredEngine(auto=False))
    for _ in range(4):
        await bench.start([[1] * 10], max_tokens=100, tenant="t")
    bench.engine.step()
    # Four rows are taken for 99 more steps of 10 ms.
    error = await bench.refused([[1] * 10], deadline_ms=500, max_tokens=1)
    assert error.code == "deadline_unmeetable"
    assert error.retry_after_ms == pytest.approx(1010 - 500, abs=10)
    await bench.start([[1] * 10], deadline_ms=1100, max_tokens=1)


async def test_nothing_is_refused_by_estimate_while_nothing_was_measured() -> None:
    engine = MeasuredEngine(auto=False)
    engine.speed = (0.0, 0.0)  # type: ignore[misc]
    bench = Bench(engine, first_token_ms=1)
    for _ in range(20):
        await bench.start(deadline_ms=600_000, min_tokens=8)
    assert bench.load()["queue_delay_ms"] is None


async def test_beyond_the_objective_for_first_tokens_requests_are_refused() -> None:
    bench = Bench(MeasuredEngine(auto=False), first_token_ms=300)
    for _ in range(4):
        await bench.start([[1] * 10], max_tokens=20)
    bench.engine.step()
    await bench.start([[1] * 10], max_tokens=20)
    assert bench.load()["queue_delay_ms"] > 190
    for _ in range(3):
        await bench.start([[1] * 10], max_tokens=20)
    error = await bench.refused([[1] * 10], max_tokens=20)
    assert (error.code, error.status) == ("overloaded", 503)
    assert "objective is 300 ms" in error.message
    assert error.retry_after_ms
    assert bench.load()["first_token_objective_ms"] == 300


async def test_a_prompt_that_is_late_on_an_idle_server_is_served_all_the_same() -> None:
    bench = Bench(MeasuredEngine(auto=False), first_token_ms=50)
    await bench.start([[1] * 200])


async def test_output_that_the_client_does_not_read_in_time_is_not_given_later() -> None:
    bench = Bench(FakeEngine(auto=False, reply=b"abc"))
    job = await bench.start(deadline_ms=1000, max_tokens=2)
    [generation] = job.generations
    bench.engine.step()
    assert isinstance(generation.take(), Delta)
    bench.engine.step()
    bench.clock.now_s += 1.001
    failure = generation.take()
    assert isinstance(failure, Failure)
    assert (failure.error.code, failure.error.status) == ("deadline_exceeded", 504)
    assert generation.take() is None
    assert bench.load()["deadline_misses"] == {"engine": 0, "unread": 1}


async def test_output_in_the_making_is_stopped_at_the_deadline_when_it_is_asked_for() -> None:
    bench = Bench()
    job = await bench.start(deadline_ms=1000)
    bench.engine.step()
    bench.clock.now_s += 1.5
    woken: list[bool] = []
    job.generations[0].set_listener(lambda: woken.append(True))
    assert isinstance(job.generations[0].take(), Failure)
    assert woken == [True]  # by the token, not again by what was just taken
    assert bench.engine.cancels == [(job.generations[0].request.request_id, CancelReason.DEADLINE)]
    bench.engine.step()
    assert job.generations[0].take() is None
