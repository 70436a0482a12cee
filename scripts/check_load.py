"""1,000 requests with random cancels and disconnects: 16 streams on one socket, then 64 over 8 sockets.

Shows: each accepted request has exactly one terminal frame, seq has no gaps, pages return to baseline, no task or file
descriptor is left, and nothing was compiled after the server was ready.
"""

import asyncio
import itertools
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import Progress

from headrace.serving.bench.stream_client import History, StreamClient
from headrace.serving.bench.workload import WORDS
from scripts import evidence
from tests.live import LiveServer, start_server

SETTLE_S = 5.0
OWN_LABELS = {"model_name", "engine"}


def metrics(server: LiveServer) -> dict[str, float]:
    text = httpx.get(server.url + "/metrics").text
    families = text_string_to_metric_families(text)
    return {
        sample.name: sample.value
        for family in families
        for sample in family.samples
        if set(sample.labels) <= OWN_LABELS
    }


def footprint(server: LiveServer) -> dict[str, int]:
    """File descriptors and threads of the server and its engine."""
    root = psutil.Process(server.process.pid)
    processes = [root, *root.children(recursive=True)]
    return {
        "file_descriptors": sum(p.num_fds() for p in processes),
        "tcp_connections": sum(c.status == psutil.CONN_ESTABLISHED for c in root.net_connections("tcp")),
        "processes": len(processes),
    }


def random_body(rng: random.Random) -> tuple[str, dict[str, object]]:
    words = " ".join(rng.choices(WORDS, k=rng.choice((1, 5, 15, 16, 17, 40, 90, 200))))
    body: dict[str, object] = {"max_tokens": rng.choice((1, 2, 8, 16, 24, 32)), "temperature": rng.choice((0, 0, 1))}
    body["ignore_eos"] = rng.random() < 0.5
    if rng.random() < 0.2:
        body |= {"presence_penalty": 0.5, "logit_bias": {"42": 1.5}, "min_p": 0.05}
    if rng.random() < 0.1:
        body["stop"] = ["the"]
    if rng.random() < 0.5:
        return "completion", body | {"prompt": words}
    return "chat", body | {"messages": [{"role": "user", "content": words}]}


class Load:
    """num_streams at once over num_sockets; a socket that is cut is opened again."""

    def __init__(self, server: LiveServer, *, num_sockets: int, num_streams: int, num_requests: int, seed: int) -> None:
        self._server = server
        self._rng = random.Random(seed)
        self._left = num_requests
        self._num_sockets, self._num_streams = num_sockets, num_streams
        self._clients: dict[int, StreamClient] = {}
        self._locks = [asyncio.Lock() for _ in range(num_sockets)]
        self._ids = itertools.count()
        self.histories: list[History] = []
        self.num_cancels = self.num_disconnects = 0

    async def run(self, progress: Progress) -> None:
        bar = progress.add_task(f"{self._num_streams} streams, {self._num_sockets} sockets", total=self._left)
        streams = (self._stream(i % self._num_sockets, progress, bar) for i in range(self._num_streams))
        await asyncio.gather(*streams)
        for client in self._clients.values():
            await client.__aexit__()

    async def _client(self, socket: int) -> StreamClient:
        async with self._locks[socket]:
            client = self._clients.get(socket)
            if client is None or client.close_code is not None:
                client = await StreamClient(self._server.stream_url).__aenter__()
                self._clients[socket] = client
            return client

    async def _stream(self, socket: int, progress: Progress, bar: object) -> None:
        while self._left > 0:
            self._left -= 1
            client = await self._client(socket)
            endpoint, body = random_body(self._rng)
            history = await client.create(f"r{next(self._ids)}", endpoint, body)
            self.histories.append(history)
            chance = self._rng.random()
            if chance < 0.15:
                await self._cancel(client, history)
            elif chance < 0.16:
                self.num_disconnects += 1
                client.abort()
            await history.ended.wait()
            progress.advance(bar)

    async def _cancel(self, client: StreamClient, history: History) -> None:
        self.num_cancels += 1
        if self._rng.random() < 0.5:
            await history.started.wait()
        await asyncio.sleep(self._rng.random() * 0.3)
        await client.cancel(history.id)


@asynccontextmanager
async def seconds(into: dict[str, float], name: str) -> AsyncIterator[None]:
    start = time.monotonic()
    yield
    into[name] = round(time.monotonic() - start, 1)


async def idle(server: LiveServer) -> dict[str, float]:
    """The metrics once nothing runs any more, or what they are after SETTLE_S."""
    end = time.monotonic() + SETTLE_S
    while True:
        now = metrics(server)
        if not now["headrace_num_requests_running"] + now["headrace_num_requests_waiting"] or time.monotonic() > end:
            return now
        await asyncio.sleep(0.1)


async def run(server: LiveServer, num_requests: int, seed: int) -> dict[str, object]:
    async with StreamClient(server.stream_url) as client:
        await (await client.create("first", "completion", {"prompt": "x", "max_tokens": 2})).ended.wait()
    before, fds_before = await idle(server), footprint(server)
    one = Load(server, num_sockets=1, num_streams=16, num_requests=num_requests // 4, seed=seed)
    many = Load(server, num_sockets=8, num_streams=64, num_requests=num_requests - num_requests // 4, seed=seed + 1)
    took: dict[str, float] = {}
    with Progress(console=Console(stderr=True)) as progress:
        async with seconds(took, "16 streams, 1 socket"):
            await one.run(progress)
        async with seconds(took, "64 streams, 8 sockets"):
            await many.run(progress)
    after = await idle(server)
    await asyncio.sleep(1)
    histories = one.histories + many.histories
    ends = Counter(_end(history) for history in histories)
    return {
        "requests": len(histories),
        "cancels_sent": one.num_cancels + many.num_cancels,
        "sockets_cut": one.num_disconnects + many.num_disconnects,
        "ends": dict(ends),
        "faults": [fault for history in histories for fault in history.faults()],
        "seconds": took,
        "before": _watched(before) | fds_before,
        "after": _watched(after) | footprint(server),
        "compiles_after_ready": after["headrace_compiles_after_ready_total"],
    }


def _watched(values: dict[str, float]) -> dict[str, float]:
    names = ("num_requests_running", "num_requests_waiting", "kv_pages_held", "event_loop_tasks")
    return {name: values["headrace_" + name] for name in names}


def _end(history: History) -> str:
    if history.is_lost:
        return "unknown (socket cut)"
    terminal = history.terminals[-1]
    if terminal["type"] == "error":
        return "error " + str(terminal["error"]["code"])
    return str(terminal["choices"][0]["finish_reason"])


def main() -> int:
    parser = evidence.arguments(__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    options = ("--max-streams", "16", "--context", "1024")
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(Path(folder) / "log", "smollm2-135m", *options)
        try:
            found = asyncio.run(run(server, args.requests, args.seed))
        finally:
            exit_code = server.stop()
    errors = [end for end in found["ends"] if end.startswith("error")]
    passed = (
        not found["faults"]
        and not errors
        and found["before"] == found["after"]
        and found["compiles_after_ready"] == 0
        and exit_code == 0
    )
    return evidence.write(args.out, passed, options=options, seed=args.seed, server_exit_code=exit_code, **found)


if __name__ == "__main__":
    raise SystemExit(main())
