"""Coarser deltas: a choice gives what waits when enough tokens or enough time have come, and at its end."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.serving.core.request import CancelReason
from headrace.serving.edge.bodies import JobOptions
from headrace.serving.edge.generation import Delta, Done, Failure
from headrace.serving.edge.pacing import Pacing
from tests.serving.edge.scripted import FakeTimers, Script


class Paced:
    """A choice with its pace, and what its listener heard."""

    def __init__(self, tokens: int | None = None, ms: int | None = None) -> None:
        self.timers = FakeTimers()
        options = JobOptions(pacing=Pacing(tokens=tokens, ms=ms))
        self.script = Script(0, options=options, call_later=self.timers.call_later)
        self.generation = self.script.job.generations[0]
        self.calls = 0
        self.generation.set_listener(self._heard)

    def _heard(self) -> None:
        self.calls += 1

    def text(self) -> str | None:
        """Of the next delta; None where nothing is due."""
        item = self.generation.take()
        assert item is None or isinstance(item, Delta)
        return item and item.text


def test_enough_tokens_make_a_delta() -> None:
    paced = Paced(tokens=3)
    paced.script.tokens(b"ab")
    assert (paced.text(), paced.calls) == (None, 0)
    paced.script.tokens(b"c")
    assert (paced.calls, paced.text()) == (1, "abc")
    paced.script.tokens(b"de")
    assert (paced.text(), paced.calls) == (None, 1)
    paced.script.finish()
    assert paced.calls == 2
    assert paced.generation.take() == Delta(text="de", num_tokens=2, completion_tokens=5, first=False)
    assert isinstance(paced.generation.take(), Done)
    assert paced.timers.waiting == []


def test_enough_time_makes_a_delta_counted_from_the_first_token_that_waits() -> None:
    paced = Paced(ms=100)
    paced.timers.advance(1000)
    paced.script.tokens(b"a" * 2000)
    paced.timers.advance(99)
    paced.script.tokens(b"b")
    assert (paced.text(), paced.calls) == (None, 0)
    paced.timers.advance(1)
    assert (paced.calls, paced.text()) == (1, "a" * 2000 + "b")
    paced.timers.advance(1000)
    assert (paced.text(), paced.calls, paced.timers.waiting) == (None, 1, [])
    paced.script.tokens(b"c")
    paced.timers.advance(99)
    assert paced.text() is None
    paced.timers.advance(1)
    assert paced.text() == "c"


def test_of_tokens_and_time_the_first_counts() -> None:
    paced = Paced(tokens=3, ms=100)
    paced.script.tokens(b"ab")
    paced.timers.advance(100)
    assert (paced.calls, paced.text()) == (1, "ab")
    paced.script.tokens(b"c")
    paced.timers.advance(60)
    paced.script.tokens(b"de")
    assert (paced.calls, paced.text()) == (2, "cde")
    paced.script.tokens(b"f")
    paced.timers.advance(60)
    assert paced.text() is None, "the timer of tokens that were taken counted for others"
    paced.timers.advance(40)
    assert paced.text() == "f"


def test_what_is_due_stays_due_until_it_is_taken() -> None:
    paced = Paced(ms=100)
    paced.script.tokens(b"a")
    paced.timers.advance(100)
    paced.script.tokens(b"b")
    assert paced.text() == "ab"


def test_a_character_that_is_complete_after_its_time_goes_out_at_once() -> None:
    paced = Paced(ms=100)
    first, *rest = "😀".encode()
    paced.script.tokens([first])
    paced.timers.advance(100)
    assert (paced.text(), paced.calls) == (None, 0)
    paced.script.tokens(rest)
    assert (paced.calls, paced.text()) == (1, "😀")


@pytest.mark.parametrize(
    "end",
    [Script.finish, Script.lose, lambda script: script.job.cancel(CancelReason.CLIENT)],
    ids=["done", "lost", "cancelled"],
)
def test_the_end_waits_for_nothing_and_leaves_no_timer(end: Callable[[Script], None]) -> None:
    paced = Paced(tokens=1024, ms=10_000)
    paced.script.tokens(b"ab")
    assert len(paced.timers.waiting) == 1
    end(paced.script)
    assert paced.timers.waiting == [], "an answer that nobody takes keeps its timer"
    assert (paced.calls, paced.text()) == (1, "ab")
    assert isinstance(paced.generation.take(), Done | Failure)


def test_without_a_pace_there_is_no_timer_and_no_wait() -> None:
    for paced in (Paced(), Paced(tokens=1, ms=100)):
        paced.script.tokens(b"a")
        assert (paced.calls, paced.text(), paced.timers.waiting) == (1, "a", [])


async def test_next_waits_for_the_time() -> None:
    paced = Paced(ms=100)
    waiting = asyncio.create_task(paced.generation.next())
    paced.script.tokens(b"a")
    await asyncio.sleep(0)
    assert not waiting.done()
    paced.timers.advance(100)
    item = await waiting
    assert isinstance(item, Delta) and item.text == "a"


async def test_the_timer_is_one_of_the_running_loop() -> None:
    script = Script(0, options=JobOptions(pacing=Pacing(ms=1)))
    script.tokens(b"a")
    item = await asyncio.wait_for(script.job.generations[0].next(), 10)
    assert isinstance(item, Delta) and item.text == "a"


@given(
    tokens=st.none() | st.integers(1, 5),
    ms=st.none() | st.integers(1, 50),
    steps=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30), st.booleans()), max_size=30),
)
@settings(deadline=None)
def test_any_order_of_tokens_time_and_readers(
    tokens: int | None, ms: int | None, steps: list[tuple[int, int, bool]]
) -> None:
    """Against the rule written down again: due or not at every take, nothing lost, and told of all that is due."""
    paced = Paced(tokens, ms)
    sent, shown, since_ms, calls = 0, 0, 0.0, 0
    for num_new, wait_ms, is_read in steps:
        if num_new and shown == sent:
            since_ms = paced.timers.now_ms
        paced.script.tokens(b"x" * num_new)
        sent += num_new
        paced.timers.advance(wait_ms)
        is_late = ms is not None and paced.timers.now_ms - since_ms >= ms
        is_due = sent > shown and ((tokens is None and ms is None) or is_late or sent - shown >= (tokens or 10**6))
        assert (paced.calls > calls) or not is_due
        if is_read:
            text = paced.text()
            assert (text is not None) == is_due
            shown += len(text or "")
            calls = paced.calls
    paced.script.finish()
    if sent > shown:
        assert len(paced.text() or "") == sent - shown
    assert isinstance(paced.generation.take(), Done)
    assert paced.timers.waiting == []
