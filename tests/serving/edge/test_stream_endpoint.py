"""The native WebSocket through a real server and real clients: streams, slow and dead clients, bounds, resume."""

import asyncio
import base64
import json
import socket
import struct
from contextlib import suppress
from pathlib import Path

import pytest
import websockets
from websockets.frames import Opcode

from headrace.serving.core.request import CancelReason
from headrace.serving.edge.keys import KeyRing, digest_line, new_key
from headrace.serving.edge.messages import MAX_FRAME_BYTES, SUBPROTOCOL
from tests.serving.edge.live_edge import RawClient, running_edge, small_socket, until

KEY = new_key()
FAST_PINGS = {"ping_interval_s": 0.2, "ping_timeout_s": 0.2}


@pytest.fixture
def keys(tmp_path: Path) -> KeyRing:
    path = tmp_path / "keys"
    path.write_text(digest_line("alice", KEY))
    path.chmod(0o600)
    return KeyRing(path)


def text_of(frames: list[dict[str, object]]) -> str:
    return "".join(str(frame["text"]) for frame in frames if frame["type"] == "delta")


def numbers(frames: list[dict[str, object]]) -> list[object]:
    return [frame["seq"] for frame in frames]


async def refused_status(connecting: websockets.connect) -> tuple[int, dict[str, object]]:
    with pytest.raises(websockets.InvalidStatus) as caught:
        async with connecting:
            pass
    response = caught.value.response
    return response.status_code, json.loads(response.body or b"{}")


# Streams


async def test_many_streams_on_one_socket() -> None:
    async with running_edge() as edge, edge.opened() as client:
        for number in range(16):
            await client.create(f"s{number}", text=f"answer {number} é🙂", every_s=0.001)
        ends: dict[str, list[dict[str, object]]] = {}
        while len([1 for frames in ends.values() if frames[-1]["type"] == "done"]) < 16:
            frame = await client.receive()
            ends.setdefault(frame["id"], []).append(frame)
        for number in range(16):
            frames = ends[f"s{number}"]
            assert numbers(frames) == list(range(len(frames)))
            assert text_of(frames) == f"answer {number} é🙂"
        assert edge.endpoint.num_streams == 0


async def test_a_refused_request_leaves_the_socket_open() -> None:
    async with running_edge() as edge, edge.opened() as client:
        await client.create("r", refuse="queue_full")
        (error,) = await client.until_end("r")
        assert (error["status"], error["error"]["code"], error["retry_after_ms"]) == (429, "queue_full", 500)
        await client.create("r", text="x")
        assert text_of(await client.until_end("r")) == "x"


async def test_cancel_and_duplicate_ids() -> None:
    async with running_edge() as edge, edge.opened() as client:
        await client.create("r", text="x" * 10_000, every_s=0.005)
        assert (await client.receive())["type"] == "created"
        await client.create("r", text="other")
        await client.send("cancel", id="zz")
        await client.send("cancel", id="r")
        await client.send("cancel", id="r")
        frames = []
        while not frames or frames[-1]["type"] != "done":
            frames.append(await client.receive())
        rejected = [frame for frame in frames if frame["type"] == "error"]
        assert [(f["id"], f["id_rejected"], f["error"]["code"]) for f in rejected] == [
            (None, "r", "duplicate_id"), (None, "zz", "unknown_id"),
        ]  # fmt: skip
        assert frames[-1]["choices"][0]["finish_reason"] == "cancelled"
        assert frames[-1]["usage"]["completion_tokens"] == len(text_of(frames))
        assert edge.service.scripts[0].cancels == [CancelReason.CLIENT]


# Slow, stuck and dead clients


async def test_what_a_slow_reader_has_not_taken_is_merged_and_nothing_is_lost() -> None:
    async with running_edge() as edge:
        slow = small_socket(edge.port, 128 << 10)
        async with edge.opened(sock=slow, max_queue=1, max_size=None) as client, edge.opened() as neighbour:
            await client.create("slow", hold=True)
            await until(lambda: len(edge.service.scripts) == 1)
            script = edge.service.scripts[0]
            for _ in range(1500):
                script.tokens([256])
                await asyncio.sleep(0)
            await neighbour.create("quick", text="not held up")
            assert text_of(await neighbour.until_end("quick")) == "not held up"
            script.finish()
            frames = await client.until_end("slow")
        deltas = [frame for frame in frames if frame["type"] == "delta"]
        assert numbers(frames) == list(range(len(frames)))
        assert sum(delta["n"] for delta in deltas) == 1500
        assert len(text_of(frames)) == 1500 * 4096
        assert len(deltas) < 500, "what the connection did not take was buffered frame by frame"


async def test_a_client_that_does_not_read_is_closed_and_its_streams_cancelled() -> None:
    async with running_edge(stream={"write_stall_s": 0.3}) as edge, RawClient.open(edge, holds_bytes=1 << 16) as client:
        client.say("create", id="r", endpoint="chat", body={"big": 1000, "every_s": 0.0001})
        await until(lambda: edge.endpoint.num_sockets == 0 and bool(edge.service.scripts))
        assert edge.service.scripts[0].cancels == [CancelReason.SLOW_CLIENT]
        assert await client.close_code() == 4408, "a client that wakes up learns why"


async def test_a_client_that_never_wakes_up_is_cut_off() -> None:
    short = {"stream": {"write_stall_s": 0.3}, "limits": {"close_grace_s": 0.3, "linger_s": 0.1}}
    async with running_edge(**short) as edge, RawClient.open(edge, holds_bytes=1 << 16) as client:
        client.say("create", id="r", endpoint="chat", body={"big": 1000, "every_s": 0.0001})
        await until(lambda: edge.endpoint.num_sockets == 0 and bool(edge.service.scripts))
        with pytest.raises((EOFError, ConnectionError)):
            for _ in range(1000):
                await asyncio.sleep(0.005)
                client.send_frame(Opcode.PONG, b"")
                await client.writer.drain()


async def test_keepalive_works_while_the_client_only_listens() -> None:
    """uvicorn pauses a connection after each message until the application receives; pongs would go unseen."""
    async with running_edge(server=FAST_PINGS) as edge, RawClient.open(edge) as client:
        client.say("create", id="r", endpoint="chat", body={"hold": True})
        for _ in range(5):
            ping = await client.next(lambda frame: frame.opcode is Opcode.PING)
            client.send_frame(Opcode.PONG, ping.data)
        assert edge.service.scripts[0].cancels == []


async def test_a_half_open_connection_is_found_and_its_streams_cancelled() -> None:
    async with running_edge(server=FAST_PINGS) as edge, RawClient.open(edge) as client:
        client.say("create", id="r", endpoint="chat", body={"hold": True})
        await until(lambda: edge.service.running == 1)
        await until(lambda: edge.service.running == 0)
        assert edge.service.scripts[0].cancels == [CancelReason.DISCONNECT]
        assert await client.close_code() == 1011


@pytest.mark.parametrize("how", ["reset", "end of file", "close without handshake", "close frame"])
async def test_every_kind_of_disconnect_cancels_at_once(how: str) -> None:
    async with running_edge() as edge, RawClient.open(edge) as client:
        for number in range(3):
            client.say("create", id=f"r{number}", endpoint="chat", body={"hold": True})
        client.say("create", id="p", endpoint="chat", body={"prepare_s": 100})
        await until(lambda: edge.service.running == 3 and edge.endpoint.num_streams == 4)
        if how == "reset":
            client.writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            client.writer.transport.abort()
        elif how == "end of file":
            client.writer.write_eof()
        elif how == "close frame":
            client.send_frame(Opcode.CLOSE, struct.pack("!H", 1000))
        else:
            client.writer.close()
        await until(lambda: edge.service.running == 0 and edge.service.given_up == 1, 2.0)
        assert {reason for script in edge.service.scripts for reason in script.cancels} == {CancelReason.DISCONNECT}
        assert edge.endpoint.num_sockets == 0


# Bounds


@pytest.mark.parametrize(("extra", "code"), [(0, None), (1, 1009)])
async def test_the_largest_message(extra: int, code: int | None) -> None:
    async with running_edge() as edge, edge.opened() as client:
        frame = '{"type":"ping","t":7,"fill":"%s"}'
        with suppress(websockets.ConnectionClosed):
            await client.connection.send(frame % ("x" * (MAX_FRAME_BYTES + extra - len(frame % ""))))
        if code is None:
            assert await client.receive() == {"type": "pong", "t": 7}
        else:
            assert await client.close_code() == code


async def test_ten_thousand_tiny_frames() -> None:
    async with running_edge() as edge, edge.opened() as client:

        async def send() -> None:
            for number in range(10_000):
                await client.send("ping", t=number)

        sending = asyncio.create_task(send())
        assert [(await client.receive())["t"] for _ in range(10_000)] == list(range(10_000))
        await sending


async def test_a_client_that_asks_without_reading_is_closed() -> None:
    async with (
        running_edge(stream={"write_stall_s": 60.0}) as edge,
        RawClient.open(edge, holds_bytes=1 << 16) as client,
    ):
        with suppress(ConnectionError):
            async with asyncio.timeout(20):
                while edge.endpoint.num_sockets:
                    client.say("ping", t="x" * 64)
                    await client.writer.drain()
                    await asyncio.sleep(0)
        await until(lambda: edge.endpoint.num_sockets == 0)


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([(Opcode.BINARY, b"{}", True)], 4400),
        ([(Opcode.TEXT, b"", True)], 4400),
        ([(Opcode.TEXT, b"[]", True)], 4400),
        ([(Opcode.TEXT, b"\xff\xfe{}", True)], 1007),
        ([(Opcode.TEXT, b"\xed\xa0\xbd", True)], 1007),
        ([(Opcode.CONT, b"x", True)], 1002),
        ([(Opcode.TEXT, b"x", False), (Opcode.TEXT, b"x", True)], 1002),
        ([(Opcode.TEXT, b"", False), *[(Opcode.CONT, b"", False)] * 1100], 1009),
        ([(Opcode.PING, b"x", True)] * 200, 1008),
        ([(Opcode.PONG, b"x", True)] * 200, 1008),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_frames_that_cost_the_connection(frames: list[tuple[Opcode, bytes, bool]], code: int) -> None:
    async with running_edge() as edge, edge.opened() as neighbour, RawClient.open(edge) as client:
        for opcode, data, fin in frames:
            client.send_frame(opcode, data, fin=fin)
        assert await client.close_code() == code
        await neighbour.create("r", text="fine")
        assert text_of(await neighbour.until_end("r")) == "fine"
        await until(lambda: edge.endpoint.num_sockets == 1)


async def test_compressed_frames_were_not_negotiated() -> None:
    async with running_edge() as edge, RawClient.open(edge) as client:
        client.writer.write(b"\xc1\x83\0\0\0\0\x4a\x04\x00")  # text, final, compressed; masked with zeros
        assert await client.close_code() == 1002
        async with edge.connect(compression="deflate") as connection:
            assert connection.protocol.extensions == []


async def test_fragments_make_a_message_and_may_be_mixed_with_pings() -> None:
    async with running_edge() as edge, RawClient.open(edge) as client:
        await client.next()
        text = '{"type":"ping","t":"é"}'.encode()
        client.send_frame(Opcode.TEXT, text[:1], fin=False)
        for byte in text[1:]:
            client.send_frame(Opcode.CONT, bytes([byte]), fin=False)
        client.send_frame(Opcode.PING, b"hi")
        client.send_frame(Opcode.CONT, b"")
        assert (await client.next()).opcode is Opcode.PONG
        assert json.loads((await client.next()).data) == {"type": "pong", "t": "é"}


async def test_fragments_that_never_end_are_cut_off() -> None:
    async with running_edge(limits={"message_s": 0.2}) as edge, RawClient.open(edge) as client:
        client.send_frame(Opcode.TEXT, b"{", fin=False)
        assert await client.close_code() == 1008


async def test_an_idle_socket_is_closed() -> None:
    async with running_edge(stream={"idle_s": 0.2}) as edge, edge.opened() as client:
        assert await client.close_code() == 1000


# Authentication


async def test_the_three_ways_to_show_a_key(keys: KeyRing) -> None:
    encoded = base64.urlsafe_b64encode(KEY.encode()).decode().rstrip("=")
    async with running_edge(keys=keys) as edge:
        async with edge.opened(additional_headers={"Authorization": f"Bearer {KEY}"}) as client:
            await client.create("r", text="x")
            await client.until_end("r")
        async with edge.opened(subprotocols=[SUBPROTOCOL, f"bearer.{encoded}"]) as client:
            assert client.connection.subprotocol == SUBPROTOCOL
            assert encoded not in str(client.connection.response.headers)
            await client.create("r", text="x")
            await client.until_end("r")
        async with edge.connect() as connection:
            await connection.send(json.dumps({"type": "hello", "token": KEY, "client": "test/1"}))
            assert json.loads(await connection.recv())["type"] == "welcome"
        assert edge.service.tenants == ["alice", "alice"]


async def test_no_or_wrong_keys(keys: KeyRing) -> None:
    async with running_edge(keys=keys) as edge:
        status, body = await refused_status(edge.connect(additional_headers={"Authorization": "Bearer wrong"}))
        assert status == 401 and body["error"]["code"] == "invalid_api_key"  # type: ignore[index]
        for first in ('{"type":"hello","token":"wrong"}', '{"type":"ping"}'):
            async with RawClient.open(edge) as client:
                client.send_frame(Opcode.TEXT, first.encode())
                assert await client.close_code() == 4401
        assert edge.service.scripts == []


async def test_a_socket_that_says_no_hello_is_closed(keys: KeyRing) -> None:
    async with running_edge(keys=keys, stream={"hello_s": 0.2}) as edge, RawClient.open(edge) as client:
        assert await client.close_code() == 4408


async def test_sockets_without_hello_and_sockets_per_key_are_limited(keys: KeyRing) -> None:
    header = {"additional_headers": {"Authorization": f"Bearer {KEY}"}}
    async with running_edge(keys=keys, stream={"max_unauthenticated": 2, "max_sockets_per_key": 2}) as edge:
        async with edge.connect(), edge.connect():
            assert (await refused_status(edge.connect()))[0] == 429
            async with edge.opened(**header), edge.opened(**header):
                assert (await refused_status(edge.connect(**header)))[0] == 429
            await until(lambda: edge.endpoint.num_sockets == 2)
            async with edge.opened(**header), edge.opened(**header):
                pass
        await until(lambda: edge.endpoint.num_sockets == 0)
        async with edge.opened(**header), edge.opened(**header), edge.connect() as third:
            await third.send(json.dumps({"type": "hello", "token": KEY}))
            with pytest.raises(websockets.ConnectionClosed) as caught:
                await third.recv()
            assert caught.value.rcvd is not None and caught.value.rcvd.code == 4429


@pytest.mark.parametrize(
    ("options", "status", "word"),
    [
        ({"subprotocols": None}, 400, "headrace.v1"),
        ({"subprotocols": ["graphql-ws"]}, 400, "headrace.v1"),
        ({"origin": "https://evil.example"}, 403, "--allow-origin"),
    ],
)
async def test_refused_before_the_upgrade(options: dict[str, object], status: int, word: str) -> None:
    async with running_edge() as edge:
        seen, body = await refused_status(edge.connect(**options))
        assert seen == status and word in body["error"]["message"]  # type: ignore[index]
        assert edge.endpoint.num_sockets == 0


# Resume


async def test_resume_after_a_lost_connection() -> None:
    text = "the quick brown fox " * 20
    async with running_edge() as edge:
        async with edge.opened() as first:
            await first.create("r", text=text, every_s=0.001, detach=True)
            await first.create("plain", hold=True)
            frames = []
            while len(frames) < 30:
                frame = await first.receive()
                if frame["id"] == "r":
                    frames.append(frame)
            first.connection.transport.abort()
        await until(lambda: edge.endpoint.num_sockets == 0)
        assert edge.endpoint.num_streams == 1
        async with edge.opened() as second:
            await second.send("resume", session=first.session, id="r", after=frames[-1]["seq"])
            frames += await second.until_end("r")
            assert numbers(frames) == list(range(len(frames)))
            assert text_of(frames) == text and frames[-1]["type"] == "done"
            await second.send("resume", session=first.session, id="plain")
            assert (await second.receive())["error"]["code"] == "resume_gone"


async def test_a_detached_stream_that_nobody_resumes_is_cancelled() -> None:
    async with running_edge(session={"resume_s": 0.3}) as edge:
        async with edge.opened() as client:
            await client.create("r", hold=True, detach=True)
            await client.receive()
        await until(lambda: edge.endpoint.num_sockets == 0)
        assert edge.service.running == 1
        await until(lambda: edge.service.running == 0)
        assert edge.service.scripts[0].cancels == [CancelReason.DISCONNECT]
        async with edge.opened() as late:
            await late.send("resume", session=client.session, id="r")
            assert (await late.receive())["error"]["code"] == "resume_gone"


async def test_lost_sessions_are_bounded() -> None:
    async with running_edge(stream={"max_parked": 3}) as edge:
        for _ in range(6):
            async with edge.opened() as client:
                await client.create("r", hold=True, detach=True)
                await client.receive()
        await until(lambda: edge.endpoint.num_sockets == 0)
        assert edge.service.running == 3
        assert [bool(script.cancels) for script in edge.service.scripts] == [True] * 3 + [False] * 3
