import pytest

from headrace.serving.core.drain_rate import DEFAULT_RETRY_MS, MAX_RETRY_MS, MIN_RETRY_MS, DrainRate


def measured(*times_s: float) -> DrainRate:
    rate = DrainRate()
    for time_s in times_s:
        rate.on_leave(time_s, others_wait=True)
    return rate


def test_without_a_measurement_the_hint_is_the_default() -> None:
    assert measured().retry_after_ms(5, 0.0) == DEFAULT_RETRY_MS
    assert measured(3.0).retry_after_ms(5, 3.0) == DEFAULT_RETRY_MS


def test_the_hint_is_the_gap_times_the_requests_ahead() -> None:
    assert measured(0.0, 2.0, 4.0).retry_after_ms(3, 4.0) == 6_000


def test_newer_gaps_weigh_more() -> None:
    assert measured(0.0, 1.0, 3.0).retry_after_ms(10, 3.0) == pytest.approx(12_000, abs=1)


def test_an_idle_time_is_no_gap() -> None:
    rate = DrainRate()
    rate.on_leave(0.0, others_wait=True)
    rate.on_leave(1.0, others_wait=False)
    rate.on_leave(500.0, others_wait=True)
    assert rate.retry_after_ms(1, 500.0) == 1_000


def test_a_stall_counts_and_every_hint_is_bounded() -> None:
    assert measured(0.0, 1.0).retry_after_ms(1, 9.0) == 8_000
    assert measured(0.0, 1e-6).retry_after_ms(1, 1e-6) == MIN_RETRY_MS
    assert measured(0.0, 1e6).retry_after_ms(100, 1e6) == MAX_RETRY_MS


def test_a_clock_that_goes_back_gives_no_negative_hint() -> None:
    assert measured(10.0, 5.0).retry_after_ms(1, 0.0) == MIN_RETRY_MS
