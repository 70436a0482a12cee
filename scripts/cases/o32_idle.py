"""O32: idle WebSockets by the thousand: what they cost, that they live, and that nothing of them is left."""

import asyncio
import json
import resource
import time

import psutil
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from headrace.serving.bench.stream_client import SUBPROTOCOL
from scripts.cases.figures import Bounds, Figures, Sizes, exactly, say, under
from tests.live import LiveServer

MAX_IDLE_BYTES = 100_000
STIR_S = 240.0
"""The server closes a socket that has said nothing for ten minutes, as it should; so idle ones ping now and then."""
SPARE_FILES = 200
SETTLE_S = 30.0


def room_for(count: int) -> int:
    """How many connections this process may open, after raising its soft limit as far as it goes."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE_FILES
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return min(count, soft - SPARE_FILES)


async def open_all(server: LiveServer, count: int) -> list[ClientConnection]:
    """As many of them as the server takes; each has its welcome. The clients send no pings of their own."""
    at_once = asyncio.Semaphore(32)

    async def open_one() -> ClientConnection | None:
        async with at_once:
            try:
                opening = connect(
                    server.stream_url, subprotocols=[SUBPROTOCOL], compression=None, ping_interval=None, proxy=None
                )
                client = await opening
                await client.recv()
                return client
            except (OSError, WebSocketException):
                return None

    opened = await asyncio.gather(*(open_one() for _ in range(count)))
    return [client for client in opened if client is not None]


async def answers(client: ClientConnection) -> bool:
    try:
        await client.send('{"type":"ping","t":"there?"}')
        return bool(json.loads(await asyncio.wait_for(client.recv(), 20)) == {"type": "pong", "t": "there?"})
    except (OSError, TimeoutError, WebSocketException):
        return False


async def all_answer(clients: list[ClientConnection]) -> int:
    return sum([await answers(client) for client in clients])


async def hold(clients: list[ClientConnection], edge: psutil.Process, minutes: float) -> list[int]:
    """Resident bytes of the edge, every ten seconds."""
    start_s = stirred_s = time.monotonic()
    sizes = [edge.memory_info().rss]
    while (left_s := start_s + minutes * 60 - time.monotonic()) > 0:
        await asyncio.sleep(min(10.0, left_s))
        sizes.append(edge.memory_info().rss)
        if len(sizes) % 6 == 1:
            say(f"O32 {len(clients)} idle, {left_s:.0f} s left, edge has {sizes[-1] / 1e6:.1f} MB")
        if time.monotonic() - stirred_s > STIR_S:
            stirred_s = time.monotonic()
            await all_answer(clients)
    return sizes


async def files_back_to(edge: psutil.Process, baseline: int) -> int:
    """Descriptors of the edge once they are as before, or after SETTLE_S."""
    end_s = time.monotonic() + SETTLE_S
    while (now := edge.num_fds()) > baseline and time.monotonic() < end_s:
        await asyncio.sleep(0.1)
    return now


async def stay_idle(server: LiveServer, sizes: Sizes) -> tuple[Figures, Bounds]:
    edge = psutil.Process(server.process.pid)
    await asyncio.sleep(2)
    # The start leaves free memory behind, which hides what the first connections take: so the second half counts too.
    files_before, bytes_before = edge.num_fds(), edge.memory_info().rss
    possible = room_for(sizes.connections)
    start_s = time.monotonic()
    clients = await open_all(server, possible // 2)
    bytes_halfway = edge.memory_info().rss
    num_halfway = len(clients)
    clients += await open_all(server, possible - possible // 2)
    say(f"O32 {len(clients)} of {sizes.connections} open after {time.monotonic() - start_s:.1f} s")
    held = await hold(clients, edge, sizes.minutes)
    answering = await all_answer(clients)
    held.append(edge.memory_info().rss)
    await asyncio.gather(*(client.close() for client in clients))
    files_after = await files_back_to(edge, files_before)
    each = [
        (max(held) - before) / max(num, 1)
        for before, num in ((bytes_before, len(clients)), (bytes_halfway, len(clients) - num_halfway))
    ]
    figures: Figures = {
        "bytes_of_each": {"all": round(each[0]), "second half": round(each[1])},
        "minutes": sizes.minutes,
        "edge_mb": {"before": bytes_before / 1e6, "most": max(held) / 1e6, "at_the_end": held[-1] / 1e6},
        "edge_mb_after_closing": edge.memory_info().rss / 1e6,
        "descriptors": {"before": files_before, "after": files_after},
    }
    if possible < sizes.connections:
        figures["not_reached"] = f"{sizes.connections} connections: this process may open {possible}"
    return figures, {
        "connections open": exactly(len(clients), sizes.connections),
        "connections that answer at the end": exactly(answering, sizes.connections),
        "bytes of the edge per connection": under(max(each), MAX_IDLE_BYTES, 0),
        "descriptors left open": exactly(files_after - files_before, 0),
    }
