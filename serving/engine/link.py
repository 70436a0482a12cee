"""Frames between edge and engine, and between hosts: a 4-byte big-endian length, then one msgpack message.

The framing is sans-I/O (``encode_frame``, ``FrameDecoder``); the edge joins it to its event loop, the engine to the
blocking ``EngineLink`` below.

Neither side can deadlock the other. The edge reads whatever it writes, always; the engine's reader thread moves frames
into a bounded inbox and never waits for the step loop. A write blocks on the kernel's buffer and no longer than
``send_timeout_s``: an edge that has taken nothing for so long is gone, whatever its process table says.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator

import msgspec

from headrace.serving.engine.messages import MAX_FRAME_BYTES, ToEdge, ToEngine

HEADER_BYTES = 4
SEND_TIMEOUT_S = 30.0
READ_BYTES = 1 << 18


class LinkError(RuntimeError):
    """The peer sent something that is no frame of ours; the link is unusable afterwards."""


class LinkClosed(RuntimeError):
    """The peer is gone, or takes nothing any more."""


def encode_frame(message: object, max_frame_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """One frame. Raises LinkError when the message is larger than max_frame_bytes; nothing was sent then."""
    body = msgspec.msgpack.encode(message)
    if len(body) > max_frame_bytes:
        raise LinkError(f"a {type(message).__name__} of {len(body)} bytes is over the frame limit of {max_frame_bytes}")
    return len(body).to_bytes(HEADER_BYTES, "big") + body


class FrameDecoder:
    """Cuts a byte stream into frame bodies; holds at most one incomplete frame."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Bodies that data completed, in order. Raises LinkError for a length over the limit, before it is stored."""
        self._buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= HEADER_BYTES:
            size = int.from_bytes(self._buffer[start : start + HEADER_BYTES], "big")
            if size > self._max_frame_bytes:
                raise LinkError(f"a frame of {size} bytes was announced; the limit is {self._max_frame_bytes}")
            end = start + HEADER_BYTES + size
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[start + HEADER_BYTES : end]))
            start = end
        del self._buffer[:start]
        return bodies

    @property
    def is_inside_frame(self) -> bool:
        """True when end-of-file here would cut a frame."""
        return bool(self._buffer)


def decode_to_edge(body: bytes) -> ToEdge:
    """Raises LinkError."""
    try:
        return _TO_EDGE.decode(body)
    except msgspec.MsgspecError as error:
        raise LinkError(f"the engine sent an unreadable frame: {error}") from error


def decode_to_engine(body: bytes) -> ToEngine:
    """Raises LinkError."""
    try:
        return _TO_ENGINE.decode(body)
    except msgspec.MsgspecError as error:
        raise LinkError(f"the edge sent an unreadable frame: {error}") from error


_TO_EDGE: msgspec.msgpack.Decoder[ToEdge] = msgspec.msgpack.Decoder(ToEdge)
_TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)


class EngineLink:
    """The engine's end of a socket. One thread reads; any thread may send. peer: who is at the other end."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        peer: str = "the edge",
        send_timeout_s: float = SEND_TIMEOUT_S,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self._peer = peer
        self._sock = sock
        self._sock.settimeout(send_timeout_s)
        self._max_frame_bytes = max_frame_bytes
        self._send_lock = threading.Lock()
        self._decoder = FrameDecoder(max_frame_bytes)

    def send(self, message: msgspec.Struct) -> None:
        """Blocks while the kernel's buffer is full. Raises LinkClosed; afterwards the link is unusable."""
        self.send_frame(encode_frame(message, self._max_frame_bytes))

    def send_frame(self, frame: bytes) -> None:
        """``send`` of what ``encode_frame`` made."""
        with self._send_lock:
            try:
                self._sock.sendall(frame)
            except TimeoutError:
                raise LinkClosed(f"{self._peer} has not read for the send time limit") from None
            except OSError as error:
                raise LinkClosed(f"{self._peer} is gone: {error.strerror}") from None

    def bodies(self) -> Iterator[bytes]:
        """Frame bodies until end-of-file. Raises LinkError for a frame that is cut or too large."""
        while True:
            try:
                data = self._sock.recv(READ_BYTES)
            except TimeoutError:
                continue
            except OSError:
                return
            if not data:
                if self._decoder.is_inside_frame:
                    raise LinkError("the link ended inside a frame")
                return
            yield from self._decoder.feed(data)

    def close(self) -> None:
        """Ends both directions, which also wakes a thread inside bodies()."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
