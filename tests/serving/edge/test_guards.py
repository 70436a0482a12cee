"""Limits below ASGI: connections, heads in bytes, number and time, bodies in time."""

import asyncio

import pytest

from tests.raw_websocket import handshake
from tests.serving.edge.live_edge import Edge, running_edge, until

GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"


async def talk(edge: Edge, data: bytes) -> bytes:
    """Send data, then read to the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", edge.port)
    try:
        writer.write(data)
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (GET + b"Connection: close\r\n\r\n", 200),
        (GET + b"Connection: close\r\nX: " + b"x" * 15_000 + b"\r\n\r\n", 200),
        (GET + b"X: " + b"x" * 17_000 + b"\r\n\r\n", 431),
        (GET + b"X: " + b"x" * 65_536 + b"\r\n\r\n", 431),
        (GET + b"X: " + b"x" * 1_000_000, 431),
        (GET + b"X: y\r\n" * 70 + b"\r\n", 431),
        (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
        (b"GET /v1/stream HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: upgrade\r\n"
         + b"X: y\r\n" * 70 + b"\r\n", 431),
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
    ],
    ids=lambda value: str(value)[:50],
)  # fmt: skip
async def test_heads(head: bytes, expected: int) -> None:
    async with running_edge() as edge:
        assert status(await talk(edge, head)) == expected
        assert status(await talk(edge, GET + b"Connection: close\r\n\r\n")) == 200


async def test_an_upgrade_with_a_line_that_is_too_long_is_answered_and_closed() -> None:
    async with running_edge() as edge:
        head = handshake(x="x" * 9000)
        assert status(await talk(edge, head)) == 431


async def test_the_path_of_the_socket_says_what_it_is() -> None:
    async with running_edge() as edge:
        answer = await talk(edge, b"GET /v1/stream HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert status(answer) == 404 and b"WebSocket" in answer


async def test_a_slow_head_and_a_silent_connection_time_out() -> None:
    async with running_edge(limits={"head_s": 0.3, "linger_s": 0.1}) as edge:
        answers = await asyncio.gather(talk(edge, b""), talk(edge, b"GET /livez HT"), talk(edge, GET))
        assert [status(answer) for answer in answers] == [408, 408, 408]


async def test_a_slow_second_head_on_a_kept_connection_times_out() -> None:
    async with running_edge(limits={"head_s": 0.3, "linger_s": 0.1}) as edge:
        answer = await talk(edge, GET + b"\r\n" + GET)
        assert answer.count(b"HTTP/1.1 200") == 1 and answer.count(b"HTTP/1.1 408") == 1


async def test_a_slow_body_ends_the_connection() -> None:
    async with running_edge(limits={"body_s": 0.3}) as edge:
        answer = await talk(edge, GET + b"Content-Length: 10\r\n\r\n123")
        assert answer.count(b"HTTP/1.1") <= 1, "talk() returned, so the connection was closed"
        assert status(await talk(edge, GET + b"Connection: close\r\n\r\n")) == 200


async def test_connections_beyond_the_limit_get_503_and_room_comes_back() -> None:
    async with running_edge(limits={"max_connections": 3, "linger_s": 0.1}) as edge:
        async with edge.opened(), edge.opened(), edge.opened() as client:
            answer = await talk(edge, GET + b"\r\n")
            assert status(answer) == 503 and b"3 connections" in answer
            await client.create("r", text="still served")
            assert (await client.until_end("r"))[-1]["type"] == "done"
        await until(lambda: edge.endpoint.num_sockets == 0)
        async with edge.opened():
            pass
