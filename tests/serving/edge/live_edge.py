"""The real server on a real port, in the test's own event loop, before a scripted service; and raw clients for it."""

import asyncio
import json
import re
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest
import websockets
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from websockets.asyncio.client import ClientConnection
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri

from headrace.serving.edge.guards import ConnectionLimits
from headrace.serving.edge.keys import KeyRing
from headrace.serving.edge.messages import SUBPROTOCOL
from headrace.serving.edge.metrics import Metrics
from headrace.serving.edge.security import Doorkeeper, SecurityLayer, SecurityPolicy
from headrace.serving.edge.server import Drainable, ExitCode, ServerConfig, ServerControl, bind, serve
from headrace.serving.edge.session import SessionConfig
from headrace.serving.edge.stream_endpoint import StreamConfig, StreamEndpoint
from tests.serving.edge.fakes import FakeEngine
from tests.serving.edge.scripted import ScriptedService

Json = dict[str, Any]


@dataclass
class Edge:
    service: ScriptedService
    endpoint: StreamEndpoint
    metrics: Metrics
    control: ServerControl
    serving: asyncio.Task[ExitCode]
    port: int

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/v1/stream"

    def connect(self, **options: Any) -> websockets.connect:
        options = {"subprotocols": [SUBPROTOCOL], "compression": None, "proxy": None, "ping_interval": None} | options
        return websockets.connect(self.url, **options)

    def metric(self, name: str, labels: str = "") -> float:
        """Values as scraped, added up; labels: part of the label list."""
        line = rf"^headrace_{name}{{[^}}]*{labels}[^}}]*}} (\S+)$"
        return sum(map(float, re.findall(line, self.metrics.exposition().decode(), re.MULTILINE)))

    @asynccontextmanager
    async def opened(self, **options: Any) -> AsyncIterator["Client"]:
        """A client that has its welcome."""
        async with self.connect(**options) as connection:
            client = Client(connection)
            welcome = await client.receive()
            assert welcome["type"] == "welcome"
            client.session = welcome["session"]
            yield client


class Client:
    """JSON over a connection."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.session = ""

    async def send(self, kind: str, **fields: Any) -> None:
        await self.connection.send(json.dumps({"type": kind, **fields}))

    async def create(self, stream_id: str, *, detach: bool = False, **body: Any) -> None:
        await self.send("create", id=stream_id, endpoint="completion", body=body, detach=detach)

    async def receive(self) -> Json:
        frame: Json = json.loads(await asyncio.wait_for(self.connection.recv(), 20))
        return frame

    async def until_end(self, stream_id: str) -> list[Json]:
        """The frames of one stream up to its terminal; other streams' frames are dropped."""
        frames = []
        while True:
            frame = await self.receive()
            if frame.get("id") == stream_id:
                frames.append(frame)
                if frame["type"] in ("done", "error"):
                    return frames

    async def close_code(self) -> int | None:
        """Read to the end of the connection."""
        try:
            while True:
                await asyncio.wait_for(self.connection.recv(), 20)
        except websockets.ConnectionClosed as closed:
            return closed.rcvd.code if closed.rcvd else None


def small_socket(port: int, receive_bytes: int) -> socket.socket:
    """A connection whose kernel buffer does not grow."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect(("127.0.0.1", port))
    return connection


class RawClient:
    """A WebSocket of single frames, which answers nothing by itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, protocol: ClientProtocol) -> None:
        self.reader, self.writer, self.protocol = reader, writer, protocol
        self.frames: list[Frame] = []

    @staticmethod
    @asynccontextmanager
    async def open(edge: Edge, *, holds_bytes: int | None = None) -> AsyncIterator["RawClient"]:
        """holds_bytes: about how much it takes before it is read from; None: megabytes."""
        connection = small_socket(edge.port, holds_bytes or 1 << 20)
        reader, writer = await asyncio.open_connection(sock=connection, limit=holds_bytes or 1 << 16)
        protocol = ClientProtocol(parse_uri(edge.url), subprotocols=[SUBPROTOCOL], max_size=None)  # type: ignore[list-item]
        client = RawClient(reader, writer, protocol)
        protocol.send_request(protocol.connect())
        client.flush()
        try:
            while protocol.handshake_exc is None and protocol.state.name == "CONNECTING":
                await client._feed()
            assert protocol.handshake_exc is None
            yield client
        finally:
            writer.transport.abort()
            with suppress(ConnectionError):
                await writer.wait_closed()

    def flush(self) -> None:
        for data in self.protocol.data_to_send():
            if data:
                self.writer.write(data)

    def send_frame(self, opcode: Opcode, data: bytes, *, fin: bool = True) -> None:
        self.writer.write(Frame(opcode, data, fin=fin).serialize(mask=True))

    def say(self, kind: str, **fields: Any) -> None:
        self.send_frame(Opcode.TEXT, json.dumps({"type": kind, **fields}).encode())

    async def next(self, wanted: Callable[[Frame], bool] = lambda frame: True) -> Frame:
        """The next frame that is wanted; the others are dropped. Raises EOFError at the end of the connection."""
        while True:
            while self.frames:
                frame = self.frames.pop(0)
                if wanted(frame):
                    return frame
            await self._feed()

    async def close_code(self) -> int:
        frame = await self.next(lambda frame: frame.opcode is Opcode.CLOSE)
        return int.from_bytes(frame.data[:2], "big")

    async def _feed(self) -> None:
        data = await asyncio.wait_for(self.reader.read(65536), 20)
        if not data:
            raise EOFError
        self.protocol.receive_data(data)
        self.frames += [event for event in self.protocol.events_received() if isinstance(event, Frame)]
        # What the protocol would answer (pongs, close) is dropped: this client is a raw one.
        self.protocol.data_to_send()


@asynccontextmanager
async def running_edge(
    *,
    keys: KeyRing | None = None,
    policy: Json | None = None,
    stream: Json | None = None,
    session: Json | None = None,
    server: Json | None = None,
    limits: Json | None = None,
    drains: tuple[Drainable, ...] = (),
    signals: tuple[signal.Signals, ...] = (),
) -> AsyncIterator[Edge]:
    """Serve until the block ends; then nothing of it may be left."""
    service = ScriptedService()
    door = Doorkeeper(SecurityPolicy(keys=keys, **(policy or {})))
    config = StreamConfig(session=SessionConfig(server="headrace/test", **(session or {})), **(stream or {}))
    metrics = Metrics("scripted", FakeEngine())
    endpoint = StreamEndpoint(service, door, config, metrics=metrics)
    app = SecurityLayer(
        Starlette(
            routes=[
                WebSocketRoute("/v1/stream", endpoint),
                Route("/v1/stream", endpoint),
                Route("/livez", lambda request: PlainTextResponse("ok")),
            ]
        ),
        door,
    )
    server_config = ServerConfig(
        port=0, **{"drain_s": 0.2, **(server or {})}, limits=ConnectionLimits(**(limits or {}))
    )
    listener = bind(server_config)
    port = listener.getsockname()[1]
    control = ServerControl()
    before = asyncio.all_tasks()
    serving = asyncio.create_task(
        serve(app, server_config, (endpoint, *drains), listener=listener, control=control, signals=signals)
    )
    await control.listening.wait()
    edge = Edge(service, endpoint, metrics, control, serving, port)
    try:
        yield edge
    finally:
        control.stop()
        await asyncio.wait_for(serving, 30)
        assert endpoint.num_sockets == 0 and endpoint.budget.used_bytes == 0
        await until(lambda: asyncio.all_tasks() <= before | {asyncio.current_task()})
        assert service.running == 0


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for a condition of the server; fails the test when it does not come."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def text_of(frames: list[Json]) -> str:
    return "".join(str(frame["text"]) for frame in frames if frame["type"] == "delta")


def numbers(frames: list[Json]) -> list[object]:
    return [frame["seq"] for frame in frames]


async def refused_status(connecting: websockets.connect) -> tuple[int, Json]:
    with pytest.raises(websockets.InvalidStatus) as caught:
        async with connecting:
            pass
    response = caught.value.response
    return response.status_code, json.loads(response.body or b"{}")
