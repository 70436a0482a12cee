"""Broken WebSocket connections, drawn from a grammar, and what each may end with, worked out apart from the server.

A frame has an opcode, flags, a form of its length, a mask and a payload, each of which may be wrong; a connection has
an order of frames and a timing. The model below reads the frames after RFC 6455 and PROTOCOL.md.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.raw_websocket import BINARY, CLOSE, CONT, PING, PONG, TEXT, frame, say

MAX_MESSAGE = 4 << 20
MAX_CONTROLS = 50
"""Pings and pongs at once; more cost the connection, or not, by how fast they come."""
CONTROL = frozenset({CLOSE, PING, PONG})
OPCODES = frozenset({CONT, TEXT, BINARY}) | CONTROL

GOOD_TEXT = (
    say("ping"),
    say("ping", t=1),
    say("ping", t="é€\U0001f600"),
    say("hello", client="fuzz/1"),
    say("cancel", id="nobody"),
    say("resume", session="s_0", id="x"),
    say("create", id="", endpoint="chat", body={}),
    say("create", id="a b", endpoint="chat", body={}),
    say("create", id="a", endpoint="nowhere", body={}),
    say("create", id="a", endpoint="chat", body={"messages": 1}),
    say("create", id="a", endpoint="completion", body={"prompt": "x", "max_tokens": 1, "temperature": 0}),
    say("unheard-of", id=1),
    b'{"type":"ping","type":"ping"}',
    b'{"type":"ping","t":NaN}',
    b'{"type":"ping","t":"\\ud800"}',
    b"{}",
)
"""Messages after which the socket stays open, whatever the answer."""
FATAL_TEXT = (b"", b"[]", b"null", b'"text"', b"7", b"{", b'{"type":}', b"\xef\xbb\xbf{}", b"[" * 100, b"ping", b"\x00")
NOT_UTF8 = (
    b"\xff",
    b"\xc0\xaf",
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    b'{"type":"ping","t":"\xe2\x82"}',
    b"\xf0\x9f\x98",
)
CODES = (1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 1014, 3000, 4000, 4999)
BAD_CODES = (0, 1, 999, 1004, 1005, 1006, 1015, 1016, 2000, 2999, 5000, 65535)


@dataclass(frozen=True, slots=True, kw_only=True)
class WireFrame:
    """claimed: the length in the header, None for the truth; a longer one leaves the frame unfinished."""

    opcode: int
    data: bytes = b""
    fin: bool = True
    rsv: int = 0
    masked: bool = True
    form: int | None = None
    claimed: int | None = None

    @property
    def length(self) -> int:
        return len(self.data) if self.claimed is None else self.claimed

    def wire(self, rng: random.Random) -> bytes:
        return frame(
            self.opcode,
            self.data,
            fin=self.fin,
            rsv=self.rsv,
            mask=rng.randbytes(4) if self.masked else None,
            length_form=self.form,
            length=self.claimed,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """codes: of the close frames that may come, None for one without a code. is_open: none of them has to come.
    answers: the socket then still answers, since no message and no frame is unfinished. may_reset: bytes follow a sound
    close frame, and a kernel that has unread bytes ends the connection with a reset, which may destroy the answer."""

    codes: frozenset[int | None]
    is_open: bool
    answers: bool
    may_reset: bool = False


@dataclass(slots=True)
class Reader:
    """The model: reads frames until one ends the connection for certain."""

    codes: set[int | None] = field(default_factory=set)
    message: bytes = b""
    kind: int | None = None
    controls: int = 0

    def run(self, frames: Sequence[WireFrame]) -> Outcome:
        for i, wire in enumerate(frames):
            end = self._end_of(wire)
            if end is not None:
                self.codes |= end
                is_close, is_last = wire.opcode == CLOSE, i == len(frames) - 1
                return Outcome(frozenset(self.codes), is_open=False, answers=False, may_reset=is_close and not is_last)
            if wire.length > len(wire.data):
                return Outcome(frozenset(self.codes), is_open=not self.codes - {1008}, answers=False)
        is_open = not self.codes - {1008}
        return Outcome(frozenset(self.codes), is_open=is_open, answers=not self.codes and self.kind is None)

    def _end_of(self, wire: WireFrame) -> set[int | None] | None:
        """The codes with which this frame ends the connection at once; what ends it a little later goes to codes."""
        if wire.opcode not in OPCODES or not wire.masked:
            return {1002}
        if wire.length > MAX_MESSAGE - len(self.message):
            return {1009}
        if wire.length > len(wire.data):
            return None
        is_control = wire.opcode in CONTROL
        if wire.rsv or (is_control and (not wire.fin or wire.length > 125)):
            return {1002}
        if wire.opcode == CLOSE:
            return {self._close_code(wire.data)}
        if is_control:
            self.controls += 1
            if self.controls > MAX_CONTROLS:
                self.codes.add(1008)
            return None
        if (wire.opcode == CONT) == (self.kind is None):
            return {1002}
        self._take(wire)
        return None

    def _close_code(self, data: bytes) -> int | None:
        code = int.from_bytes(data[:2], "big")
        if len(data) == 1:
            return 1002
        if not _is_utf8(data[2:]):
            return 1007
        if self.kind is not None:
            return 1002  # the library's choice; see scripts/autobahn/results.md, case 7.1.5
        if not data:
            return None
        return code if code in CODES else 1002

    def _take(self, wire: WireFrame) -> None:
        if wire.opcode != CONT:
            self.kind, self.message = wire.opcode, b""
        self.message += wire.data
        if not wire.fin:
            return
        if self.kind == BINARY:
            self.codes.add(4400)
        elif not _is_utf8(self.message):
            self.codes.add(1007)
        elif not _is_object(self.message):
            self.codes.add(4400)
        self.kind, self.message = None, b""


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_object(text: bytes) -> bool:
    try:
        return isinstance(json.loads(text.decode()), dict)
    except (ValueError, RecursionError):
        return False


@dataclass(frozen=True, slots=True)
class FrameCase:
    """pieces: what is sent, each followed by its pause in seconds. is_cut: the last frame lacks its end, so that a
    close frame behind it would be part of it."""

    pieces: tuple[tuple[bytes, float], ...]
    outcome: Outcome
    is_cut: bool

    @property
    def sent(self) -> bytes:
        return b"".join(data for data, _ in self.pieces)


def draw_case(rng: random.Random) -> FrameCase:
    """One connection: up to six items of the grammar, of which at least one is likely to be wrong."""
    frames: list[WireFrame] = []
    for _ in range(rng.choice((1, 1, 2, 3, 4, 6))):
        frames += rng.choices((_good, _broken, _odd_order, _closing, _flood), (40, 30, 15, 12, 3))[0](rng)
    for i, wire in enumerate(frames):
        if wire.length > len(wire.data):  # it would swallow what follows
            del frames[i + 1 :]
            break
    data = b"".join(wire.wire(rng) for wire in frames)
    is_cut = frames[-1].length > len(frames[-1].data)
    return FrameCase(_timed(rng, data), Reader().run(frames), is_cut)


def _good(rng: random.Random) -> list[WireFrame]:
    if rng.random() < 0.3:
        return [WireFrame(opcode=rng.choice((PING, PONG)), data=rng.randbytes(rng.choice((0, 1, 4, 124, 125))))]
    pools = (GOOD_TEXT, FATAL_TEXT, NOT_UTF8, (rng.randbytes(rng.randrange(200)),))
    text = rng.choice(rng.choices(pools, (75, 10, 10, 5))[0])
    form = rng.choice((None, None, None, 16, 64))
    if rng.random() < 0.4 or len(text) < 2:
        return [WireFrame(opcode=TEXT, data=text, form=form)]
    return _fragmented(rng, text)


def _fragmented(rng: random.Random, data: bytes) -> list[WireFrame]:
    """With control frames between the fragments now and then."""
    cuts = sorted(rng.choices(range(len(data) + 1), k=rng.randrange(1, 6)))
    edges = [0, *cuts, len(data)]
    frames: list[WireFrame] = []
    for i, (a, b) in enumerate(zip(edges, edges[1:], strict=False)):
        frames.append(WireFrame(opcode=CONT if i else TEXT, data=data[a:b], fin=i == len(edges) - 2))
        if i < len(edges) - 2 and rng.random() < 0.3:
            frames.append(WireFrame(opcode=rng.choice((PING, PONG)), data=b"between"))
    return frames


def _broken(rng: random.Random) -> list[WireFrame]:
    """One frame with one or two properties out of order."""
    opcode = rng.choice((CONT, TEXT, BINARY, PING, PONG, CLOSE, rng.choice((3, 4, 5, 6, 7, 11, 12, 13, 14, 15))))
    data = rng.choice((b"", b"x", say("ping"), rng.randbytes(rng.choice((2, 125, 126, 127, 300, 65535, 65536)))))
    if opcode == CLOSE:
        data = data[:125]
    claimed: int | None = None
    if rng.random() < 0.25:
        claimed = rng.choice((len(data) + 1, len(data) + 1000, MAX_MESSAGE, MAX_MESSAGE + 1, 1 << 32, (1 << 63) + 5))
    return [
        WireFrame(
            opcode=opcode,
            data=data,
            fin=rng.random() < 0.7,
            rsv=rng.choice((0, 0, 0, 1, 2, 4, 7)),
            masked=rng.random() < 0.8,
            form=None if claimed is not None else rng.choice((None, 64) if len(data) > 65535 else (None, 16, 64)),
            claimed=claimed,
        )
    ]


def _odd_order(rng: random.Random) -> list[WireFrame]:
    """Fragments and whole messages in an order that need not make sense."""
    texts = (b"", b"{", b"}", say("ping"))
    return [
        WireFrame(opcode=rng.choice((CONT, CONT, TEXT, BINARY)), data=rng.choice(texts), fin=rng.random() < 0.5)
        for _ in range(rng.randrange(1, 5))
    ]


def _closing(rng: random.Random) -> list[WireFrame]:
    code = rng.choice(CODES if rng.random() < 0.5 else BAD_CODES).to_bytes(2, "big")
    reason = rng.choice((b"", b"bye", "zü".encode(), b"\xff", b"r" * 123, b"r" * 124, b"\xed\xa0\x80"))
    data = rng.choice((b"", b"\x03", code, code + reason, code + reason))
    return [WireFrame(opcode=CLOSE, data=data, fin=rng.random() < 0.95)]


def _flood(rng: random.Random) -> list[WireFrame]:
    return [WireFrame(opcode=rng.choice((PING, PONG)), data=b"f")] * rng.choice((20, 200))


def _timed(rng: random.Random, data: bytes) -> tuple[tuple[bytes, float], ...]:
    way = rng.choices(("whole", "pieces", "bytes", "pauses"), (60, 20, 10, 10))[0]
    if way == "whole" or len(data) < 2:
        return ((data, 0.0),)
    if way == "bytes":
        head = data[:300]
        return (*((head[i : i + 1], 0.0) for i in range(len(head))), (data[300:], 0.0))
    cuts = sorted({rng.randrange(1, len(data)) for _ in range(rng.randrange(1, 8 if way == "pieces" else 4))})
    edges = [0, *cuts, len(data)]
    pause_s = 0.003 if way == "pauses" else 0.0
    return tuple((data[a:b], pause_s) for a, b in zip(edges, edges[1:], strict=False))


def draw_handshake(rng: random.Random) -> bytes:
    """The head of an upgrade with a few of its lines or bytes changed."""
    lines = [
        b"GET /v1/stream HTTP/1.1", b"host: localhost", b"upgrade: websocket", b"connection: Upgrade",
        b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==", b"sec-websocket-version: 13",
        b"sec-websocket-protocol: headrace.v1",
    ]  # fmt: skip
    for _ in range(rng.choice((1, 1, 2, 4))):
        i = rng.randrange(len(lines))
        name = lines[i].split(b":")[0]
        lines[i : i + 1] = rng.choice(
            (
                [],
                [lines[i], lines[i]],
                [lines[i].upper()],
                [name + b": " + rng.choice((b"", b"\xff\xfe", b"x" * 20_000, b"14", b"a,b;c=\"d", b"\x00", b"*"))],
                [name + b": " + rng.randbytes(12).hex().encode()],
                [b"PUT /v1/stream HTTP/1.1"],
                [b"GET /%00 HTTP/1.1"],
                [b"GET /v1/stream HTTP/" + rng.choice((b"0.9", b"1.0", b"2.0", b"9", b"1.1.1"))],
                [b"origin: http://evil.example"],
                [b"sec-websocket-extensions: permessage-deflate; client_max_window_bits=\"x"],
                [b"content-length: 7"],
                [b"transfer-encoding: chunked"],
            )
        )  # fmt: skip
        if not lines:
            break
    head = bytearray(b"\r\n".join(lines) + b"\r\n\r\n")
    if rng.random() < 0.3:
        head[rng.randrange(len(head))] = rng.randrange(256)
    return bytes(head)
