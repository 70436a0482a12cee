"""A WebSocket client of bare bytes: it sends whatever it is told to, and reads frames strictly. After RFC 6455 alone,
with nothing of the library that the server uses, so that the two cannot be wrong in the same way."""

import asyncio
import base64
import hashlib
import json
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

CONT, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
ANSWER_S = 20.0


class Lost(Exception):
    """The connection ended, or broke the protocol; the text says where."""


@dataclass(frozen=True, slots=True)
class Received:
    """One frame of the server."""

    opcode: int
    data: bytes

    @property
    def close_code(self) -> int | None:
        """None: a close frame without a code."""
        return int.from_bytes(self.data[:2], "big") if self.data else None


def frame(
    opcode: int,
    data: bytes = b"",
    *,
    fin: bool = True,
    rsv: int = 0,
    mask: bytes | None = b"\x5a\x01\xfe\x80",
    length_form: int | None = None,
    length: int | None = None,
) -> bytes:
    """The bytes of a client's frame. rsv: the three reserved bits. mask: None leaves the frame unmasked. length_form:
    7, 16 or 64 bits, None for the shortest. length: what the header claims, None for the truth."""
    claimed = len(data) if length is None else length
    form = length_form or (7 if claimed < 126 else 16 if claimed < 1 << 16 else 64)
    head = bytes((fin << 7 | rsv << 4 | opcode,))
    masked = 0x80 if mask is not None else 0
    if form == 7:
        head += bytes((masked | claimed,))
    else:
        head += bytes((masked | (126 if form == 16 else 127),)) + claimed.to_bytes(form // 8, "big")
    if mask is None:
        return head + data
    stretched = (mask * (len(data) // 4 + 1))[: len(data)]
    return head + mask + (int.from_bytes(data, "big") ^ int.from_bytes(stretched, "big")).to_bytes(len(data), "big")


def fragments(data: bytes, *cuts: int, opcode: int = TEXT) -> list[bytes]:
    """One message in several frames, cut at these places."""
    edges = [0, *cuts, len(data)]
    parts = [data[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    return [frame(CONT if i else opcode, part, fin=i == len(parts) - 1) for i, part in enumerate(parts)]


def say(kind: str, **fields: Any) -> bytes:
    """The payload of one headrace.v1 message."""
    return json.dumps({"type": kind, **fields}, ensure_ascii=False).encode()


def handshake(path: str = "/v1/stream", *, drop: str = "", line: str = "GET {} HTTP/1.1", **headers: str) -> bytes:
    """The head of an upgrade. drop: a header to leave out; headers: others, or other values, with _ for -."""
    all_headers = {
        "host": "localhost",
        "upgrade": "websocket",
        "connection": "Upgrade",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
        "sec-websocket-version": "13",
        "sec-websocket-protocol": "headrace.v1",
    } | {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [line.format(path), *(f"{name}: {value}" for name, value in all_headers.items() if name != drop)]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


class RawWebSocket:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @staticmethod
    @asynccontextmanager
    async def tcp(port: int) -> AsyncIterator["RawWebSocket"]:
        """Connected, and no more than that."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield RawWebSocket(reader, writer)
        finally:
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()

    @staticmethod
    @asynccontextmanager
    async def open(port: int, path: str = "/v1/stream", *, welcome: bool = True) -> AsyncIterator["RawWebSocket"]:
        """After the handshake and, where there is one, the welcome."""
        async with RawWebSocket.tcp(port) as client:
            key = base64.b64encode(os.urandom(16)).decode()
            client.writer.write(handshake(path, sec_websocket_key=key))
            status, headers = await client.read_head()
            if status != 101 or headers["sec-websocket-accept"] != accept_of(key):
                raise Lost(f"the handshake was answered by {status} {headers}")
            if welcome:
                await client.read_json("welcome")
            yield client

    def send(self, *frames: bytes) -> None:
        """All of it at once."""
        self.writer.write(b"".join(frames))

    async def send_in_pieces(self, data: bytes, size: int = 1) -> None:
        """Piece by piece, each as its own segment as far as the machine allows."""
        for start in range(0, len(data), size):
            self.writer.write(data[start : start + size])
            await asyncio.sleep(0)

    async def read_head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of an HTTP answer."""
        try:
            head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), ANSWER_S)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise Lost(f"no HTTP answer: {error!r}") from None
        first, *rest = head.decode("latin-1").split("\r\n")
        pairs = (line.split(":", 1) for line in rest if line)
        return int(first.split(" ")[1]), {name.lower(): value.strip() for name, value in pairs}

    async def read(self) -> Received:
        """The next frame. Raises Lost at the end of the connection and for what no server may send."""
        try:
            first, second = await self._exactly(2)
            if not first & 0x80 or first & 0x70 or second & 0x80:
                raise Lost(f"the server sent a frame that begins {first:02x} {second:02x}")
            length = second & 0x7F
            if length > 125:
                length = int.from_bytes(await self._exactly(2 if length == 126 else 8), "big")
            return Received(first & 0xF, await self._exactly(length))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise Lost(f"the connection ended: {error!r}") from None

    async def read_json(self, kind: str) -> dict[str, Any]:
        """The next frame, which must be a message of this type."""
        received = await self.read()
        if received.opcode != TEXT:
            raise Lost(f"{kind} was expected, and {received} came")
        message: dict[str, Any] = json.loads(received.data)
        if message.get("type") != kind:
            raise Lost(f"{kind} was expected, and {message} came")
        return message

    async def read_close(self) -> int | None:
        """The next frame, which must be a close frame, and the end of the connection behind it; its code."""
        received = await self.read()
        if received.opcode != CLOSE:
            raise Lost(f"a close frame was expected, and {received} came")
        rest = b""
        with suppress(OSError):
            rest = await asyncio.wait_for(self.reader.read(), ANSWER_S)
        if rest:
            raise Lost(f"{len(rest)} bytes came after the close frame")
        return received.close_code

    async def _exactly(self, count: int) -> bytes:
        return await asyncio.wait_for(self.reader.readexactly(count), ANSWER_S)


def accept_of(key: str) -> str:
    return base64.b64encode(hashlib.sha1((key + GUID).encode()).digest()).decode()


def random_mask(rng: random.Random) -> bytes:
    return rng.randbytes(4)
