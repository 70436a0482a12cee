"""O31: deflate is never negotiated, limits hold for the bytes that are read, and nothing is cut short silently."""

import asyncio
import gzip
import json
import zlib
from collections.abc import Iterator

import httpx
import pytest
import websockets
from websockets.frames import Frame, Opcode

from headrace.serving.edge.messages import MAX_FRAME_BYTES
from tests.cases import servers
from tests.cases.five_checks import FiveChecks
from tests.cases.raw import edge_bytes, head_of_answer, raw_client, status_of, upgrade
from tests.live import LiveServer

OFFERS = (
    "permessage-deflate",
    "permessage-deflate; client_max_window_bits",
    "permessage-deflate; server_max_window_bits=8; client_max_window_bits=8",
    "permessage-deflate; server_no_context_takeover, x-webkit-deflate-frame, permessage-bzip2",
)


@pytest.fixture(autouse=True, scope="module")
def checks(fake_server: LiveServer) -> Iterator[FiveChecks]:
    with servers.five_checks(fake_server) as checks:
        yield checks


def deflated(data: bytes) -> bytes:
    """One block as permessage-deflate sends it; several in a row are one message."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush(zlib.Z_FULL_FLUSH)


BOMB = deflated(bytes(1 << 20)) * 1024
"""A gigabyte in one megabyte."""


@pytest.mark.parametrize("offer", OFFERS)
async def test_deflate_is_offered_and_not_taken(fake_server: LiveServer, offer: str) -> None:
    head = await head_of_answer(fake_server, upgrade(fake_server, f"Sec-WebSocket-Extensions: {offer}"))
    assert status_of(head) == 101
    assert "sec-websocket-extensions" not in head.lower()


@pytest.mark.parametrize("kind", ["whole", "1,000 fragments", "broken", "tiny"])
async def test_a_compressed_frame_closes_the_connection_at_once(fake_server: LiveServer, kind: str) -> None:
    """The first frame with RSV1 is the last that is read."""
    before = edge_bytes(fake_server)
    data = {"broken": b"\xff" * 100, "tiny": deflated(b'{"type":"ping"}')}.get(kind, BOMB)
    pieces = [data]
    if kind == "1,000 fragments":
        size = -(-len(data) // 1000)
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
    async with raw_client(fake_server) as client:
        for number, piece in enumerate(pieces):
            opcode, fin = Opcode.CONT if number else Opcode.TEXT, number == len(pieces) - 1
            wire = bytearray(Frame(opcode, piece, fin=fin).serialize(mask=True))
            wire[0] |= 0x40 if number == 0 else 0  # RSV1: the message is compressed
            client.writer.write(wire)
        assert await client.close_code() == 1002
    assert edge_bytes(fake_server) - before < 2 * MAX_FRAME_BYTES


@pytest.mark.parametrize(("extra", "code"), [(-1, None), (0, None), (1, 1009)])
@pytest.mark.parametrize("num_fragments", [1, 7])
async def test_the_limit_of_a_message_is_exact(
    fake_server: LiveServer, extra: int, code: int | None, num_fragments: int
) -> None:
    size = MAX_FRAME_BYTES + extra
    text = b'{"type":"ping","t":"whole","fill":"'
    text += b"x" * (size - len(text) - 2) + b'"}'
    piece = -(-size // num_fragments)
    async with raw_client(fake_server) as client:
        await client.next()
        for number in range(num_fragments):
            part = text[number * piece : (number + 1) * piece]
            client.send_frame(Opcode.CONT if number else Opcode.TEXT, part, fin=number == num_fragments - 1)
        if code is None:
            assert json.loads((await client.next()).data) == {"type": "pong", "t": "whole"}
        else:
            assert await client.close_code() == code


def test_the_limit_of_a_body_is_exact_and_bodies_are_not_inflated(fake_server: LiveServer) -> None:
    limit = 4 << 20
    body = b'{"prompt":"x","max_tokens":1,"user":"'
    with httpx.Client(base_url=fake_server.url, headers={"content-type": "application/json"}, timeout=60) as http:
        for extra, status in ((-1, 200), (0, 200), (1, 413)):
            content = body + b"x" * (limit + extra - len(body) - 2) + b'"}'
            assert http.post("/v1/completions", content=content).status_code == status
            chunks = (content[i : i + 65536] for i in range(0, len(content), 65536))
            assert http.post("/v1/completions", content=chunks).status_code == status
        before = edge_bytes(fake_server)
        for packed in (gzip.compress(body + b'x"}'), gzip.compress(bytes(128 << 20), 1)):
            answer = http.post("/v1/completions", content=packed, headers={"content-encoding": "gzip"})
            assert answer.status_code in (400, 413, 415)
        assert edge_bytes(fake_server) - before < 2 * limit


async def test_memory_of_idle_connections(fake_server: LiveServer) -> None:
    """300 that offered deflate; the stated limit is 100 kB for each."""

    async def connect() -> websockets.ClientConnection:
        url, protocols = fake_server.stream_url, ["headrace.v1"]
        return await websockets.connect(url, subprotocols=protocols, open_timeout=60)  # type: ignore[arg-type]

    await (await connect()).close()
    before = edge_bytes(fake_server)
    connections = [await connect() for _ in range(300)]
    grown = edge_bytes(fake_server) - before
    await asyncio.gather(*(connection.close() for connection in connections))
    assert grown / 300 < 100_000
