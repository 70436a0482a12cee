"""The whole edge on a loopback port before an engine of known answers; and servers that are not ours."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from click.testing import CliRunner, Result

from headrace.serving.app.bench_command import bench
from headrace.serving.bench.targets import Server
from headrace.serving.edge.app import build_app
from headrace.serving.edge.keys import KeyRing
from headrace.serving.edge.security import Doorkeeper, SecurityLayer, SecurityPolicy
from headrace.serving.edge.server import ServerConfig, ServerControl, bind, serve
from headrace.serving.edge.session import SessionConfig
from headrace.serving.edge.stream_endpoint import StreamConfig, StreamEndpoint
from tests.serving.edge.fakes import FakeEngine, make_service


@asynccontextmanager
async def serving(engine: FakeEngine, *, keys: KeyRing | None = None, max_streams: int = 64) -> AsyncIterator[Server]:
    service = make_service(engine)
    door = Doorkeeper(SecurityPolicy(keys=keys))
    session = SessionConfig(server="headrace/test", max_streams=max_streams)
    streams = StreamEndpoint(service, door, StreamConfig(session=session), metrics=service.metrics)
    app = build_app(service, security=lambda inner: SecurityLayer(inner, door), stream_endpoint=streams)
    config, control = ServerConfig(port=0, drain_s=0.2), ServerControl()
    listener = bind(config)
    task = asyncio.create_task(serve(app, config, (streams,), listener=listener, control=control, signals=()))
    try:
        await control.listening.wait()
        yield Server(base=f"http://127.0.0.1:{listener.getsockname()[1]}", limit_s=20.0)
    finally:
        control.stop()
        await asyncio.wait_for(task, 20)
        service.close()


def invoke(*arguments: str) -> Result:
    """``headrace bench`` with those arguments."""
    return CliRunner().invoke(bench, list(arguments), standalone_mode=False)


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def answers(body: str, *, status: str = "200 OK", kind: str = "text/event-stream") -> Handler:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\nconnection: close\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    return handle


@asynccontextmanager
async def foreign(handler: Handler) -> AsyncIterator[Server]:
    """A server that is not ours."""
    listener = await asyncio.start_server(handler, "127.0.0.1", 0)
    async with listener:
        yield Server(base=f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", limit_s=10.0)
