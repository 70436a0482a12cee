"""A small headrace.v1 client that keeps histories: many requests on one socket, every frame with its arrival time."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

SUBPROTOCOL = Subprotocol("headrace.v1")

Frame = dict[str, Any]
"""One JSON object of the wire."""


@dataclass(slots=True)
class History:
    """Frames of one request in order. is_lost: the socket went away before a terminal frame, so the end is unknown."""

    id: str
    sent_s: float
    frames: list[tuple[float, Frame]] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    is_lost: bool = False

    def of_type(self, name: str) -> list[tuple[float, Frame]]:
        return [(at_s, frame) for at_s, frame in self.frames if frame["type"] == name]

    @property
    def terminals(self) -> list[Frame]:
        return [frame for _, frame in self.frames if frame["type"] in ("done", "error")]

    @property
    def text(self) -> str:
        return "".join(str(frame.get("text", "")) for _, frame in self.of_type("delta"))

    def faults(self) -> list[str]:
        """What breaks the promise: seq 0, 1, 2, … without a gap, exactly one terminal frame, and nothing behind it."""
        found = []
        seqs = [frame.get("seq") for _, frame in self.frames]
        if seqs != list(range(len(seqs))):
            found.append(f"{self.id}: seq {seqs}")
        kinds = [frame["type"] for _, frame in self.frames]
        terminals = [kind for kind in kinds if kind in ("done", "error")]
        if len(terminals) > 1 or (terminals and kinds[-1] not in ("done", "error")):
            found.append(f"{self.id}: {kinds[-4:]}")
        if not terminals and not self.is_lost:
            found.append(f"{self.id}: no terminal frame")
        return found


class StreamClient:
    """Use as ``async with StreamClient(url) as client``. others: frames that belong to no live request."""

    def __init__(self, url: str, *, token: str | None = None) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._live: dict[str, History] = {}
        self.others: list[Frame] = []
        self.close_code: int | None = None
        self._socket: ClientConnection
        self._reader: asyncio.Task[None]

    async def __aenter__(self) -> "StreamClient":
        self._socket = await connect(
            self._url, subprotocols=[SUBPROTOCOL], additional_headers=self._headers, compression=None, max_size=None
        )
        try:
            self.welcome = json.loads(await self._socket.recv())
        except BaseException:
            await self._socket.close()
            raise
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._socket.close()
        await self._reader

    @property
    def is_closed(self) -> bool:
        """Whether nothing will come any more."""
        return self._reader.done()

    async def create(self, id: str, endpoint: str, body: Frame, **envelope: object) -> History:
        history = self.expect(id)
        await self._send({"type": "create", "id": id, "endpoint": endpoint, "body": body, **envelope}, history)
        return history

    def expect(self, id: str) -> History:
        """The history of a stream that the caller creates by ``write``."""
        history = self._live[id] = History(id, time.monotonic())
        return history

    def forget(self, history: History) -> None:
        """Its frames need not be kept; what still comes for it goes to ``others``."""
        self._live.pop(history.id, None)

    async def cancel(self, id: str) -> None:
        await self._send({"type": "cancel", "id": id}, None)

    def write(self, data: bytes) -> None:
        """Bytes as they are, in one piece."""
        self._socket.transport.write(data)

    def stop_reading(self) -> None:
        """Leave what comes in the kernel's buffers."""
        self._socket.transport.pause_reading()

    def abort(self) -> None:
        """Cut the TCP connection without a close handshake."""
        self._socket.transport.abort()

    async def _send(self, message: Frame, history: History | None) -> None:
        try:
            await self._socket.send(json.dumps(message))
        except ConnectionClosed:
            if history is not None:
                self._lose(history)

    async def _read(self) -> None:
        try:
            async for text in self._socket:
                self._take(json.loads(text))
        except ConnectionClosed:
            pass
        self.close_code = self._socket.close_code
        for history in list(self._live.values()):
            self._lose(history)

    def _take(self, frame: Frame) -> None:
        history = self._live.get(str(frame.get("id")))
        if history is None:
            self.others.append(frame)
            return
        history.frames.append((time.monotonic(), frame))
        history.started.set()
        if frame["type"] in ("done", "error"):
            history.ended.set()

    def _lose(self, history: History) -> None:
        if not history.ended.is_set():
            history.is_lost = True
            history.ended.set()
        history.started.set()
