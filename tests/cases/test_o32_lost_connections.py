"""O32: a peer that is gone is found in every state, its requests end, its descriptors come back."""

import asyncio
import json
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from websockets.frames import Opcode

from headrace.serving.bench.stream_client import StreamClient
from tests.cases import fake_server as fake_server_module
from tests.cases import servers
from tests.cases.five_checks import FiveChecks, scrape
from tests.cases.raw import port_of, raw_client, upgrade
from tests.live import LiveServer, start_command

HEARTBEAT_S = 1.0
FOUND_WITHIN_S = 15.0
"""Two heartbeats, the 5 s for which a closing socket may keep unread bytes, and room for a busy machine."""
LONG = {"max_tokens": 3000, "ignore_eos": True, "seed": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[LiveServer]:
    """A short heartbeat, slow steps and small chunks: 3,000 prompt tokens take a second."""
    log, engine = tmp_path_factory.mktemp("o32") / "log", {"chunk_tokens": 16}
    with servers.fake(log, smollm2_path, step_ms=5, engine=engine, heartbeat_s=HEARTBEAT_S) as server:
        yield server
    assert "Traceback" not in log.read_text()


@pytest.fixture(autouse=True)
def checks(server: LiveServer) -> Iterator[FiveChecks]:
    """And the number of descriptors is as it was."""
    process = psutil.Process(server.process.pid)
    with servers.five_checks(server) as checks:
        before = process.num_fds()
        yield checks
        end_s = time.monotonic() + FOUND_WITHIN_S
        while process.num_fds() > before:
            assert time.monotonic() < end_s, "descriptors are left open"
            time.sleep(0.05)


class Relay:
    """Passes bytes on between clients and the server, until it goes silent in both directions and closes nothing."""

    def __init__(self) -> None:
        self.port = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []

    def go_silent(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", port)
        self._writers += [writer, to_writer]
        self._tasks += [asyncio.create_task(_copy(reader, to_writer)), asyncio.create_task(_copy(to_reader, writer))]

    def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


@asynccontextmanager
async def relay_to(server: LiveServer) -> AsyncIterator[Relay]:
    relay = Relay()
    listening = await asyncio.start_server(lambda r, w: relay.take(r, w, port_of(server)), "127.0.0.1", 0)
    relay.port = listening.sockets[0].getsockname()[1]
    async with listening:
        try:
            yield relay
        finally:
            relay.go_silent()
            relay.close()


async def until(condition: Callable[[], bool], timeout_s: float = FOUND_WITHIN_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.02)


async def test_a_silent_peer_is_found_idle_in_prefill_in_mid_stream_and_with_a_full_buffer(server: LiveServer) -> None:
    """A client without a relay is left alone meanwhile."""
    prompts: tuple[dict[str, Any], ...] = ({"prompt": "x"}, {"prompt": "y", "logprobs": 20})
    with httpx.Client(base_url=server.url) as http:
        async with relay_to(server) as relay, StreamClient(server.stream_url) as kept:
            url = f"ws://127.0.0.1:{relay.port}/v1/stream"
            clients = [await StreamClient(url).__aenter__() for _ in range(4)]
            started = [await c.create("r", "completion", LONG | p) for c, p in zip(clients[2:], prompts, strict=True)]
            await until(lambda: all(history.of_type("delta") for history in started))
            long_prompt = {"prompt": list(range(100, 3100)), "max_tokens": 500}
            in_prefill = await clients[1].create("r", "completion", LONG | long_prompt)
            await in_prefill.started.wait()
            relay.go_silent()
            assert scrape(http)["ws_connections", ""] == 5
            await until(lambda: scrape(http)["num_requests_running", ""] == 0)
            assert not in_prefill.of_type("delta")
            await until(lambda: scrape(http)["ws_connections", ""] == 1)
            assert scrape(http)["ws_closes_total", "1011"] >= 3, "the fourth may end by a failed write"
            fine = await kept.create("fine", "completion", {"prompt": "x", "max_tokens": 2})
            await fine.ended.wait()
            assert fine.terminals[0]["type"] == "done"
            for client in clients:
                client.abort()


def reset(client_socket: socket.socket) -> None:
    """The next close sends RST."""
    client_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("how", ["reset", "close without handshake", "half close", "reset right after create"])
async def test_every_kind_of_end_cancels_and_nothing_comes_back(server: LiveServer, how: str) -> None:
    create = {"type": "create", "id": "r", "endpoint": "completion", "body": LONG | {"prompt": "x"}}
    with httpx.Client(base_url=server.url) as http:
        async with raw_client(server) as client:
            session = json.loads((await client.next()).data)["session"]
            client.send_frame(Opcode.TEXT, json.dumps(create).encode())
            if how != "reset right after create":
                await client.next(lambda frame: b'"delta"' in frame.data)
            if how == "half close":
                client.writer.write_eof()
            else:
                if "reset" in how:
                    reset(client.writer.get_extra_info("socket"))
                client.writer.transport.abort()
            await until(lambda: scrape(http)["num_requests_running", ""] == scrape(http)["ws_connections", ""] == 0)
        async with StreamClient(server.stream_url) as again:
            resumed = again.expect("r")
            resume = {"type": "resume", "session": session, "id": "r"}
            await again._send(resume, resumed)
            await until(lambda: bool(again.others))
            assert again.others[0]["error"]["code"] == "resume_gone"  # type: ignore[index]


@pytest.mark.parametrize("part", [1, 40, -1, None], ids=["first byte", "in the head", "before its end", "whole"])
@pytest.mark.parametrize("with_reset", [False, True])
async def test_a_connection_that_ends_during_the_upgrade(
    server: LiveServer, part: int | None, with_reset: bool
) -> None:
    for _ in range(20):
        _, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
        writer.write(upgrade(server)[:part])
        if with_reset:
            reset(writer.get_extra_info("socket"))
        writer.transport.abort() if with_reset else writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
    with httpx.Client(base_url=server.url) as http:
        await until(lambda: scrape(http)["ws_connections", ""] == 0)


@pytest.mark.skipif(sys.platform != "linux", reason="sets a limit of descriptors with a shell")
async def test_more_clients_than_descriptors(tmp_path: Path, smollm2_path: Path) -> None:
    """256 descriptors and 400 clients: those beyond the limit are refused, the others and later ones are served."""
    options = msgspec.json.encode(servers.fake_options(smollm2_path), enc_hook=str).decode()
    command = [sys.executable, str(Path(fake_server_module.__file__)), options]
    limited = start_command(tmp_path / "log", ["bash", "-c", 'ulimit -n 256; exec "$@"', "bash", *command], 60.0)
    get = f"GET /livez HTTP/1.1\r\nHost: 127.0.0.1:{port_of(limited)}\r\n\r\n".encode()
    try:
        connections = [await asyncio.open_connection("127.0.0.1", port_of(limited)) for _ in range(400)]
        heads = await asyncio.gather(*(_answer(reader, writer, get) for reader, writer in connections))
        served = heads.count("HTTP/1.1 200 OK")
        assert 100 <= served <= 256
        assert set(heads) <= {"HTTP/1.1 200 OK", "HTTP/1.1 503 Service Unavailable", ""}
        for _, writer in connections:
            writer.transport.abort()
        async with httpx.AsyncClient(base_url=limited.url) as http:
            await until(lambda: _is_served(limited.url))
            assert (await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})).status_code == 200
    finally:
        assert await asyncio.to_thread(limited.stop) == 0
    assert "Traceback" not in limited.log.read_text()


def _is_served(url: str) -> bool:
    """Not while the server has not yet heard that the others left."""
    try:
        return httpx.get(url + "/livez").status_code == 200
    except httpx.TransportError:
        return False


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> str:
    """The first line of the answer; "" when the connection is cut first."""
    try:
        writer.write(data)
        return (await asyncio.wait_for(reader.readline(), 20)).decode().strip()
    except ConnectionError:
        return ""
