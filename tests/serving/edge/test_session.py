"""The native protocol without sockets: a table of (state, input) → output, streams, cancel, resume, drain; fuzzed."""

import json
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.serving.core.plan import TokenLogprobs
from headrace.serving.core.request import CancelReason, FinishReason
from headrace.serving.edge.bodies import JobOptions
from headrace.serving.edge.errors import ApiError, ErrorCode
from headrace.serving.edge.fields import Endpoint
from headrace.serving.edge.keys import ANONYMOUS, Identity
from headrace.serving.edge.session import MAX_UNREAD_ANSWERS, Session, SessionConfig, SessionState
from headrace.serving.edge.stream import ReplayBudget, Stream
from tests.serving.edge.scripted import Script

Frame = dict[str, Any]
ALICE, BOB = Identity("alice", b"a"), Identity("bob", b"b")


class Host:
    """A server around sessions, with two keys."""

    model_names = ("scripted",)
    max_context = 4096

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.keys = {"key-a": ALICE, "key-b": BOB}
        self.is_full = False
        self.budget = ReplayBudget(1 << 20)

    def identify(self, key: str) -> Identity | None:
        return self.keys.get(key)

    def has_room_for(self, identity: Identity) -> bool:
        return not self.is_full

    def is_current(self, identity: Identity) -> bool:
        return identity is ANONYMOUS or identity in self.keys.values()

    def find_session(self, secret: str) -> Session | None:
        return self.sessions.get(secret)


class Peer:
    """A client and the driver of its session, in one."""

    def __init__(self, host: Host | None = None, identity: Identity | None = ANONYMOUS, **config: Any) -> None:
        self.host = host or Host()
        self.wakes = 0
        self.session = Session(
            SessionConfig(server="headrace/test", **config),
            self.host,
            identity=identity,
            budget=self.host.budget,
            on_output=self._wake,
        )
        self.host.sessions[self.session.secret] = self.session
        self.starting: dict[str, Stream] = {}
        self.scripts: dict[str, Script] = {}
        self.frames: list[Frame] = []

    def _wake(self) -> None:
        self.wakes += 1

    def send(self, kind: str, **fields: Any) -> list[Frame]:
        return self.text(json.dumps({"type": kind, **fields}))

    def text(self, text: str) -> list[Frame]:
        start = self.session.receive_text(text)
        if start is not None:
            self.starting[start.stream.id] = start.stream
        return self.read()

    def read(self, limit: int = 10_000) -> list[Frame]:
        """What a client that keeps up receives now."""
        new = []
        while len(new) < limit and (frame := self.session.next_frame()) is not None:
            new.append(json.loads(frame))
        self.frames += new
        return new

    def create(self, stream_id: str, *, script: Script | None = None, detach: bool = False) -> Script:
        """A started stream."""
        text = json.dumps({"type": "create", "id": stream_id, "endpoint": "completion", "body": {}, "detach": detach})
        start = self.session.receive_text(text)
        assert start is not None
        self.scripts[stream_id] = script or Script(len(self.scripts))
        start.stream.started(self.scripts[stream_id].job)
        return self.scripts[stream_id]

    def lose(self, reason: CancelReason = CancelReason.DISCONNECT) -> None:
        self.session.disconnected(reason)


def kinds(frames: list[Frame]) -> list[str]:
    return [frame["type"] for frame in frames]


def codes(frames: list[Frame]) -> list[str]:
    return [frame["error"]["code"] for frame in frames]


def close_code(peer: Peer) -> int | None:
    return None if peer.session.close is None else int(peer.session.close.code)


def opened(**config: Any) -> Peer:
    peer = Peer(**config)
    assert kinds(peer.read()) == ["welcome"]
    return peer


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
        "heartbeat_s": 9.0, "resume_s": 7.0,
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


# Streams


def test_one_stream() -> None:
    peer = opened()
    script = peer.create("r1")
    assert peer.read() == [
        {
            "type": "created", "id": "r1", "seq": 0, "request_id": "req_" + "0" * 32, "model": "scripted",
            "created": 1, "queue_depth": 0, "choices": 1,
        }
    ]  # fmt: skip
    script.tokens(b"He")
    assert peer.read() == [{"type": "delta", "id": "r1", "seq": 1, "index": 0, "text": "He", "n": 2}]
    script.tokens(b"y")
    script.finish(FinishReason.STOP, stop_token_id=9)
    assert peer.read() == [
        {"type": "delta", "id": "r1", "seq": 2, "index": 0, "text": "y", "n": 1},
        {
            "type": "done", "id": "r1", "seq": 3,
            "choices": [{"index": 0, "finish_reason": "stop", "stop_reason": 9}],
            "usage": {
                "prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6,
                "prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": {"reasoning_tokens": 0},
            },
            "metrics": {
                "queue_ms": 1.0, "prefill_ms": 2.0, "first_token_ms": 4.0, "decode_ms": 3.0, "preemptions": 0,
            },
        },
    ]  # fmt: skip
    assert peer.session.num_streams == 0


def test_output_nobody_takes_is_merged_and_each_stream_has_its_turn() -> None:
    peer = opened()
    one, two = peer.create("one"), peer.create("two")
    peer.read()
    for _ in range(1000):
        one.tokens(b"a")
    two.tokens(b"b")
    first, second = peer.read(2)
    assert (first["id"], first["n"], first["text"]) == ("one", 1000, "a" * 1000)
    one.tokens(b"a")
    assert (second["id"], second["n"]) == ("two", 1)
    assert [(frame["id"], frame["seq"], frame["n"]) for frame in peer.read()] == [("one", 2, 1)]


def test_a_busy_stream_does_not_starve_another() -> None:
    peer = opened()
    scripts = [peer.create(name) for name in ("a", "b", "c")]
    peer.read()
    order = []
    for _ in range(4):
        for script in scripts:
            script.tokens(b"x")
        order += [frame["id"] for frame in peer.read(1)]
    assert order == ["a", "b", "c", "a"]


def test_chat_has_its_role_once_and_token_ids_when_asked() -> None:
    peer = opened()
    options = JobOptions(return_token_ids=True, ignored_fields=("foo",))
    peer.send("create", id="r", endpoint="chat", body={})
    script = Script(0, endpoint=Endpoint.CHAT, choices=2, options=options)
    peer.starting["r"].started(script.job)
    script.tokens(b"a", 0)
    script.tokens(b"b", 1)
    created, *deltas = peer.read()
    script.tokens(b"c", 1)
    deltas += peer.read()
    assert created["prompt_token_ids"] == [[1, 2, 3], [1, 2, 3]] and created["ignored_fields"] == ["foo"]
    assert [(d["index"], d.get("role"), d["token_ids"]) for d in deltas] == [
        (0, "assistant", [97]), (1, "assistant", [98]), (1, None, [99]),
    ]  # fmt: skip


def test_merged_logprobs_come_in_frames_of_bounded_size() -> None:
    peer = opened()
    options = JobOptions(return_token_ids=True, logprobs=True)
    script = peer.create("r", script=Script(0, options=options))
    script.tokens(b"x" * 600, logprobs=TokenLogprobs(chosen=-0.5, rank=1, top=()))
    script.finish()
    _, *deltas, done = peer.read()
    assert [delta["n"] for delta in deltas] == [256, 256, 88]
    assert "".join(delta["text"] for delta in deltas) == "x" * 600
    assert all(len(delta["token_ids"]) == len(delta["logprobs"]) == delta["n"] for delta in deltas)
    assert deltas[0]["logprobs"][0]["logprob"] == -0.5 and deltas[0]["logprobs"][0]["token_id"] == ord("x")
    assert [frame["seq"] for frame in (*deltas, done)] == [1, 2, 3, 4]


def test_a_stream_with_choices_ends_once_with_all_of_them() -> None:
    peer = opened()
    script = peer.create("r", script=Script(0, choices=3))
    for index in (2, 0, 1):
        script.tokens(b"x", index)
        script.finish(FinishReason.LENGTH, index)
    frames = peer.read()
    assert kinds(frames) == ["created", "delta", "delta", "delta", "done"]
    assert [choice["index"] for choice in frames[-1]["choices"]] == [0, 1, 2]
    assert frames[-1]["usage"]["completion_tokens"] == 3


def test_one_failed_choice_ends_the_stream_and_stops_the_others() -> None:
    peer = opened()
    script = peer.create("r", script=Script(0, choices=2))
    script.tokens(b"x", 0)
    script.finish(FinishReason.ERROR, 1, error_code="poisoned", error_message="no")
    frames = peer.read()
    assert kinds(frames) == ["created", "delta", "error"] and codes(frames[-1:]) == ["poisoned"]
    assert script.cancels == [CancelReason.CLIENT]
    script.tokens(b"late", 0)
    assert peer.read() == []


def test_a_lost_engine_is_an_error_of_every_stream() -> None:
    peer = opened()
    scripts = [peer.create("a"), peer.create("b")]
    peer.read()
    for script in scripts:
        script.lose()
    assert [(f["id"], f["seq"], f["status"], f["error"]["code"]) for f in peer.read()] == [
        ("a", 1, 503, "engine_lost"), ("b", 1, 503, "engine_lost"),
    ]  # fmt: skip


def test_a_refused_request_is_the_terminal_frame_of_its_stream() -> None:
    peer = opened()
    peer.send("create", id="r", endpoint="chat", body={})
    peer.starting["r"].fail(ApiError(ErrorCode.QUEUE_FULL, "full", retry_after_ms=500))
    (frame,) = peer.read()
    assert (frame["id"], frame["seq"], frame["status"], frame["retry_after_ms"]) == ("r", 0, 429, 500)
    assert frame["error"] == {"type": "overloaded", "code": "queue_full", "message": "full", "param": None}
    peer.create("r").finish()
    assert kinds(peer.read()) == ["created", "done"]


# Ids


def test_a_duplicate_id_is_refused_and_the_live_stream_untouched() -> None:
    peer = opened()
    script = peer.create("r")
    peer.read()
    for text in (CREATE.replace("new", "r"), BAD_CREATE.replace("new", "r")):
        (frame,) = peer.text(text)
        assert frame["id"] is None and frame["id_rejected"] == "r" and "seq" not in frame
    assert peer.frames[-2]["error"]["code"] == "duplicate_id"
    script.tokens(b"x")
    script.finish()
    assert [(frame["type"], frame["seq"]) for frame in peer.read()] == [("delta", 1), ("done", 2)]


def test_an_id_may_be_used_again_at_once_many_times() -> None:
    peer = opened()
    for turn in range(1000):
        script = peer.create("r")
        if turn % 2:
            peer.send("cancel", id="r")
        else:
            script.finish()
        peer.read()
    by_kind = [kind for kind in kinds(peer.frames) if kind != "welcome"]
    assert by_kind == ["created", "done"] * 1000


def test_one_id_on_two_sockets_is_two_streams() -> None:
    host = Host()
    one, two = opened(host=host), opened(host=host)
    first, second = one.create("r"), two.create("r")
    one.send("cancel", id="r")
    assert (first.cancels, second.cancels) == ([CancelReason.CLIENT], [])


def test_too_many_streams() -> None:
    peer = opened(max_streams=2)
    script = peer.create("a")
    peer.create("b")
    peer.read()
    (frame,) = peer.send("create", id="c", endpoint="chat", body={})
    assert (frame["id"], frame["seq"], frame["status"], frame["error"]["code"]) == ("c", 0, 429, "too_many_streams")
    script.finish()
    peer.read()
    peer.create("c")


def test_a_revoked_key_starts_nothing_but_keeps_what_runs() -> None:
    peer = Peer(identity=ALICE)
    peer.read()
    script = peer.create("r")
    peer.read()
    del peer.host.keys["key-a"]
    (refused,) = peer.send("create", id="s", endpoint="chat", body={})
    assert (refused["status"], refused["error"]["code"]) == (401, "invalid_api_key")
    script.finish()
    assert kinds(peer.read()) == ["done"]


# Cancel


@pytest.mark.parametrize("after", range(5))
def test_cancel_at_every_point_ends_once(after: int) -> None:
    peer = opened()
    script = peer.create("r")
    for _ in range(after):
        script.tokens(b"x")
        peer.read()
    peer.send("cancel", id="r")
    peer.send("cancel", id="r")
    script.tokens(b"late")
    done = peer.frames[-1]
    assert done["type"] == "done" and done["choices"][0]["finish_reason"] == "cancelled"
    assert done["usage"]["completion_tokens"] == after
    assert script.cancels == [CancelReason.CLIENT]
    assert peer.send("cancel", id="r") == [], "a cancel that comes too late is not an error"
    assert [f["seq"] for f in peer.frames if f["type"] != "welcome"] == list(range(len(peer.frames) - 1))


def test_cancel_while_preparing_cancels_when_it_starts() -> None:
    peer = opened()
    peer.send("create", id="r", endpoint="chat", body={})
    assert peer.send("cancel", id="r") == []
    script = Script(0)
    peer.starting["r"].started(script.job)
    assert script.cancels == [CancelReason.CLIENT]
    assert kinds(peer.read()) == ["created", "done"]


def test_cancel_races_with_the_last_token() -> None:
    peer = opened()
    script = peer.create("r")
    script.tokens(b"x")
    script.finish(FinishReason.STOP)
    frames = peer.send("cancel", id="r")
    assert frames[-1]["choices"][0]["finish_reason"] == "stop" and script.cancels == []


# Disconnect and resume


def test_disconnect_cancels_what_is_not_detached() -> None:
    peer = opened()
    plain, kept = peer.create("plain"), peer.create("kept", detach=True)
    stopped: list[str] = []
    peer.send("create", id="preparing", endpoint="chat", body={})
    peer.starting["preparing"].preparing(lambda: stopped.append("preparing"))
    peer.lose()
    assert (plain.cancels, kept.cancels, stopped) == ([CancelReason.DISCONNECT], [], ["preparing"])
    late = Script(9)
    peer.starting["preparing"].started(late.job)
    assert late.cancels == [CancelReason.DISCONNECT]
    peer.session.expire(CancelReason.DISCONNECT)
    assert kept.cancels == [CancelReason.DISCONNECT] and peer.host.budget.used_bytes == 0


def resume(old: Peer, stream_id: str = "r", after: int | None = None, identity: Identity = ANONYMOUS) -> Peer:
    new = Peer(old.host, identity)
    new.read()
    new.send("resume", session=old.session.secret, id=stream_id, **({} if after is None else {"after": after}))
    return new


@pytest.mark.parametrize("after", [None, 0, 1, 2])
@pytest.mark.parametrize("is_lost", [True, False])
def test_resume_repeats_and_goes_on_without_a_gap(after: int | None, is_lost: bool) -> None:
    old = opened()
    script = old.create("r", detach=True)
    for letter in (b"a", b"b"):
        script.tokens(letter)
        old.read()
    if is_lost:
        old.lose()
    script.tokens(b"cd")
    new = resume(old, after=after)
    script.finish()
    script_frames = new.read()
    assert script_frames[-1]["type"] == "done"
    frames = new.frames[1:]
    first = 0 if after is None else after + 1
    assert [frame["seq"] for frame in frames] == list(range(first, 5))
    text = "".join(frame.get("text", "") for frame in frames)
    assert text == "abcd"[max(0, first - 1) :]
    assert old.read() == [] and script.cancels == []


def test_resume_after_the_end_repeats_the_terminal_frame() -> None:
    old = opened()
    script = old.create("r", detach=True)
    script.tokens(b"a")
    script.finish()
    assert kinds(old.read()) == ["created", "delta", "done"]
    old.lose()
    new = resume(old, after=1)
    assert [(f["type"], f["seq"]) for f in new.frames[1:]] == [("done", 2)]
    again = resume(new, after=0)
    assert [(f["type"], f["seq"]) for f in again.frames[1:]] == [("delta", 1), ("done", 2)]


def test_a_stream_that_was_preparing_when_the_connection_was_lost_can_be_resumed() -> None:
    old = opened()
    old.send("create", id="r", endpoint="chat", body={}, detach=True)
    old.lose()
    new = resume(old)
    script = Script(0)
    old.starting["r"].started(script.job)
    script.finish()
    assert kinds(new.read()) == ["created", "done"]


@pytest.mark.parametrize(
    "case", ["wrong session", "wrong id", "not detached", "other tenant", "never sent", "log dropped", "expired"]
)
def test_resume_gone(case: str) -> None:
    host = Host()
    old = Peer(host, ALICE, replay_bytes=300)
    old.read()
    script = old.create("r", detach=case != "not detached")
    script.tokens(b"a")
    old.read()
    if case == "log dropped":
        script.tokens(b"b" * 400)
        old.read()
    if case != "wrong session":
        old.lose()
    if case == "expired":
        old.session.expire(CancelReason.DISCONNECT)
    secret = "s_" + "0" * 32 if case == "wrong session" else old.session.secret
    new = Peer(host, BOB if case == "other tenant" else ALICE)
    new.read()
    frames = new.send(
        "resume", session=secret, id="q" if case == "wrong id" else "r", after=7 if case == "never sent" else 0
    )
    assert codes(frames) == ["resume_gone"]
    assert frames[0]["id"] is None and frames[0]["id_rejected"] == ("q" if case == "wrong id" else "r")
    if case == "other tenant":
        good = Peer(host, ALICE)
        good.read()
        assert kinds(good.send("resume", session=secret, id="r", after=0)) == ["delta"], "the refusal changed nothing"


def test_resume_onto_a_live_id_is_a_duplicate() -> None:
    old = opened()
    old.create("r", detach=True)
    old.lose()
    new = opened(host=old.host)
    new.create("r")
    new.read()
    assert codes(new.send("resume", session=old.session.secret, id="r")) == ["duplicate_id"]


def test_logs_stay_within_the_budget_of_the_server() -> None:
    host = Host()
    host.budget = ReplayBudget(2000)
    peer = opened(host=host, max_streams=8)
    for turn in range(50):
        script = peer.create(f"r{turn}", detach=True)
        script.tokens(b"x" * 100)
        script.finish()
        peer.read()
        assert host.budget.used_bytes <= 2000
    peer.lose()
    peer.session.expire(CancelReason.DISCONNECT)
    assert host.budget.used_bytes == 0


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


# Fuzz: whatever clients, engine and network do, numbers have no gap and each stream ends once.

IDS = ["a", "b", "c"]
ACTIONS = st.one_of(
    st.tuples(st.just("create"), st.sampled_from(IDS), st.booleans()),
    st.tuples(st.sampled_from(["start", "fail", "token", "finish", "error", "lose engine", "cancel"]),
              st.sampled_from(IDS), st.just(False)),
    st.tuples(st.just("read"), st.just(""), st.just(False)),
    st.tuples(st.sampled_from(["reconnect", "ping", "drain"]), st.just(""), st.just(False)),
)  # fmt: skip


class FuzzWorld:
    """One client that reconnects and resumes, checking what it sees."""

    def __init__(self) -> None:
        self.peer = opened(max_streams=2)
        self.starting: dict[str, Stream] = {}
        self.scripts: dict[str, Script] = {}
        self.next_seq: dict[str, int] = {}
        self.detached: set[str] = set()
        self.texts: dict[str, str] = defaultdict(str)

    def check(self, frames: list[Frame]) -> None:
        for frame in frames:
            stream_id = frame.get("id")
            if stream_id is None:
                continue
            if frame["seq"] == 0 and stream_id not in self.next_seq:
                self.next_seq[stream_id] = 0
            assert frame["seq"] == self.next_seq[stream_id], frame
            self.next_seq[stream_id] += 1
            if frame["type"] == "delta":
                self.texts[stream_id] += frame["text"]
            if frame["type"] == "done":
                script = self.scripts[stream_id]
                assert frame["usage"]["completion_tokens"] == len(self.texts[stream_id]) == script.sent[0]
            if frame["type"] in ("done", "error"):
                for record in (self.next_seq, self.texts, self.scripts, self.starting):
                    record.pop(stream_id, None)
                self.detached.discard(stream_id)

    def do(self, action: str, stream_id: str, detach: bool) -> None:
        peer = self.peer
        if action == "create":
            start = peer.session.receive_text(
                json.dumps({"type": "create", "id": stream_id, "endpoint": "chat", "body": {}, "detach": detach})
            )
            if start is not None:
                for record in (self.next_seq, self.texts, self.scripts):
                    assert stream_id not in record or not peer.session.num_streams, "id reused while live"
                self.starting[stream_id] = start.stream
                if detach:
                    self.detached.add(stream_id)
        elif action == "start" and stream_id in self.starting:
            self.scripts[stream_id] = Script(0)
            self.starting.pop(stream_id).started(self.scripts[stream_id].job)
        elif action == "fail" and stream_id in self.starting:
            self.starting.pop(stream_id).fail(ApiError(ErrorCode.QUEUE_FULL, "full"))
        elif action in ("token", "finish", "error", "lose engine") and stream_id in self.scripts:
            script = self.scripts[stream_id]
            if script.job.generations[0].is_ended:
                return
            if action == "token":
                script.tokens(b"t")
            elif action == "finish":
                script.finish()
            elif action == "error":
                script.finish(FinishReason.ERROR, error_code="x", error_message="y")
            else:
                script.lose()
        elif action == "cancel":
            peer.send("cancel", id=stream_id)
            self.check(peer.frames)
            peer.frames.clear()
        elif action == "read":
            self.check(peer.read(1))
            peer.frames.clear()
        elif action == "ping":
            peer.session.receive_text(PING)
        elif action == "drain":
            peer.session.begin_drain(5)
        elif action == "reconnect":
            self.reconnect()

    def reconnect(self) -> None:
        old = self.peer
        old.lose()
        for stream_id in IDS:
            if stream_id not in self.detached:
                for record in (self.next_seq, self.texts, self.scripts, self.starting):
                    record.pop(stream_id, None)
        self.peer = opened(host=old.host, max_streams=2)
        for stream_id in sorted(self.detached):
            seen = self.next_seq.get(stream_id, 0) - 1
            after = {"after": seen} if seen >= 0 else {}
            text = json.dumps({"type": "resume", "session": old.session.secret, "id": stream_id, **after})
            self.peer.session.receive_text(text)

    def end(self) -> None:
        self.peer.session.abort()
        self.check(self.peer.read())
        assert self.peer.session.num_streams == 0
        assert not self.next_seq, "a stream that showed a frame has no terminal"


@settings(max_examples=300, deadline=None)
@given(st.lists(ACTIONS, max_size=60))
def test_numbers_have_no_gap_and_each_stream_ends_once(actions: list[tuple[str, str, bool]]) -> None:
    world = FuzzWorld()
    for action in actions:
        world.do(*action)
    world.end()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=40) | st.sampled_from([row[1] for row in TABLE]), max_size=20))
def test_no_text_breaks_a_session(texts: list[str]) -> None:
    peer = opened()
    for text in texts:
        peer.text(text)
    answered = kinds(peer.frames)
    assert set(answered) <= {"welcome", "pong", "error", "created"}
