"""When a host counts as lost; all on made-up time."""

import pytest

from headrace.serving.engine.host_watch import HostLimits, HostWatch

LIMITS = HostLimits()
PROMISED_S = 10.0
"""From the end of a host to the end of the engine; the edge hears of it at once."""


class World:
    """Ticks on time; ranks 1 and 2 beat until they stop."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.watch = HostWatch((1, 2), LIMITS, self.now_s)
        self.stopped: set[int] = set()
        self.steps = {1: 0, 2: 0}

    def run(self, seconds: float) -> tuple[float, int, str] | None:
        """(seconds from now, rank, why) of the first that is lost."""
        start_s = self.now_s
        next_beat_s = start_s
        while self.now_s < start_s + seconds:
            self.now_s += LIMITS.tick_s
            if self.now_s >= next_beat_s:
                next_beat_s += LIMITS.beat_s
                for rank in {1, 2} - self.stopped:
                    self.watch.heard(rank, self.now_s, self.steps[rank])
            if (lost := self.watch.lost(self.now_s)) is not None:
                return self.now_s - start_s, *lost
        return None


def serving() -> World:
    world = World()
    world.watch.serves(world.now_s)
    return world


def test_hosts_that_beat_are_never_lost() -> None:
    assert serving().run(3600) is None


def test_a_silent_host_is_named_within_the_limit() -> None:
    world = serving()
    world.run(60)
    world.stopped = {2}
    lost = world.run(60)
    assert lost is not None
    after_s, rank, why = lost
    assert LIMITS.silent_s - LIMITS.beat_s <= after_s <= LIMITS.silent_s + LIMITS.tick_s < PROMISED_S
    assert (rank, why) == (2, "no sign of life for 6.0 s")


def test_loading_may_be_silent_for_longer() -> None:
    world = World()
    world.stopped = {1}
    assert world.run(LIMITS.starting_silent_s - 2) is None
    assert world.run(3) is not None
    assert LIMITS.starting_silent_s < 120


def test_a_rank_that_beats_but_begins_no_step_is_stuck() -> None:
    world = serving()
    world.steps = {1: 7, 2: 6}
    world.watch.waits_for(7, world.now_s)
    lost = world.run(60)
    assert lost is not None
    after_s, rank, why = lost
    assert (rank, LIMITS.step_s <= after_s < 9) == (2, True), "the edge gives up after 9 s, and cannot name the rank"
    assert "has not begun step 7" in why


@pytest.mark.parametrize("waits", [6, None])
def test_a_rank_that_owes_nothing_is_not_stuck(waits: int | None) -> None:
    world = serving()
    world.steps = {1: 7, 2: 6}
    world.watch.waits_for(7, world.now_s)
    world.run(5)
    world.watch.waits_for(waits, world.now_s)
    assert world.run(60) is None


def test_time_in_which_the_watcher_did_not_run_itself_is_nobodys_silence() -> None:
    world = serving()
    world.watch.waits_for(3, world.now_s)
    world.now_s += 300
    assert world.watch.lost(world.now_s) is None
    world.stopped = {1, 2}
    lost = world.run(60)
    assert lost is not None
    assert LIMITS.silent_s - 3 * LIMITS.tick_s <= lost[0] <= LIMITS.silent_s


def test_a_watcher_that_is_often_late_still_notices() -> None:
    world = serving()
    for _ in range(20):
        world.now_s += 0.9
        if world.watch.lost(world.now_s) is not None:
            break
    else:
        raise AssertionError("twice as late as it should be, and never noticed")
