"""20,000 requests on the tiny model: what the memory of each process grows by per request, with its confidence.

The memory that is a process's own (USS; of shared pages a share would change with other processes) is read at equal
steps, of the edge, the engine and the process for long prompts. Over the last 75% the readings are averaged in 20
blocks, since neighbouring readings are not independent, and a line is fitted through the blocks. Passed: the upper end
of the slope's 95% interval lies below 1 kB per request for each process, and descriptors, tasks and pages are where
they were.
"""

import asyncio
import itertools
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
from rich.console import Console
from rich.progress import Progress
from scipy import stats

from headrace.serving.bench.stream_client import StreamClient
from scripts import evidence
from scripts.check_load import footprint, idle, random_body
from tests.live import LiveServer, start_server

NUM_SOCKETS, NUM_STREAMS = 4, 16
OPTIONS = ("--max-streams", "16", "--context", "1024")
READINGS = 400
BLOCKS = 20
WARM_SHARE = 0.25
LIMIT_BYTES = 1000.0
CANCEL_SHARE, RECONNECT_SHARE = 0.1, 0.005
WATCHED = ("num_requests_running", "num_requests_waiting", "kv_pages_held", "event_loop_tasks", "ws_connections")
ROLES = {"headrace serve": "edge", "engine_process": "engine", "bulk_process": "long prompts"}


@dataclass(slots=True)
class Readings:
    """requests: how many had ended; own: by role, in bytes, at each of those."""

    requests: list[int] = field(default_factory=list)
    own: dict[str, list[int]] = field(default_factory=dict)

    def read(self, num_ended: int, processes: dict[str, psutil.Process]) -> None:
        self.requests.append(num_ended)
        for role, process in processes.items():
            self.own.setdefault(role, []).append(process.memory_full_info().uss)


def processes_of(server: LiveServer) -> dict[str, psutil.Process]:
    """By role."""
    root = psutil.Process(server.process.pid)
    found = {"edge": root}
    for child in root.children(recursive=True):
        command = " ".join(child.cmdline())
        found[next((role for part, role in ROLES.items() if part in command), command[-60:])] = child
    return found


class Load:
    """num_requests, some of which are cancelled, over sockets that are now and then opened anew."""

    def __init__(self, server: LiveServer, num_requests: int, seed: int) -> None:
        self._server = server
        self._rng = random.Random(seed)
        self._num_requests = num_requests
        self._numbers = itertools.count()
        self._clients: dict[int, StreamClient] = {}
        self._locks = [asyncio.Lock() for _ in range(NUM_SOCKETS)]
        self._processes = processes_of(server)
        self.num_ended = 0
        self.faults: list[str] = []
        self.readings = Readings()

    async def run(self, progress: Progress) -> None:
        bar = progress.add_task("requests", total=self._num_requests)
        every = max(1, self._num_requests // READINGS)

        async def stream(socket: int) -> None:
            for number in self._numbers:
                if number >= self._num_requests:
                    return
                await self._request(number, socket)
                self.num_ended += 1
                progress.advance(bar)
                if self.num_ended % every == 0:
                    self.readings.read(self.num_ended, self._processes)

        await asyncio.gather(*(stream(i % NUM_SOCKETS) for i in range(NUM_STREAMS)))
        for client in self._clients.values():
            await client.__aexit__()

    async def _request(self, number: int, socket: int) -> None:
        client = await self._client(socket)
        endpoint, body = random_body(self._rng)
        history = await client.create(f"r{number}", endpoint, body)
        if self._rng.random() < CANCEL_SHARE:
            await history.started.wait()
            await client.cancel(history.id)
        await history.ended.wait()
        self.faults += history.faults()
        client.forget(history)
        client.others.clear()
        if self._rng.random() < RECONNECT_SHARE:
            client.abort()

    async def _client(self, socket: int) -> StreamClient:
        async with self._locks[socket]:
            client = self._clients.get(socket)
            if client is None or client.close_code is not None:
                client = self._clients[socket] = await StreamClient(self._server.stream_url).__aenter__()
            return client


def slope_of(requests: list[int], own: list[int]) -> dict[str, object]:
    """Bytes per request over the last 75% of the readings, with its 95% interval, from means of blocks."""
    first = round(len(requests) * WARM_SHARE)
    x = [float(np.mean(block)) for block in np.array_split(np.array(requests[first:]), BLOCKS)]
    y = [float(np.mean(block)) for block in np.array_split(np.array(own[first:]), BLOCKS)]
    fit = stats.linregress(x, y)
    half = float(stats.t.ppf(0.975, BLOCKS - 2) * fit.stderr) if max(y) > min(y) else 0.0
    return {
        "bytes_per_request": round(float(fit.slope), 1),
        "interval_95": [round(float(fit.slope) - half, 1), round(float(fit.slope) + half, 1)],
        "at_the_start": own[0],
        "after_warm_up": own[first],
        "at_the_end": own[-1],
        "most": max(own),
        "block_means": [round(value) for value in y],
        "passed": float(fit.slope) + half < LIMIT_BYTES,
    }


async def run(server: LiveServer, num_requests: int, seed: int, console: Console) -> dict[str, object]:
    async with StreamClient(server.stream_url) as client:
        await (await client.create("first", "completion", {"prompt": "x", "max_tokens": 2})).ended.wait()
    await asyncio.sleep(1)  # what the start and the first request opened is closed again
    before, places_before = await idle(server), footprint(server)
    load, started_s = Load(server, num_requests, seed), time.monotonic()
    with Progress(console=console) as progress:
        await load.run(progress)
    took_s = time.monotonic() - started_s
    await asyncio.sleep(2)
    after, places_after = await idle(server), footprint(server)
    return {
        "requests": num_requests,
        "seconds": round(took_s, 1),
        "faults": load.faults[:20],
        "slopes": {role: slope_of(load.readings.requests, own) for role, own in load.readings.own.items()},
        "before": {name: before["headrace_" + name] for name in WATCHED} | places_before,
        "after": {name: after["headrace_" + name] for name in WATCHED} | places_after,
        "compiles_after_ready": after["headrace_compiles_after_ready_total"],
    }


def main() -> int:
    parser = evidence.arguments(__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(Path(folder) / "log", "tiny", *OPTIONS)
        try:
            found = asyncio.run(run(server, args.requests, args.seed, Console(stderr=True)))
        finally:
            exit_code = server.stop()
    slopes = found["slopes"]
    passed = (
        exit_code == 0
        and not found["faults"]
        and found["before"] == found["after"]
        and isinstance(slopes, dict)
        and slopes.keys() >= {"edge", "engine"}
        and all(slope["passed"] for slope in slopes.values())
        and found["compiles_after_ready"] == 0
    )
    return evidence.write(
        args.out, passed, options=OPTIONS, seed=args.seed, limit_bytes=LIMIT_BYTES, server_exit_code=exit_code, **found
    )


if __name__ == "__main__":
    raise SystemExit(main())
