"""The listening socket, shutdown and exit codes."""

import asyncio
import signal
import socket
import ssl
import sys
from pathlib import Path

import pytest
import websockets

from headrace.serving.core.errors import ConfigError
from headrace.serving.edge.server import ExitCode, ServerConfig, bind, url_of
from tests.serving.edge.live_edge import Edge, RawClient, running_edge, until

PEM = Path(__file__).with_name("localhost.pem")
"""A self-signed certificate for localhost and its key, for these tests only."""


class SlowWork:
    """Work besides sockets, as HTTP requests are."""

    def __init__(self) -> None:
        self.limit_s: float | None = None
        self.done = asyncio.Event()
        self.aborted = False

    def begin_drain(self, limit_s: float) -> None:
        self.limit_s = limit_s

    async def wait_idle(self) -> None:
        await self.done.wait()

    def abort(self) -> int:
        self.aborted = not self.done.is_set()
        self.done.set()
        return int(self.aborted)


async def ended(edge: Edge) -> ExitCode:
    return await asyncio.wait_for(asyncio.shield(edge.serving), 20)


# Sockets


def test_accepted_sockets_have_the_options_of_the_listener() -> None:
    config = ServerConfig(port=0, tcp_user_timeout_s=7.0)
    with bind(config) as listener:
        listener.listen()
        listener.setblocking(True)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            if sys.platform == "linux":
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == config.unsent_bytes


def test_a_taken_port_and_a_foreign_address_are_configuration_errors() -> None:
    with bind(ServerConfig(port=0)) as listener:
        listener.listen()
        with pytest.raises(ConfigError, match="--port"):
            bind(ServerConfig(port=listener.getsockname()[1]))
    for host in ("no.such.host.invalid", "203.0.113.7"):
        with pytest.raises(ConfigError, match=host):
            bind(ServerConfig(host=host, port=0))


@pytest.mark.parametrize(
    ("host", "tls", "expected"),
    [
        ("127.0.0.1", False, "http://127.0.0.1:"),
        ("localhost", True, "https://localhost:"),
        ("0.0.0.0", False, "http://127.0.0.1:"),
        ("::1", False, "http://[::1]:"),
    ],
)
def test_url(host: str, tls: bool, expected: str, tmp_path: object) -> None:
    config = ServerConfig(host=host, port=0, tls_cert="c" if tls else None)  # type: ignore[arg-type]
    with bind(config) as listener:
        assert url_of(config, listener) == f"{expected}{listener.getsockname()[1]}"


async def test_the_port_can_be_taken_again_at_once() -> None:
    async with running_edge() as edge, edge.opened() as client:
        await client.create("r", text="x")
        await client.until_end("r")
    bind(ServerConfig(port=edge.port)).close()


async def test_tls() -> None:
    trust = ssl.create_default_context(cafile=PEM)
    async with running_edge(server={"tls_cert": PEM, "tls_key": PEM}) as edge:
        async with websockets.connect(
            edge.url.replace("ws:", "wss:"), ssl=trust, subprotocols=["headrace.v1"], proxy=None
        ) as connection:
            assert '"welcome"' in str(await connection.recv())
        with pytest.raises(websockets.InvalidMessage):
            async with edge.connect():
                pass


# Shutdown


async def test_an_idle_server_ends_at_once_and_says_goodbye() -> None:
    async with running_edge(server={"drain_s": 30.0}) as edge, edge.opened() as client, RawClient.open(edge) as silent:
        started = asyncio.get_running_loop().time()
        edge.control.stop()
        assert await client.receive() == {"type": "goaway", "reason": "shutdown", "deadline_ms": 30_000}
        assert await client.close_code() == 1001
        assert await silent.close_code() == 1001
        assert await ended(edge) is ExitCode.CLEAN
        assert asyncio.get_running_loop().time() - started < 10


async def test_running_streams_go_on_to_their_end_and_nothing_new_starts() -> None:
    async with running_edge(server={"drain_s": 30.0}) as edge, edge.opened() as client, edge.opened() as other:
        await client.create("r", text="x" * 200, every_s=0.005)
        await client.receive()
        await other.create("hold", hold=True)
        await other.receive()
        edge.control.stop()
        assert (await other.receive())["type"] == "goaway"
        await other.create("new", text="x")
        assert (await other.receive())["error"]["code"] == "shutting_down"
        with pytest.raises(websockets.InvalidStatus) as caught:
            async with edge.connect():
                pass
        assert caught.value.response.status_code == 503
        frames = await client.until_end("r")
        assert frames[-1]["type"] == "done" and frames[-1]["usage"]["completion_tokens"] == 200
        assert await client.close_code() == 1001
        assert not edge.serving.done()
        edge.service.scripts[1].finish()
        assert await other.close_code() == 1001
        assert await ended(edge) is ExitCode.CLEAN


async def test_at_the_limit_streams_end_with_a_typed_error() -> None:
    async with running_edge(server={"drain_s": 0.3}) as edge, edge.opened() as client:
        await client.create("r", hold=True)
        await client.create("preparing", prepare_s=100)
        await client.receive()
        edge.control.stop()
        assert (await client.receive())["type"] == "goaway"
        ends = [await client.receive(), await client.receive()]
        assert {(end["id"], end["status"], end["error"]["code"]) for end in ends} == {
            ("r", 503, "shutting_down"), ("preparing", 503, "shutting_down"),
        }  # fmt: skip
        assert await client.close_code() == 1001
        assert await ended(edge) is ExitCode.WORK_LOST


async def test_a_second_stop_ends_at_once() -> None:
    async with running_edge(server={"drain_s": 1000.0}) as edge, edge.opened() as client:
        await client.create("r", hold=True)
        await client.receive()
        edge.control.stop()
        assert (await client.receive())["type"] == "goaway"
        edge.control.stop()
        assert (await client.receive())["error"]["code"] == "shutting_down"
        assert await ended(edge) is ExitCode.WORK_LOST


async def test_a_client_that_does_not_read_cannot_hold_up_the_end() -> None:
    short = {"server": {"drain_s": 0.2}, "limits": {"close_grace_s": 0.2, "linger_s": 0.1}}
    async with running_edge(**short) as edge, RawClient.open(edge, holds_bytes=1 << 16) as client:
        client.say("create", id="r", endpoint="chat", body={"big": 10**6, "every_s": 0.001})
        await until(lambda: bool(edge.service.scripts) and sum(edge.service.scripts[0].sent) > 500)
        edge.control.stop()
        assert await ended(edge) is ExitCode.WORK_LOST


async def test_detached_streams_of_lost_connections_end_with_the_server() -> None:
    async with running_edge(server={"drain_s": 30.0}) as edge:
        async with edge.opened() as client:
            await client.create("r", hold=True, detach=True)
            await client.receive()
        await until(lambda: edge.endpoint.num_sockets == 0)
        assert edge.service.running == 1
        edge.control.stop()
        assert await ended(edge) is ExitCode.CLEAN
        assert edge.service.running == 0


async def test_other_work_is_waited_for_and_ended_at_the_limit() -> None:
    quick, slow = SlowWork(), SlowWork()
    async with running_edge(drains=(quick,), server={"drain_s": 30.0}) as edge:
        edge.control.stop()
        await until(lambda: quick.limit_s == 30.0)
        assert not edge.serving.done()
        quick.done.set()
        assert await ended(edge) is ExitCode.CLEAN
    async with running_edge(drains=(slow,), server={"drain_s": 0.1}) as edge:
        edge.control.stop()
        assert await ended(edge) is ExitCode.WORK_LOST
        assert slow.aborted


async def test_the_reason_for_stopping_is_the_exit_code() -> None:
    async with running_edge() as edge, edge.opened() as client:
        await client.create("r", hold=True)
        await client.receive()
        edge.service.scripts[0].lose()
        assert (await client.until_end("r"))[-1]["error"]["code"] == "engine_lost"
        edge.control.stop(ExitCode.ENGINE_DIED)
        assert await ended(edge) is ExitCode.ENGINE_DIED


async def test_a_signal_drains_and_handlers_are_removed() -> None:
    async with running_edge(signals=(signal.SIGUSR1,)) as edge:
        signal.raise_signal(signal.SIGUSR1)
        assert await ended(edge) is ExitCode.CLEAN
        assert not asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)
