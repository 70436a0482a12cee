"""The native WebSocket through a real server and real clients: streams, slow and dead clients, bounds."""

import asyncio
import json
import socket
import struct
from contextlib import suppress

import pytest
import websockets
from websockets.frames import Opcode

from headrace.serving.core.request import CancelReason
from headrace.serving.edge.messages import MAX_FRAME_BYTES
from tests.serving.edge.live_edge import RawClient, numbers, running_edge, small_socket, text_of, until

FAST_PINGS = {"ping_interval_s": 0.2, "ping_timeout_s": 0.2}


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


async def test_stream_options() -> None:
    async with running_edge() as edge, edge.opened() as client:
        await client.create("r", hold=True, stream_options={"chunk_tokens": 1024, "chunk_ms": 20})
        await client.create("s", hold=True, stream_options={"chunk_tokens": 3, "include_obfuscation": True})
        assert [(await client.receive())["type"] for _ in range(2)] == ["created"] * 2
        slow, padded = edge.service.scripts
        slow.tokens(b"by time")
        frame = await client.receive()
        assert (frame["id"], frame["text"], frame["n"], frame["seq"]) == ("r", "by time", 7, 1)
        padded.tokens(b"ab")
        slow.tokens(b"!")
        assert (await client.receive())["id"] == "r", "two tokens of three went out"
        padded.tokens(b"c")
        frame = await client.receive()
        assert (frame["id"], frame["text"], frame["n"]) == ("s", "abc", 3)
        assert frame["obfuscation"]
        for script in (slow, padded):
            script.tokens(b"z")
            script.finish()
        assert [(await client.receive())["type"] for _ in range(4)].count("done") == 2


async def test_a_refused_stream_option_is_named() -> None:
    async with running_edge() as edge, edge.opened() as client:
        await client.create("r", stream_options={"chunk_ms": 10_001})
        (error,) = await client.until_end("r")
        assert error["error"]["param"] == "stream_options.chunk_ms"


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


async def test_sockets_streams_and_closes_are_counted() -> None:
    async with running_edge() as edge:
        async with edge.opened() as client:
            await client.create("r", hold=True)
            await client.receive()
            assert edge.metric("ws_connections") == edge.metric("ws_streams_active") == 1
            await client.connection.close(4999)
        async with edge.opened() as client:
            await client.connection.send("no json")
            assert await client.close_code() == 4400
        await until(lambda: edge.endpoint.num_sockets == 0)
        assert edge.metric("ws_connections") == edge.metric("ws_streams_active") == 0
        assert edge.metric("ws_closes_total", 'code="4400"') == 1
        assert edge.metric("ws_closes_total", 'code="other"') == 1, "a client's own codes share one label"


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
        client.say("create", id="r", endpoint="chat", body={"big": 10**6, "every_s": 0.0005})
        await until(lambda: edge.endpoint.num_sockets == 0 and bool(edge.service.scripts))
        assert edge.service.scripts[0].cancels == [CancelReason.SLOW_CLIENT]
        assert await client.close_code() == 4408, "a client that wakes up learns why"


async def test_a_client_that_never_wakes_up_is_cut_off() -> None:
    short = {"stream": {"write_stall_s": 0.3}, "limits": {"close_grace_s": 0.3, "linger_s": 0.1}}
    async with running_edge(**short) as edge, RawClient.open(edge, holds_bytes=1 << 16) as client:
        client.say("create", id="r", endpoint="chat", body={"big": 10**6, "every_s": 0.0005})
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
        ([(Opcode.TEXT, b"[]", True)], 4400),
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
