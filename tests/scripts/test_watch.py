"""What check-cancels and check-memory-slope measure with: steps from a cancel to free pages, and a slope."""

import json
import random

import pytest

from headrace.serving.core.request import CancelReason, RequestId
from scripts.check_memory_slope import slope_of
from scripts.watch.engine import StepCount, watched_inbox, watched_scheduler
from tests.serving.core.driver import Drive, make_config, make_request


def drive(lines: list[str]) -> tuple[Drive, StepCount]:
    count = StepCount(lines.append)
    made = Drive(make_config())
    made.scheduler = watched_scheduler(count)(made.scheduler.config)
    return made, count


def notes(lines: list[str]) -> list[tuple[int, int, str]]:
    return [(line["steps"], line["pages"], line["state"]) for line in map(json.loads, lines)]


def cancel(made: Drive, count: StepCount, number: int, *, steps_on_the_way: int = 0) -> None:
    """As the reader thread and then the step loop do it."""
    watched_inbox(count)().cancel(RequestId(number), CancelReason.CLIENT)
    for _ in range(steps_on_the_way):
        made.collect()
    made.scheduler.cancel(RequestId(number), CancelReason.CLIENT, 0.0)


def test_steps_are_counted_from_the_inbox_to_the_last_page() -> None:
    lines: list[str] = []
    made, count = drive(lines)
    for number in (1, 2, 3):
        made.submit(make_request(number, 6, 50))
        made.tick()
    assert made.plan() is not None and made.plan() is None, "two steps are in flight"
    cancel(made, count, 1, steps_on_the_way=1)
    assert not notes(lines), "a step in flight names its pages"
    made.collect()
    assert [(steps, state) for steps, _, state in notes(lines)] == [(2, "decoding")]
    made.submit(make_request(4, 6, 5))
    cancel(made, count, 4)
    assert notes(lines)[1] == (0, 0, "waiting")
    cancel(made, count, 4)
    assert len(notes(lines)) == 2, "it was over"


def test_pages_that_stay_held_are_no_free_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that the check is for."""
    lines: list[str] = []
    made, count = drive(lines)
    made.submit(make_request(1, 6, 50))
    made.submit(make_request(2, 6, 50))
    made.tick()
    made.plan()
    [lane] = made.scheduler.lanes
    settle = lane.memory.settle
    monkeypatch.setattr(lane.memory, "settle", lambda oldest: None)
    cancel(made, count, 1)
    for _ in range(5):
        made.tick()
    assert not notes(lines)
    monkeypatch.setattr(lane.memory, "settle", settle)
    made.tick()
    assert [steps for steps, _, _ in notes(lines)] > [5]


def test_a_slope_is_found_with_its_interval() -> None:
    rng = random.Random(1)
    requests = list(range(50, 20_050, 50))

    def found(per_request: float) -> tuple[float, list[float], bool]:
        """With a start that falls into the first quarter, and noise of 200 kB."""
        own = [round(3e8 + min(n, 4000) * 900 + n * per_request + rng.gauss(0, 2e5)) for n in requests]
        slope = slope_of(requests, own)
        return slope["bytes_per_request"], slope["interval_95"], slope["passed"]  # type: ignore[return-value]

    slope, (low, high), passed = found(0)
    assert passed and low < 0 < high and abs(slope) < 20
    slope, (low, high), passed = found(1200)
    assert not passed and low - 20 < 1200 < high + 20
    assert slope_of(requests, [5] * len(requests))["interval_95"] == [0.0, 0.0]
