"""When an engine counts as stuck; all on made-up time."""

import pytest

from headrace.serving.engine.lifecycle import Backoff, ProgressLimits, Watchdog

LIMITS = ProgressLimits(silent_s=9.0, starting_silent_s=120.0)


def running(now_s: float = 0.0) -> Watchdog:
    watchdog = Watchdog(LIMITS, now_s)
    watchdog.started()
    watchdog.owes(False, now_s)
    return watchdog


def first_stuck(watchdog: Watchdog, from_s: float, until_s: float) -> float | None:
    now_s = from_s
    while now_s < until_s:
        now_s += LIMITS.tick_s
        if watchdog.is_stuck(now_s):
            return now_s
    return None


def test_silence_with_work_waiting_is_noticed_within_ten_seconds() -> None:
    watchdog = running()
    watchdog.owes(True, 0.0)
    watchdog.frame_came(100.0)
    watchdog.is_stuck(100.0)  # a late tick: starts the clock anew
    noticed_s = first_stuck(watchdog, 100.0, 200.0)
    assert noticed_s is not None
    assert 109.0 <= noticed_s <= 110.0


def test_an_idle_engine_is_probed_and_its_silence_noticed_within_ten_seconds() -> None:
    watchdog = running()
    now_s, asked_s = 0.0, None
    while not watchdog.is_stuck(now_s):
        if watchdog.should_probe(now_s):
            asked_s = now_s
        watchdog.owes(asked_s is not None, now_s)
        now_s += LIMITS.tick_s
        assert now_s < 60
    assert asked_s is not None
    assert now_s <= 10.0


def test_an_idle_engine_that_owes_nothing_is_never_stuck() -> None:
    assert first_stuck(running(), 0.0, 1000.0) is None


def test_frames_keep_it_alive() -> None:
    watchdog = running()
    watchdog.owes(True, 0.0)
    now_s = 0.0
    for _ in range(1000):
        now_s += LIMITS.tick_s
        if now_s % 8 < LIMITS.tick_s:
            watchdog.frame_came(now_s)
        assert not watchdog.is_stuck(now_s)


def test_a_fresh_debt_gets_half_the_limit_even_after_long_silence() -> None:
    watchdog = running()
    first_stuck(watchdog, 0.0, 50.0)
    watchdog.owes(True, 50.0)
    noticed_s = first_stuck(watchdog, 50.0, 100.0)
    assert noticed_s is not None
    assert 54.5 <= noticed_s <= 55.5


def test_a_stopped_edge_does_not_blame_the_engine() -> None:
    watchdog = running()
    watchdog.owes(True, 0.0)
    assert not watchdog.is_stuck(0.5)
    assert not watchdog.is_stuck(3600.0)  # the edge itself slept for an hour
    noticed_s = first_stuck(watchdog, 3600.0, 3700.0)
    assert noticed_s is not None
    assert noticed_s >= 3609.0


def test_compiling_may_be_silent_for_longer() -> None:
    watchdog = Watchdog(LIMITS, 0.0)
    noticed_s = first_stuck(watchdog, 0.0, 1000.0)
    assert noticed_s is not None
    assert 120.0 <= noticed_s <= 121.0


@pytest.mark.parametrize("ran_s", [0.0, 59.0])
def test_restarts_back_off_to_a_bound(ran_s: float) -> None:
    backoff = Backoff()
    assert [backoff.delay_s(ran_s) for _ in range(9)] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_healthy_run_resets_the_back_off() -> None:
    backoff = Backoff()
    for _ in range(5):
        backoff.delay_s(0.0)
    assert backoff.delay_s(60.0) == 0.5
    assert backoff.delay_s(0.0) == 1.0
