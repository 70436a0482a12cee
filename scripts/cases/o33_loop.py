"""O33: no work that a client sends holds up the event loop: /livez answers meanwhile, streams and pings go on."""

import asyncio
import time

import httpx

from headrace.serving.bench.stream_client import StreamClient
from scripts.cases.figures import Bounds, Figures, Sizes, exactly, quantile, say, stalls, under
from tests.cases.test_o33_blocked_loop import JSON, WORK, probed
from tests.live import LiveServer

OPTIONS = ("--heartbeat-seconds", "2")
MAX_LAG_S, MAX_LAG_P99_S, MAX_HEALTH_S = 0.25, 0.05, 0.2
PROBE_EVERY_S = 0.01
"""As often as ``probed`` asks."""


async def probe_one(server: LiveServer, name: str, cut: set[str]) -> list[float]:
    """Seconds that each /livez took while the work of that name was done beside a stream and an idle client."""
    requests, statuses = WORK[name]
    async with StreamClient(server.stream_url) as streaming, StreamClient(server.stream_url) as idle:
        body = {"prompt": "x", "max_tokens": 6000, "ignore_eos": True}
        running = await streaming.create("r", "completion", body)
        await running.started.wait()
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=900, headers=JSON) as http,
            probed(server) as seconds,
        ):
            await asyncio.sleep(1)
            got = await asyncio.gather(*(http.post(path, content=content) for path, content in requests))
            await asyncio.sleep(0.2)
        assert {answer.status_code for answer in got} <= set(statuses), (name, got[0].text[:300])
        await streaming.cancel("r")
        await running.ended.wait()
        assert not running.faults()
        cut |= {f"{name}: {client.close_code}" for client in (streaming, idle) if client.close_code is not None}
    return seconds


async def keep_the_loop_free(server: LiveServer, sizes: Sizes) -> tuple[Figures, Bounds]:
    """An answer of /livez waits for the loop and is then made by it, so its time is an upper bound of the lag."""
    worst: dict[str, list[float]] = {name: [] for name in WORK}
    p99s: dict[str, list[float]] = {name: [] for name in WORK}
    every: list[float] = []
    cut: set[str] = set()
    for number in range(sizes.rounds):
        for name in WORK:
            start_s = time.monotonic()
            seconds = stalls(await probe_one(server, name, cut), PROBE_EVERY_S)
            every += seconds
            worst[name].append(round(max(seconds), 4))
            p99s[name].append(round(quantile(seconds, 0.99), 4))
            took_s = time.monotonic() - start_s
            say(f"O33 round {number + 1}, {name}: at most {worst[name][-1] * 1000:.0f} ms ({took_s:.0f} s)")
    figures: Figures = {
        "answers_probed": len(every),
        "p50_s": round(quantile(every, 0.5), 4),
        "largest_s_by_work_and_round": worst,
        "p99_s_by_work_and_round": p99s,
        "sockets_cut": sorted(cut),
    }
    return figures, {
        "event-loop lag, largest (s)": under(max(every), MAX_LAG_S),
        "event-loop lag, p99 (s)": under(quantile(every, 0.99), MAX_LAG_P99_S),
        "answer of /livez, largest (s)": under(max(every), MAX_HEALTH_S),
        "sockets cut": exactly(len(cut), 0),
    }
