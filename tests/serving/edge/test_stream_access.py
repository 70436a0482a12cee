"""The native WebSocket through a real server: keys, what is refused before the upgrade, and resume."""

import base64
import json
from pathlib import Path

import pytest
import websockets
from websockets.frames import Opcode

from headrace.serving.core.request import CancelReason
from headrace.serving.edge.keys import KeyRing, digest_line, new_key
from headrace.serving.edge.messages import SUBPROTOCOL
from tests.serving.edge.live_edge import RawClient, numbers, refused_status, running_edge, text_of, until

KEY = new_key()


@pytest.fixture
def keys(tmp_path: Path) -> KeyRing:
    path = tmp_path / "keys"
    path.write_text(digest_line("alice", KEY))
    path.chmod(0o600)
    return KeyRing(path)


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
        assert status == 401 and body["error"]["code"] == "invalid_api_key"
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
        assert seen == status and word in body["error"]["message"]
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
