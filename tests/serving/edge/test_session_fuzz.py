"""Whatever clients, engine and network do, numbers have no gap and each stream ends once."""

import json
from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.serving.core.request import FinishReason
from headrace.serving.edge.errors import ApiError, ErrorCode
from headrace.serving.edge.stream import Stream
from tests.serving.edge.scripted import Script
from tests.serving.edge.session_peer import Frame, opened

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
            peer.session.receive_text('{"type":"ping"}')
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
