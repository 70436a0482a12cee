"""The statistics by which the measured cases are judged."""

import random

import pytest

from scripts.cases.figures import (
    change_interval,
    mann_whitney_p,
    p99_change,
    smallest_shift_found,
    stalls,
    under,
)


def draws(seed: int, *, num: int = 2000, shift: float = 0.0) -> list[float]:
    rng = random.Random(seed)
    return [round(rng.lognormvariate(0, 0.3), 2) + shift for _ in range(num)]


def test_equal_draws_differ_as_seldom_as_the_level_says() -> None:
    found = sum(mann_whitney_p(draws(2 * seed, num=300), draws(2 * seed + 1, num=300)) < 0.05 for seed in range(200))
    assert 2 <= found <= 20


def test_the_smallest_shift_found_is_just_enough() -> None:
    a, b = draws(1), draws(2)
    shift = smallest_shift_found(a, b, 0.001, 1.0)
    assert 0 < shift < 0.2
    assert mann_whitney_p(a, draws(2, shift=shift * 1.02)) < 0.001 < mann_whitney_p(a, draws(2, shift=shift * 0.9))


def test_one_long_answer_counts_for_all_questions_that_fell_into_it() -> None:
    assert stalls([0.002], 0.01) == [0.002]
    assert stalls([0.035], 0.01) == pytest.approx([0.035, 0.025, 0.015, 0.005])


def test_a_change_is_found_within_its_interval() -> None:
    pairs = [(draws(seed, num=200), [1.3 * value for value in draws(100 + seed, num=200)]) for seed in range(10)]
    low, high = change_interval(pairs)
    assert low < p99_change(pairs) < high
    assert low < 0.3 < high and high - low < 0.5


def test_a_bound_is_not_passed_at_its_limit() -> None:
    assert under(0.1, 0.2)["passed"] and not under(0.2, 0.2)["passed"]
