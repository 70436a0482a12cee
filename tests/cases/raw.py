"""Connections to a server process below what client libraries allow."""

import asyncio
from contextlib import AbstractAsyncContextManager
from types import SimpleNamespace

import psutil

from tests.live import LiveServer
from tests.serving.edge.live_edge import RawClient


def port_of(server: LiveServer) -> int:
    return int(server.url.rpartition(":")[2])


def raw_client(server: LiveServer, *, port: int | None = None) -> AbstractAsyncContextManager[RawClient]:
    """A native WebSocket of single frames; port: of something in front of the server."""
    where = SimpleNamespace(port=port or port_of(server), url=server.stream_url)
    return RawClient.open(where)  # type: ignore[arg-type]


def upgrade(server: LiveServer, *headers: str, path: str = "/v1/stream", protocol: str | None = "headrace.v1") -> bytes:
    """The head of a WebSocket handshake; headers replace or, repeated, extend the usual ones."""
    lines = {
        "host": f"Host: 127.0.0.1:{port_of(server)}",
        "upgrade": "Upgrade: websocket",
        "connection": "Connection: Upgrade",
        "sec-websocket-key": "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
        "sec-websocket-version": "Sec-WebSocket-Version: 13",
    }
    if protocol is not None:
        lines["sec-websocket-protocol"] = f"Sec-WebSocket-Protocol: {protocol}"
    given = [header.partition(":")[0].lower() for header in headers]
    kept = [line for name, line in lines.items() if name not in given]
    return "\r\n".join([f"GET {path} HTTP/1.1", *kept, *headers, "", ""]).encode()


async def head_of_answer(server: LiveServer, data: bytes) -> str:
    """Send data and return the head of the answer; "" when the connection ends without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
    try:
        writer.write(data)
        return (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)).decode("latin-1")
    except (asyncio.IncompleteReadError, ConnectionError):
        return ""
    finally:
        writer.close()


def status_of(head: str) -> int:
    return int(head.split(" ", 2)[1]) if head else 0


def edge_bytes(server: LiveServer) -> int:
    """Resident memory of the process that has the sockets."""
    size: int = psutil.Process(server.process.pid).memory_info().rss
    return size
