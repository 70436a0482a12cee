"""The native protocol without sockets: a table of (state, input) → output, bounds, shutdown."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.serving.core.request import CancelReason
from headrace.serving.edge.session import MAX_UNREAD_ANSWERS, SessionState
from tests.serving.edge.session_peer import Peer, close_code, kinds, opened

# The table: state, input → frames, close code, next state.

HELLO_BAD = '{"type":"hello","token":"nope"}'
HELLO_GOOD = '{"type":"hello","token":"key-a"}'
PING = '{"type":"ping","t":1}'
CANCEL = '{"type":"cancel","id":"zz"}'
CREATE = '{"type":"create","id":"new","endpoint":"chat","body":{}}'
BAD_CREATE = '{"type":"create","id":"new","endpoint":"chat"}'
RESUME = '{"type":"resume","session":"s_x","id":"new"}'
AWAIT, OPEN, DRAIN = SessionState.AWAIT_HELLO, SessionState.OPEN, SessionState.DRAINING

TABLE = [
    (AWAIT, HELLO_GOOD, ["welcome"], None, OPEN),
    (AWAIT, HELLO_BAD, [], 4401, AWAIT),
    (AWAIT, '{"type":"hello"}', [], 4401, AWAIT),
    (AWAIT, PING, [], 4401, AWAIT),
    (AWAIT, CREATE, [], 4401, AWAIT),
    (AWAIT, BAD_CREATE, [], 4401, AWAIT),
    (AWAIT, "no json", [], 4400, AWAIT),
    (OPEN, HELLO_GOOD, [], None, OPEN),
    (OPEN, HELLO_BAD, [], None, OPEN),
    (OPEN, PING, ["pong"], None, OPEN),
    (OPEN, CANCEL, ["unknown_id"], None, OPEN),
    (OPEN, CREATE, [], None, OPEN),
    (OPEN, BAD_CREATE, ["missing_field"], None, OPEN),
    (OPEN, RESUME, ["resume_gone"], None, OPEN),
    (OPEN, '{"type":"shout"}', ["unknown_type"], None, OPEN),
    (OPEN, "[]", [], 4400, OPEN),
    (OPEN, "no json", [], 4400, OPEN),
    (DRAIN, PING, ["pong"], None, DRAIN),
    (DRAIN, CREATE, ["shutting_down"], None, DRAIN),
    (DRAIN, RESUME, ["resume_gone"], None, DRAIN),
    (DRAIN, CANCEL, ["unknown_id"], None, DRAIN),
    (DRAIN, "no json", [], 4400, DRAIN),
]


@pytest.mark.parametrize(("state", "text", "answers", "code", "after"), TABLE)
def test_table(state: SessionState, text: str, answers: list[str], code: int | None, after: SessionState) -> None:
    peer = Peer(identity=None)
    if state is not AWAIT:
        peer.text(HELLO_GOOD)
        peer.create("busy")
    if state is DRAIN:
        peer.session.begin_drain(1000)
    peer.read()
    frames = peer.text(text)
    assert [frame["error"]["code"] if frame["type"] == "error" else frame["type"] for frame in frames] == answers
    assert close_code(peer) == code
    assert peer.session.state is after


@pytest.mark.parametrize("text", [row[1] for row in TABLE])
def test_closed_says_and_does_nothing(text: str) -> None:
    peer = opened()
    peer.lose()
    assert peer.text(text) == [] and not peer.starting
    assert peer.session.state is SessionState.CLOSED


def test_welcome() -> None:
    (welcome,) = Peer(max_streams=3, resume_s=7.0, heartbeat_s=9.0).read()
    assert len(welcome.pop("session")) == 34
    assert welcome == {
        "type": "welcome", "server": "headrace/test", "models": ["scripted"], "features": ["detach"],
        "limits": {"max_streams": 3, "max_frame_bytes": 4 << 20, "max_context": 4096},
        "heartbeat_s": 9.0, "resume_s": 7.0, "contract": f"fp_{'1' * 64}", "numerics": f"nm_{'2' * 64}",
    }  # fmt: skip


def test_hello_is_refused_when_the_key_has_too_many_sockets() -> None:
    peer = Peer(identity=None)
    peer.host.is_full = True
    assert peer.text(HELLO_GOOD) == [] and close_code(peer) == 4429


def test_a_late_hello_closes_and_a_timely_one_does_not() -> None:
    late, timely = Peer(identity=None), Peer(identity=None)
    timely.text(HELLO_GOOD)
    for peer in (late, timely):
        peer.session.hello_is_late()
    assert (close_code(late), close_code(timely)) == (4408, None)


def test_binary_is_fatal() -> None:
    peer = opened()
    peer.session.receive_bytes()
    assert close_code(peer) == 4400


def test_close_reasons_fit_a_close_frame() -> None:
    peer = opened()
    peer.text("[" * 200_000)
    assert peer.session.close is not None and len(peer.session.close.reason.encode()) <= 123


# Bounds


def test_answers_that_nobody_reads_are_bounded() -> None:
    peer = opened()
    for _ in range(MAX_UNREAD_ANSWERS + 1):
        peer.session.receive_text(PING)
    assert close_code(peer) == 4429
    assert len(peer.read()) == 0


def test_idle_closes_only_without_streams() -> None:
    busy, idle = opened(), opened()
    busy.create("r")
    busy.session.idle_too_long()
    idle.session.idle_too_long()
    assert (close_code(busy), close_code(idle)) == (None, 1000)


# Shutdown


def test_drain_lets_streams_end_then_closes() -> None:
    peer = opened()
    script = peer.create("r")
    peer.read()
    peer.session.begin_drain(30_000)
    assert peer.read() == [{"type": "goaway", "reason": "shutdown", "deadline_ms": 30_000}]
    assert close_code(peer) is None
    script.tokens(b"x")
    script.finish()
    assert kinds(peer.read()) == ["delta", "done"]
    assert close_code(peer) == 1001


def test_drain_closes_an_idle_or_unauthenticated_socket_at_once() -> None:
    idle, silent = opened(), Peer(identity=None)
    for peer in (idle, silent):
        peer.session.begin_drain(30_000)
        peer.read()
        assert close_code(peer) == 1001


def test_abort_ends_every_stream_with_shutting_down() -> None:
    peer = opened()
    running, ended = peer.create("running"), peer.create("ended")
    ended.finish()
    peer.send("create", id="preparing", endpoint="chat", body={})
    stopped: list[str] = []
    peer.starting["preparing"].preparing(lambda: stopped.append("x"))
    peer.session.begin_drain(1000)
    peer.read()
    assert peer.session.abort() == 2
    frames = peer.read()
    assert sorted((f["id"], f["error"]["code"]) for f in frames) == [
        ("preparing", "shutting_down"), ("running", "shutting_down"),
    ]  # fmt: skip
    assert running.cancels == [CancelReason.SHUTDOWN] and stopped == ["x"]
    assert close_code(peer) == 1001


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=40) | st.sampled_from([row[1] for row in TABLE]), max_size=20))
def test_no_text_breaks_a_session(texts: list[str]) -> None:
    peer = opened()
    for text in texts:
        peer.text(text)
    answered = kinds(peer.frames)
    assert set(answered) <= {"welcome", "pong", "error", "created"}
