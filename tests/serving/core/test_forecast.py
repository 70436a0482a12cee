"""Forecasts against worlds small enough to work out by hand, and against a simulation of the stated model."""

import heapq
import random

import pytest

from headrace.serving.core.forecast import Backlog, Correction, EngineSpeed, Place, Work, forecast
from headrace.serving.core.output_history import MAX_KINDS, OutputHistory
from headrace.serving.core.request import Priority

SPEED = EngineSpeed(decode_step_ms=10.0, prefill_token_ms=0.5, num_rows=4, chunk_tokens=100)


def place(tenant: str = "a", *, prompt: int = 0, output: int = 10, weight: float = 1.0, rank: int = 1) -> Place:
    return Place(tenant, weight, Priority(rank), prompt, output)


def test_nothing_is_said_while_nothing_is_measured() -> None:
    unknown = EngineSpeed(decode_step_ms=0.0, prefill_token_ms=0.0, num_rows=4, chunk_tokens=100)
    assert forecast(unknown, 100, 10, Work(9, 9, 9), [1, 2]) is None


def test_an_idle_server_reads_the_prompt_and_decodes() -> None:
    """250 tokens are three chunks: three steps, and half a ms for each token; nine more tokens follow."""
    seen = forecast(SPEED, 250, 10)
    assert seen is not None
    assert seen.first_token_ms == pytest.approx(3 * 10 + 125)
    assert seen.last_token_ms == pytest.approx(3 * 10 + 125 + 90)


def test_a_free_row_waits_for_prompts_only_and_a_full_server_for_the_first_end() -> None:
    free = forecast(SPEED, 100, 1, Work(), [5, 50, 90])
    full = forecast(SPEED, 100, 1, Work(), [5, 50, 90, 95])
    behind_two = forecast(SPEED, 100, 1, Work(2, 0, 20), [5, 50, 90, 95])
    assert free is not None and full is not None and behind_two is not None
    assert free.first_token_ms == pytest.approx(10 + 50)
    assert full.first_token_ms == pytest.approx(5 * 10 + 10 + 50)
    assert behind_two.first_token_ms == pytest.approx(90 * 10 + 10 + 50)


def simulated_first_token(rows: int, remaining: list[int], ahead: list[int]) -> int:
    """Steps until a row is free for one more, first come first served."""
    ends = sorted(remaining) + [0] * (rows - len(remaining))
    heapq.heapify(ends)
    for output in ahead:
        heapq.heappush(ends, heapq.heappop(ends) + output)
    return ends[0]


def test_a_long_queue_is_forecast_as_it_drains() -> None:
    rng = random.Random(5)
    errors = []
    for _ in range(200):
        remaining = [rng.randint(1, 60) for _ in range(16)]
        ahead = [rng.randint(1, 60) for _ in range(rng.randint(20, 200))]
        speed = EngineSpeed(decode_step_ms=1.0, prefill_token_ms=0.0, num_rows=16, chunk_tokens=100)
        seen = forecast(speed, 1, 1, Work(len(ahead), 0, sum(ahead)), sorted(remaining))
        assert seen is not None
        errors.append(seen.first_token_ms / (1 + simulated_first_token(16, remaining, ahead)))
    errors.sort()
    assert 0.93 < errors[len(errors) // 2] < 1.07
    assert errors[5] > 0.8
    assert errors[-5] < 1.25


def test_fair_shares_put_a_small_tenant_ahead_of_a_greedy_one() -> None:
    backlog = Backlog()
    for _ in range(64):
        backlog.add(place("greedy", prompt=100, output=100))
    mine = place("small", prompt=20, output=20)
    ahead = backlog.ahead_of(mine)
    assert ahead.tokens == pytest.approx(40)
    assert backlog.ahead_of(place("greedy", prompt=20, output=20)).requests == 64
    heavy = place("small", prompt=20, output=20, weight=4.0)
    assert backlog.ahead_of(heavy).tokens == pytest.approx(10)


def test_better_classes_are_ahead_and_worse_ones_are_not() -> None:
    backlog = Backlog()
    backlog.add(place("b", prompt=5, rank=0))
    backlog.add(place("b", prompt=7, rank=2))
    assert backlog.ahead_of(place("a", rank=0, prompt=1000)).requests == 1
    assert backlog.ahead_of(place("a", rank=1)).prompt_tokens == 5
    assert backlog.ahead_of(place("a", rank=2, prompt=1000)).requests == 2


def test_who_is_made_way_for() -> None:
    backlog = Backlog()
    for _ in range(3):
        running = place("greedy")
        backlog.add(running)
        backlog.started(running)
    waiting = place("greedy")
    backlog.add(waiting)
    assert backlog.yields_to(place("small"))
    assert not backlog.yields_to(place("small", rank=2))
    assert not backlog.yields_to(place("greedy"))
    assert backlog.yields_to(place("greedy", rank=0))
    first = place("small")
    backlog.add(first)
    assert not backlog.yields_to(place("small"))
    backlog.ended(first)
    backlog.ended(running)
    backlog.ended(running)
    assert backlog.yields_to(place("small"))
    alone = Backlog()
    one = place("other")
    alone.add(one)
    alone.started(one)
    assert not alone.yields_to(place("small"))
    alone.ended(one)
    assert alone._running_by == {}


def test_the_backlog_follows_each_request_to_its_end() -> None:
    backlog = Backlog()
    one, two = place(prompt=10, output=8), place(prompt=20, output=8)
    backlog.add(one)
    backlog.add(two)
    backlog.correct(two, 25, 9)
    assert backlog.all_waiting() == Work(2, 35, 17)
    assert backlog.waiting_by_tenant() == {"a": 2}
    backlog.started(one)
    one.num_generated = 3
    assert (backlog.num_waiting, backlog.num_running, backlog.remaining()) == (1, 1, [5])
    backlog.correct(one, 99, 99)
    assert backlog.all_waiting() == Work(1, 25, 9)
    one.num_generated = 500
    assert backlog.remaining() == [1]
    for ended in (one, two, one):
        backlog.ended(ended)
    assert backlog.all_waiting() == Work() and backlog.remaining() == []
    assert backlog.waiting_by_tenant() == {}


def test_the_correction_comes_to_rest_where_one_in_twenty_is_late() -> None:
    """Whoever is forecast within the objective is taken, and really waits for a random multiple of the forecast."""
    rng, correction, late = random.Random(3), Correction(), []
    for _ in range(6000):
        forecast_ms = rng.uniform(300, 1000)
        if forecast_ms * correction.factor <= 1000:
            late.append(forecast_ms * rng.lognormvariate(0.2, 0.3) > 1000)
            correction.observe(is_late=late[-1])
    assert sum(late[1000:]) / len(late[1000:]) == pytest.approx(0.05, abs=0.015)
    assert 1.1 < correction.factor < 2
    for _ in range(300):
        correction.observe(is_late=False)
    assert correction.factor == 1.0
    for _ in range(300):
        correction.observe(is_late=True)
    assert correction.factor == Correction.RANGE[1]


def test_output_is_learned_by_tenant_and_size_and_else_from_everybody() -> None:
    history = OutputHistory()
    assert history.expected_tokens("a", 100) == 100
    assert history.known_tokens("a", 100) is None
    for _ in range(50):
        history.ended("a", 100, 20)
    history.ended("b", 100, 100)
    assert history.expected_tokens("a", 100) == 20
    assert history.expected_tokens("a", 120) == 24
    assert history.expected_tokens("b", 100) == 100
    assert history.expected_tokens("c", 100) == 100
    assert history.known_tokens("c", 100) == pytest.approx(28, abs=1)
    assert history.known_tokens("a", 5000) is None
    assert history.expected_tokens("a", 1) == 1


def test_the_history_is_bounded() -> None:
    history = OutputHistory()
    for number in range(MAX_KINDS + 5):
        history.ended(f"t{number}", 100, 1)
    assert len(history._shares) <= MAX_KINDS + 1
