"""Frames and handshakes after RFC 6455, case by case, against the real listener with its limits.

Each case says what it costs: a close code, or nothing, and then the socket still answers in headrace.v1. Where the RFC
leaves a choice, or the server takes more than it must, the case says so.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from tests.raw_websocket import (
    BINARY,
    CLOSE,
    CONT,
    PING,
    PONG,
    TEXT,
    RawWebSocket,
    Received,
    accept_of,
    fragments,
    frame,
    handshake,
    say,
)
from tests.serving.edge.live_edge import Edge, running_edge, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

GRINNING = "\U0001f600"
ENDS = "\x7f\x80\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def edge() -> AsyncIterator[Edge]:
    """One server for all cases."""
    async with running_edge() as running:
        yield running
        assert running.endpoint.num_sockets == 0


def sized(num_bytes: int) -> bytes:
    """A ping message of so many bytes."""
    bare = say("ping", t=num_bytes, fill="")
    return say("ping", t=num_bytes, fill="x" * (num_bytes - len(bare)))


def text(t: str) -> bytes:
    return say("ping", t=t)


async def still_answers(client: RawWebSocket) -> None:
    """A whole stream on the same socket."""
    client.send(frame(TEXT, say("create", id="after", endpoint="completion", body={"text": "fine"})))
    assert (await client.read_json("created"))["id"] == "after"
    said = ""
    while (received := await client.read()).opcode == TEXT and b'"delta"' in received.data:
        said += received.data.decode()
    assert "fine" in said and b'"done"' in received.data


@dataclass(frozen=True)
class Accepted:
    """frames: sent at once. t: of the pong messages that answer. pongs: payloads of the pong frames before them."""

    name: str
    frames: list[bytes]
    t: tuple[object, ...] = ()
    pongs: tuple[bytes, ...] = ()


ACCEPTED = [
    # 5.2: payload length in 7, 16 and 64 bits, and the borders between them.
    *(Accepted(f"5.2 length {n}", [frame(TEXT, sized(n))], (n,)) for n in (125, 126, 127, 65535, 65536)),
    # 5.2 has the sender use the shortest form; the server reads the others too: there is nothing to gain for anybody.
    Accepted("5.2 16 bits for a short length", [frame(TEXT, sized(60), length_form=16)], (60,)),
    Accepted("5.2 64 bits for a short length", [frame(TEXT, sized(60), length_form=64)], (60,)),
    Accepted("5.2 64 bits for a middle length", [frame(TEXT, sized(300), length_form=64)], (300,)),
    # 5.3: any key, zeros too.
    Accepted("5.3 a key of zeros", [frame(TEXT, text("z"), mask=bytes(4))], ("z",)),
    Accepted("5.3 a key of ones", [frame(TEXT, text("z"), mask=b"\xff" * 4)], ("z",)),
    # 5.4: fragments.
    Accepted("5.4 two fragments", fragments(text("ab"), 9), ("ab",)),
    Accepted("5.4 empty fragments first, between and last", fragments(text("ab"), 0, 5, 5, 23), ("ab",)),
    Accepted("5.4 a fragment per byte", fragments(text("ab"), *range(1, 20)), ("ab",)),
    Accepted("5.4 two messages in fragments", fragments(text("a"), 7) + fragments(text("b"), 3), ("a", "b")),
    Accepted(
        "5.4 pings between fragments are answered first",
        [fragments(text("ab"), 9)[0], frame(PING, b"1"), frame(PING, b"2"), fragments(text("ab"), 9)[1]],
        ("ab",),
        (b"1", b"2"),
    ),
    Accepted(
        "5.4 pongs between fragments", [(both := fragments(text("ab"), 9))[0], frame(PONG, b"?"), both[1]], ("ab",)
    ),
    # 5.5.2, 5.5.3: pings are answered with what they carry; pongs need not be asked for.
    Accepted("5.5.2 an empty ping", [frame(PING)], pongs=(b"",)),
    Accepted("5.5.2 a ping of 125 bytes", [frame(PING, bytes(range(125)))], pongs=(bytes(range(125)),)),
    Accepted("5.5.2 a ping that is no text", [frame(PING, b"\xff\xfe\x80")], pongs=(b"\xff\xfe\x80",)),
    Accepted("5.5.2 ten pings", [frame(PING, b"%d" % i) for i in range(10)], pongs=tuple(b"%d" % i for i in range(10))),
    Accepted("5.5.3 a pong that nobody asked for", [frame(PONG, b"hello"), frame(PONG)]),
    # 5.6, 8.1: UTF-8.
    Accepted("5.6 characters of two, three and four bytes", [frame(TEXT, text("ñ€" + GRINNING))], ("ñ€" + GRINNING,)),
    Accepted("5.6 the ends of Unicode", [frame(TEXT, text(ENDS))], (ENDS,)),
    Accepted("5.6 a character cut between fragments", fragments(text(GRINNING), 21, 22, 23), (GRINNING,)),
    Accepted("a hundred messages at once", [frame(TEXT, sized(100 + i)) for i in range(100)], tuple(range(100, 200))),
]  # fmt: skip


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case.name)
async def test_what_the_protocol_allows_is_answered(edge: Edge, case: Accepted) -> None:
    async with RawWebSocket.open(edge.port) as client:
        client.send(*case.frames)
        for payload in case.pongs:
            assert await client.read() == Received(PONG, payload)
        for t in case.t:
            assert await client.read_json("pong") == {"type": "pong", "t": t}
        await still_answers(client)


@dataclass(frozen=True)
class Refused:
    name: str
    frames: list[bytes]
    code: int


def bad_text(data: bytes) -> list[bytes]:
    return [frame(TEXT, b'{"type":"ping","t":"' + data + b'"}')]


REFUSED = [
    # 5.1: what a client sends is masked.
    Refused("5.1 an unmasked text", [frame(TEXT, text("a"), mask=None)], 1002),
    Refused("5.1 an unmasked ping", [frame(PING, mask=None)], 1002),
    Refused("5.1 an unmasked close", [frame(CLOSE, b"\x03\xe8", mask=None)], 1002),
    # 5.2: reserved bits and opcodes.
    *(Refused(f"5.2 reserved bits {rsv:03b}", [frame(TEXT, text("a"), rsv=rsv)], 1002) for rsv in (1, 2, 4, 7)),
    Refused("5.2 a reserved bit of a ping", [frame(PING, rsv=4)], 1002),
    Refused("5.2 a reserved bit of a close", [frame(CLOSE, rsv=4)], 1002),
    Refused("5.2 a reserved bit of a later fragment", [frame(TEXT, b"{", fin=False), frame(CONT, b"}", rsv=4)], 1002),
    *(Refused(f"5.2 opcode {opcode:x}", [frame(opcode, b"x")], 1002) for opcode in (3, 4, 5, 6, 7)),
    *(Refused(f"5.2 opcode {opcode:x}", [frame(opcode, b"x")], 1002) for opcode in (11, 12, 13, 14, 15)),
    # 5.2: lengths. The payload need not come for the claim to be refused.
    Refused("5.2 a length beyond the limit", [frame(TEXT, length=(4 << 20) + 1)], 1009),
    Refused("5.2 a length of 64 bits with the highest set", [frame(TEXT, length=1 << 63)], 1009),
    Refused(
        "5.2 fragments beyond the limit together",
        [frame(TEXT, b"x" * (2 << 20), fin=False), frame(CONT, length=(2 << 20) + 1)],
        1009,
    ),
    # 5.4: the order of fragments.
    Refused("5.4 a continuation of nothing", [frame(CONT, text("a"))], 1002),
    Refused("5.4 an open continuation of nothing", [frame(CONT, text("a"), fin=False)], 1002),
    Refused("5.4 a continuation of a whole message", [frame(TEXT, text("a")), frame(CONT, b"x")], 1002),
    Refused("5.4 a text within a text", [frame(TEXT, b"{", fin=False), frame(TEXT, b"}")], 1002),
    Refused("5.4 a binary within a text", [frame(TEXT, b"{", fin=False), frame(BINARY, b"}")], 1002),
    Refused("5.4 a second beginning", [frame(TEXT, b"{", fin=False), frame(TEXT, b"}", fin=False)], 1002),
    # 5.5: control frames.
    Refused("5.5 a ping of 126 bytes", [frame(PING, b"x" * 126)], 1002),
    Refused("5.5 a pong of 126 bytes", [frame(PONG, b"x" * 126)], 1002),
    Refused("5.5 a close of 126 bytes", [frame(CLOSE, b"\x03\xe8" + b"x" * 124)], 1002),
    Refused("5.5 a ping in fragments", [frame(PING, b"a", fin=False), frame(CONT, b"b")], 1002),
    Refused("5.5 a close in fragments", [frame(CLOSE, b"\x03\xe8", fin=False)], 1002),
    # The RFC has a close in the middle of a message answered, and does not say with which code.
    Refused("5.5.1 a close within a message", [frame(TEXT, b"{", fin=False), frame(CLOSE, b"\x03\xe8")], 1002),
    # 5.5.1, 7.4: what a close frame carries.
    Refused("5.5.1 half a close code", [frame(CLOSE, b"\x03")], 1002),
    Refused("5.5.1 a reason that is not UTF-8", [frame(CLOSE, b"\x03\xe8\xce\xba\xe1\xbd\xb9\xcf\x83\xce")], 1007),
    *(
        Refused(f"7.4 close code {code}", [frame(CLOSE, code.to_bytes(2, "big"))], 1002)
        for code in (0, 999, 1004, 1005, 1006, 1015, 1016, 1100, 2000, 2999, 5000, 65535)
    ),
    # 5.6, 8.1: what is not UTF-8.
    Refused("8.1 a lone continuation byte", bad_text(b"\x80"), 1007),
    Refused("8.1 bytes that UTF-8 has not", bad_text(b"\xfe\xff"), 1007),
    Refused("8.1 a slash in two bytes", bad_text(b"\xc0\xaf"), 1007),
    Refused("8.1 a slash in three bytes", bad_text(b"\xe0\x80\xaf"), 1007),
    Refused("8.1 a slash in four bytes", bad_text(b"\xf0\x80\x80\xaf"), 1007),
    Refused("8.1 half of a surrogate pair", bad_text(b"\xed\xa0\x80"), 1007),
    Refused("8.1 a surrogate pair", bad_text(b"\xed\xa0\xbd\xed\xb8\x80"), 1007),
    Refused("8.1 beyond U+10FFFF", bad_text(b"\xf4\x90\x80\x80"), 1007),
    Refused("8.1 five bytes for a character", bad_text(b"\xf8\x88\x80\x80\x80"), 1007),
    Refused("8.1 a character without its end", [frame(TEXT, b'"\xe2\x82')], 1007),
    Refused("8.1 a character without its end in the last fragment", fragments(b'"\xf0\x9f\x98', 2), 1007),
    Refused("8.1 a wrong byte in the second fragment", fragments(b'"\xce\xba\xed\xa0\x80"', 3), 1007),
    # headrace.v1: messages are JSON objects in text frames.
    Refused("a binary message", [frame(BINARY, text("a"))], 4400),
    Refused("a binary message in fragments", fragments(text("a"), 4, opcode=BINARY), 4400),
    Refused("an empty message", [frame(TEXT)], 4400),
    Refused("an empty message in fragments", fragments(b"", 0, 0), 4400),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
async def test_what_the_protocol_forbids_costs_the_connection(edge: Edge, case: Refused) -> None:
    async with RawWebSocket.open(edge.port) as client:
        client.send(*case.frames)
        received = await client.read()
        while received.opcode == TEXT:  # the answer to a good message that came before
            received = await client.read()
        assert received.opcode == CLOSE and received.close_code == case.code
        if case.code >= 4000:  # the server asks for the end of a sound connection, and waits for the client's word
            client.send(frame(CLOSE, received.data))
        assert not await client.reader.read(), "the end of the connection follows"
    await until(lambda: edge.endpoint.num_sockets == 0)


CODES = (1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 1012, 1014, 3000, 3999, 4000, 4999)


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b"", None),
        *((code.to_bytes(2, "big"), code) for code in CODES),
        (b"\x03\xe8" + b"r" * 123, 1000),
        (b"\x03\xe8" + "κόσμε".encode(), 1000),
    ],
    ids=lambda value: value.hex()[:12] if isinstance(value, bytes) else str(value),
)
async def test_a_close_is_answered_with_its_code(edge: Edge, payload: bytes, code: int | None) -> None:
    """And nothing behind it is heard (5.5.1)."""
    async with RawWebSocket.open(edge.port) as client:
        client.send(frame(CLOSE, payload), frame(PING, b"late"), frame(TEXT, text("late")))
        assert await client.read_close() == code
    await until(lambda: edge.endpoint.num_sockets == 0)


async def test_delivery_byte_by_byte_changes_nothing(edge: Edge) -> None:
    data = b"".join([
        *fragments(text("a" + GRINNING), 3, 22), frame(PING, b"beat"), frame(TEXT, sized(130)), frame(TEXT, text("b")),
        frame(CLOSE, b"\x0f\xa0bye"),
    ])  # fmt: skip
    async with RawWebSocket.tcp(edge.port) as client:
        await client.send_in_pieces(handshake())
        assert (await client.read_head())[0] == 101
        await client.read_json("welcome")
        await client.send_in_pieces(data)
        assert (await client.read_json("pong"))["t"] == "a" + GRINNING
        assert await client.read() == Received(PONG, b"beat")
        assert [(await client.read_json("pong"))["t"] for _ in range(2)] == [130, "b"]
        assert await client.read_close() == 4000


async def test_a_bad_frame_is_found_in_pieces_too(edge: Edge) -> None:
    async with RawWebSocket.open(edge.port) as client:
        await client.send_in_pieces(frame(TEXT, text("a")) + frame(TEXT, text("b"), rsv=2))
        assert (await client.read_json("pong"))["t"] == "a"
        assert await client.read_close() == 1002


async def test_the_accept_header_is_that_of_the_rfc(edge: Edge) -> None:
    """1.3: the key of the RFC's own example. Nothing that was only offered is in the answer."""
    assert accept_of("dGhlIHNhbXBsZSBub25jZQ==") == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
    offered = handshake(sec_websocket_protocol="graphql-ws, headrace.v1", sec_websocket_extensions="permessage-deflate")
    async with RawWebSocket.tcp(edge.port) as client:
        client.send(offered)
        status, headers = await client.read_head()
        assert (status, headers["sec-websocket-accept"]) == (101, "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=")
        assert (headers["upgrade"].lower(), headers["connection"].lower()) == ("websocket", "upgrade")
        assert headers["sec-websocket-protocol"] == "headrace.v1" and "sec-websocket-extensions" not in headers


@pytest.mark.parametrize(
    "head",
    [
        handshake(upgrade="WebSocket", connection="keep-alive, UPGRADE"),
        handshake(line="GET {}?token=no HTTP/1.1"),
        handshake(sec_websocket_protocol="a,headrace.v1 ,b"),
    ],
    ids=["4.2.1 names in other letters", "4.2.1 a query", "4.2.1 a list of subprotocols"],
)
async def test_a_handshake_in_another_spelling(edge: Edge, head: bytes) -> None:
    async with RawWebSocket.tcp(edge.port) as client:
        client.send(head)
        assert (await client.read_head())[0] == 101
        await client.read_json("welcome")
        await still_answers(client)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (handshake(drop="upgrade"), 404),
        (handshake(upgrade="h2c"), 404),
        (handshake(drop="connection"), 404),
        (handshake(connection="close"), 404),
        (handshake(drop="sec-websocket-key"), 400),
        (handshake(sec_websocket_key="c2hvcnQ="), 400),
        (handshake(sec_websocket_key="not base64 at all!!!!!!!"), 400),
        (handshake(drop="sec-websocket-version"), 426),
        (handshake(sec_websocket_version="12"), 426),
        (handshake(sec_websocket_version="14"), 426),
        (handshake(drop="sec-websocket-protocol"), 400),
        (handshake(sec_websocket_protocol="headrace.v2"), 400),
        (handshake(sec_websocket_protocol="HEADRACE.V1"), 400),
        (handshake(line="POST {} HTTP/1.1"), 405),
        (handshake(line="GET {} HTTP/1.0"), 505),
        (handshake(drop="host"), 403),
        (handshake("/v1/models"), 403),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else str(value),
)
async def test_a_bad_handshake_is_no_upgrade(edge: Edge, head: bytes, status: int) -> None:
    async with RawWebSocket.tcp(edge.port) as client:
        client.send(head)
        found, headers = await client.read_head()
        assert found == status, headers
        if status == 426:
            assert headers["sec-websocket-version"] == "13"
    await until(lambda: edge.endpoint.num_sockets == 0)


async def test_many_clients_break_the_protocol_and_one_does_not_notice(edge: Edge) -> None:
    async with RawWebSocket.open(edge.port) as quiet:
        body = {"text": "undisturbed " * 10, "every_s": 0.001}
        quiet.send(frame(TEXT, say("create", id="q", endpoint="completion", body=body)))

        async def offend(case: Refused) -> int | None:
            async with RawWebSocket.open(edge.port) as client:
                client.send(*case.frames)
                while (received := await client.read()).opcode == TEXT:
                    pass
                return received.close_code

        codes = await asyncio.gather(*(offend(case) for case in REFUSED))
        assert codes == [case.code for case in REFUSED]
        assert (await quiet.read_json("created"))["seq"] == 0
        said, seq = "", 0
        while b'"delta"' in (received := await quiet.read()).data:
            message = json.loads(received.data)
            seq += 1
            assert message["seq"] == seq
            said += message["text"]
        assert said == body["text"]
