"""stream_options on the native WebSocket: coarser deltas, and frames whose sizes say nothing."""

import pytest

from headrace.serving.core.plan import TokenLogprobs
from headrace.serving.edge.bodies import JobOptions
from headrace.serving.edge.pacing import Pacing
from tests.serving.edge.scripted import FakeTimers, Script
from tests.serving.edge.session_peer import Host, kinds, opened


def paced(timers: FakeTimers, tokens: int | None = None, ms: int | None = None, choices: int = 1) -> Script:
    options = JobOptions(pacing=Pacing(tokens=tokens, ms=ms))
    return Script(0, options=options, choices=choices, call_later=timers.call_later)


def test_a_stream_wakes_the_writer_when_a_delta_is_due_and_not_before() -> None:
    peer, timers = opened(), FakeTimers()
    script = peer.create("r", script=paced(timers, tokens=4, ms=50))
    peer.read()
    wakes = peer.wakes
    script.tokens(b"abc")
    assert (peer.read(), peer.wakes) == ([], wakes)
    script.tokens(b"d")
    assert peer.wakes == wakes + 1
    assert peer.read() == [{"type": "delta", "id": "r", "seq": 1, "index": 0, "text": "abcd", "n": 4}]
    script.tokens(b"e")
    timers.advance(50)
    assert peer.wakes == wakes + 2
    assert [(frame["seq"], frame["text"], frame["n"]) for frame in peer.read()] == [(2, "e", 1)]
    script.tokens(b"f")
    script.finish()
    delta, done = peer.read()
    assert (delta["seq"], delta["text"], done["seq"]) == (3, "f", 4)
    assert done["usage"]["completion_tokens"] == 6
    assert timers.waiting == []


def test_each_choice_has_its_own_pace() -> None:
    peer, timers = opened(), FakeTimers()
    script = peer.create("r", script=paced(timers, tokens=2, choices=2))
    script.tokens(b"a", 0)
    script.tokens(b"bc", 1)
    assert [(frame["index"], frame["text"]) for frame in peer.read()[1:]] == [(1, "bc")]
    script.finish(index=0)
    assert [(frame["index"], frame["text"]) for frame in peer.read()] == [(0, "a")]
    script.finish(index=1)
    assert kinds(peer.read()) == ["done"]


def test_a_cancel_shows_what_waits() -> None:
    peer, timers = opened(), FakeTimers()
    peer.create("r", script=paced(timers, ms=10_000)).tokens(b"abc")
    peer.read()
    delta, done = peer.send("cancel", id="r")
    assert (delta["text"], done["choices"][0]["finish_reason"]) == ("abc", "cancelled")
    assert timers.waiting == []


def test_a_resumed_stream_keeps_its_pace() -> None:
    host, timers = Host(), FakeTimers()
    old, new = opened(host=host), opened(host=host)
    script = old.create("r", script=paced(timers, ms=50), detach=True)
    script.tokens(b"a")
    old.read()
    old.lose()
    assert kinds(new.send("resume", session=old.session.secret, id="r")) == ["created"]
    timers.advance(50)
    assert [(frame["seq"], frame["text"]) for frame in new.read()] == [(1, "a")]


@pytest.mark.parametrize("asked", [{}, {"return_token_ids": True}, {"logprobs": True}])
def test_frames_of_one_token_have_one_size(asked: dict[str, bool]) -> None:
    """The tokens differ in bytes, escapes and digits of their ids."""
    peer = opened()
    script = peer.create("r", script=Script(0, options=JobOptions(include_obfuscation=True, **asked)))
    peer.read()
    values = TokenLogprobs(chosen=-0.5, rank=1, top=()) if "logprobs" in asked else None
    sizes = []
    for token_id in (ord("a"), ord('"'), ord("\n"), 7):
        script.tokens([token_id], logprobs=values)
        frame = peer.session.next_frame()
        assert frame is not None
        sizes.append(len(frame))
    assert len(set(sizes)) == 1
    script.finish()
    assert kinds(peer.read()) == ["done"]


def test_padding_is_in_every_part_of_a_delta_and_only_when_asked_for() -> None:
    peer = opened()
    values = TokenLogprobs(chosen=-0.5, rank=1, top=())
    plain = peer.create("plain", script=Script(0, options=JobOptions(logprobs=True)))
    padded = peer.create("padded", script=Script(1, options=JobOptions(logprobs=True, include_obfuscation=True)))
    for script in (plain, padded):
        script.tokens(b"x" * 300, logprobs=values)
        script.finish()
    frames = [frame for frame in peer.read() if frame["type"] == "delta"]
    assert ["obfuscation" in frame for frame in frames if frame["id"] == "plain"] == [False, False]
    assert ["obfuscation" in frame for frame in frames if frame["id"] == "padded"] == [True, True]
    for name in ("text", "n", "seq", "logprobs"):
        of_plain = [frame[name] for frame in frames if frame["id"] == "plain"]
        assert of_plain == [frame[name] for frame in frames if frame["id"] == "padded"]
