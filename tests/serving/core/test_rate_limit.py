"""Token buckets with exact times."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.serving.core.rate_limit import Rate, TokenBucket


def test_a_burst_at_once_and_then_the_rate() -> None:
    bucket = TokenBucket(Rate(2.0, 3), 100.0)
    for _ in range(3):
        assert bucket.wait_ms(1, 100.0) == 0
        bucket.take(1, 100.0)
    assert bucket.wait_ms(1, 100.0) == 500
    assert bucket.wait_ms(1, 100.3) == 200
    assert bucket.wait_ms(1, 100.5) == 0
    assert bucket.level(1000.0) == 3


def test_more_than_a_burst_passes_when_full_and_leaves_a_debt() -> None:
    bucket = TokenBucket(Rate(10.0, 100), 0.0)
    bucket.take(1, 0.0)
    assert bucket.wait_ms(250, 0.0) == 100
    assert bucket.wait_ms(250, 0.1) == 0
    bucket.take(250, 0.1)
    assert bucket.level(0.1) == -150
    assert bucket.wait_ms(10, 0.1) == 16_000


def test_what_was_taken_too_much_comes_back_but_never_more_than_a_burst() -> None:
    bucket = TokenBucket(Rate(1.0, 10), 0.0)
    bucket.take(8, 0.0)
    bucket.take(-5, 0.0)
    assert bucket.level(0.0) == 7
    bucket.take(-50, 0.0)
    assert bucket.level(0.0) == 10


def test_another_rate_keeps_what_was_taken() -> None:
    bucket = TokenBucket(Rate(1.0, 10), 0.0)
    bucket.take(8, 0.0)
    bucket.change_rate(Rate(5.0, 4), 0.0)
    assert bucket.level(0.0) == -4
    assert bucket.wait_ms(1, 0.0) == 1000


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 8)), max_size=40))
def test_never_more_than_the_burst_and_the_rate_allow(steps: list[tuple[float, int]]) -> None:
    bucket, now_s, taken = TokenBucket(Rate(3.0, 8), 0.0), 0.0, 0
    for pause_s, amount in steps:
        now_s += pause_s
        if bucket.wait_ms(amount, now_s) == 0:
            bucket.take(amount, now_s)
            taken += amount
        assert taken <= 8 + 3.0 * now_s + 1e-6


@settings(deadline=None)
@given(st.floats(0.01, 1000), st.integers(1, 50), st.integers(0, 50))
def test_the_wait_is_exact(per_second: float, amount: int, taken: int) -> None:
    bucket = TokenBucket(Rate(per_second, 50), 0.0)
    bucket.take(taken, 0.0)
    wait_ms = bucket.wait_ms(amount, 0.0)
    assert bucket.level(wait_ms / 1000) >= amount - 1e-6 * max(1.0, per_second)
    if wait_ms > 1:
        assert bucket.level(wait_ms / 1000) - per_second * 0.002 < amount


def test_a_clock_that_goes_back_adds_nothing() -> None:
    bucket = TokenBucket(Rate(1.0, 10), 50.0)
    bucket.take(10, 50.0)
    assert bucket.level(20.0) == 0
    assert bucket.level(51.0) == pytest.approx(1.0)
