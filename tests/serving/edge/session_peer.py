"""A client and the driver of its session in one, without sockets."""

import json
from typing import Any

from headrace.serving.core.request import CancelReason
from headrace.serving.edge.errors import ApiError, ErrorCode
from headrace.serving.edge.keys import ANONYMOUS, Identity
from headrace.serving.edge.session import Session, SessionConfig
from headrace.serving.edge.stream import ReplayBudget, Stream
from tests.serving.edge.scripted import Script

Frame = dict[str, Any]
ALICE, BOB = Identity("alice", b"a"), Identity("bob", b"b")


class Host:
    """A server around sessions, with two keys."""

    model_names = ("scripted",)
    max_context = 4096
    contract_hashes = (f"fp_{'1' * 64}", f"nm_{'2' * 64}")

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.keys = {"key-a": ALICE, "key-b": BOB}
        self.is_full = False
        self.budget = ReplayBudget(1 << 20)

    def contract_fault(self, expected: str) -> ApiError | None:
        if expected in self.contract_hashes:
            return None
        return ApiError(ErrorCode.CONTRACT_MISMATCH, "scripted", param="expect_contract")

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
