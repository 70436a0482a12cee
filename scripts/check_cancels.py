"""10,000 random cancels and disconnects on the tiny model, over native WebSockets and HTTP, in all states of a request.

Shows: pages, slots, tasks, sockets and file descriptors return to where they were; accepted requests equal those that
ended; each stream ends once; and how many steps pass until a cancelled request's pages are free. Those are counted
where nothing else can hide them: in the engine process, from the arrival of the cancel in its inbox to the release of
the last page (scripts/watch/engine.py). 2 is what two overlapping steps cost: one that is being collected when the
cancel comes, and one that was already dispatched with the request in it. What lies before, from the client's socket to
the inbox, is in the milliseconds that the client sees until the stream's end.
"""

import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import Progress, TaskID

from headrace.serving.bench.stream_client import History, StreamClient
from scripts import evidence
from scripts.cases.figures import quantile
from scripts.check_load import footprint, idle, seconds
from tests.live import LiveServer, start_command

NUM_SOCKETS = 8
NUM_STREAMS = 20
"""A few more than run at once, so that some are cancelled while they wait."""
OPTIONS = ("--max-streams", "16", "--context", "1024", "--max-queued", "256")
LIMIT_STEPS = 2
HOLDING = "all that held pages"
MOMENTS = ("at once", "when created", "after some output", "after a while")
WEIGHTS = (1, 1, 6, 3)
WATCHED = ("num_requests_running", "num_requests_waiting", "kv_pages_held", "event_loop_tasks", "ws_connections")


@dataclass(slots=True)
class Seen:
    """too_late: cancels of streams whose end the client had seen; they do not count as acts."""

    acts: Counter[str] = field(default_factory=Counter)
    too_late: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    cancel_ms: list[float] = field(default_factory=list)
    """From the client's cancel to the end of its stream."""


class Storm:
    """Streams that are all given up, each at a moment and in a way of its own, until ``left`` were."""

    def __init__(self, server: LiveServer, num_acts: int, seed: int) -> None:
        self._server = server
        self._port = int(server.url.rsplit(":", 1)[1])
        self._rng = random.Random(seed)
        self._num_acts = num_acts
        self._clients: dict[int, StreamClient] = {}
        self._locks = [asyncio.Lock() for _ in range(NUM_SOCKETS)]
        self._live: dict[int, int] = dict.fromkeys(range(NUM_SOCKETS), 0)
        self._numbers = itertools.count()
        self.seen = Seen()

    async def run(self, progress: Progress) -> None:
        bar = progress.add_task("cancels and disconnects", total=self._num_acts)
        await asyncio.gather(*(self._stream(i % NUM_SOCKETS, progress, bar) for i in range(NUM_STREAMS)))
        for client in self._clients.values():
            await client.__aexit__()

    async def _stream(self, socket: int, progress: Progress, bar: TaskID) -> None:
        while self.seen.acts.total() < self._num_acts:
            if self._rng.random() < 0.2:
                await self._over_http()
            else:
                await self._over_websocket(socket)
            progress.update(bar, completed=min(self.seen.acts.total(), self._num_acts))

    def _request(self) -> tuple[str, str, dict[str, object]]:
        """Id, endpoint and body; no two prompts begin alike, so no page is shared."""
        number = next(self._numbers)
        prompt = f"{self._rng.getrandbits(64):016x} " * self._rng.choice((1, 1, 2, 5, 15, 30))
        body: dict[str, object] = {
            "max_tokens": self._rng.choice((1, 100, 200, 400)),
            "temperature": self._rng.choice((0, 1)),
            "ignore_eos": True,
        }
        if self._rng.random() < 0.5:
            return f"r{number}", "completion", body | {"prompt": prompt}
        return f"r{number}", "chat", body | {"messages": [{"role": "user", "content": prompt}]}

    async def _client(self, socket: int) -> StreamClient:
        async with self._locks[socket]:
            client = self._clients.get(socket)
            if client is None or client.close_code is not None:
                client = self._clients[socket] = await StreamClient(self._server.stream_url).__aenter__()
            return client

    async def _over_websocket(self, socket: int) -> None:
        client = await self._client(socket)
        name, endpoint, body = self._request()
        history = await client.create(name, endpoint, body)
        self._live[socket] += 1
        await self._wait(history)
        if self._rng.random() < 0.01:
            self.seen.acts["streams of cut sockets"] += self._live[socket]
            client.abort()
        else:
            was_over, sent_s = history.ended.is_set(), time.monotonic()
            if was_over:
                self.seen.too_late += 1
            else:
                self.seen.acts["cancels"] += 1
            await client.cancel(history.id)
            await history.ended.wait()
            if not was_over and not history.is_lost:
                self.seen.cancel_ms.append(1000 * (time.monotonic() - sent_s))
        await history.ended.wait()
        self._live[socket] -= 1
        self._close(history)
        client.forget(history)

    async def _wait(self, history: History) -> None:
        [moment] = self._rng.choices(MOMENTS, WEIGHTS)
        if moment == "when created":
            await history.started.wait()
        elif moment == "after some output":
            wanted = self._rng.randrange(1, 12)
            while len(history.frames) <= wanted and not history.ended.is_set():
                await asyncio.sleep(0.001)
        elif moment == "after a while":
            await asyncio.sleep(self._rng.random() * 0.1)

    def _close(self, history: History) -> None:
        self.seen.faults += history.faults()
        end = "unknown (socket cut)"
        if not history.is_lost:
            last = history.terminals[-1]
            end = str(last["choices"][0]["finish_reason"] if last["type"] == "done" else last["error"]["code"])
        self.seen.ends[end] += 1

    async def _over_http(self) -> None:
        """A client of server-sent events, or of a whole answer, that goes away."""
        _, endpoint, body = self._request()
        path = "/v1/chat/completions" if endpoint == "chat" else "/v1/completions"
        text = json.dumps(body | {"stream": self._rng.random() < 0.7}).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(f"{head}content-length: {len(text)}\r\n\r\n".encode() + text)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._rng.random() * 0.1):
                await reader.readexactly(self._rng.choice((1, 400, 4000)))
        if self._rng.random() < 0.5:
            writer.transport.abort()
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        self.seen.acts["HTTP clients gone"] += 1


def identity(server: LiveServer) -> dict[str, float]:
    """Requests accepted, and those that ended, by the server's own counters."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(httpx.get(server.url + "/metrics").text):
        for sample in family.samples:
            if sample.name in ("headrace_requests_accepted_total", "headrace_request_success_total"):
                found[sample.name] += int(sample.value)
    return {
        "accepted": found["headrace_requests_accepted_total"],
        "ended": found["headrace_request_success_total"],
    }


def holding(notes: list[dict[str, object]]) -> list[dict[str, object]]:
    """Of requests that held pages; for one that waits there is nothing to free."""
    return [note for note in notes if note["pages"]]


def summary(notes: list[dict[str, object]]) -> dict[str, object]:
    """Of the engine's notes: steps and ms by state."""
    found: dict[str, object] = {
        "effective": len(notes),
        "reasons": dict(Counter(str(note["reason"]) for note in notes)),
    }
    for state in ("waiting", "prefilling", "decoding", HOLDING):
        mine = holding(notes) if state == HOLDING else [note for note in notes if note["state"] == state]
        if not mine:
            continue
        steps, ms = [float(str(note["steps"])) for note in mine], [float(str(note["ms"])) for note in mine]
        found[state] = {
            "count": len(mine),
            "steps": dict(sorted(Counter(int(step) for step in steps).items())),
            "steps_p99": quantile(steps, 0.99),
            "steps_max": max(steps),
            "ms_p50": round(quantile(ms, 0.5), 2),
            "ms_p99": round(quantile(ms, 0.99), 2),
        }
    return found


async def run(server: LiveServer, num_acts: int, seed: int, console: Console) -> dict[str, object]:
    async with StreamClient(server.stream_url) as client:
        await (await client.create("first", "completion", {"prompt": "x", "max_tokens": 2})).ended.wait()
    await asyncio.sleep(1)  # what the start and the first request opened is closed again
    before, places_before = await idle(server), footprint(server)
    storm, took = Storm(server, num_acts, seed), {}
    with Progress(console=console) as progress:
        async with seconds(took, "storm"):
            await storm.run(progress)
    await asyncio.sleep(2)
    after, places_after = await idle(server), footprint(server)
    seen = storm.seen
    return {
        "seconds": took["storm"],
        "acts": dict(seen.acts),
        "cancels_behind_the_end": seen.too_late,
        "ends_on_websockets": dict(seen.ends),
        "faults": seen.faults[:20],
        "client_ms_from_cancel_to_end": {
            f"p{round(100 * share)}": round(quantile(seen.cancel_ms, share), 1) for share in (0.5, 0.99, 1.0)
        },
        "before": {name: before["headrace_" + name] for name in WATCHED} | places_before,
        "after": {name: after["headrace_" + name] for name in WATCHED} | places_after,
        "requests": identity(server),
        "compiles_after_ready": after["headrace_compiles_after_ready_total"],
    }


def main() -> int:
    parser = evidence.arguments(__doc__)
    parser.add_argument("--cancels", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        notes_path = Path(folder) / "notes"
        command = [sys.executable, "-m", "scripts.watch.serve", str(notes_path), "tiny", "--port", "0", *OPTIONS]
        server = start_command(Path(folder) / "log", command)
        try:
            found = asyncio.run(run(server, args.cancels, args.seed, Console(stderr=True)))
        finally:
            exit_code = server.stop()
        notes = [json.loads(line) for line in notes_path.read_text().splitlines()]
    until_free = summary(notes)
    requests = found["requests"]
    passed = (
        exit_code == 0
        and not found["faults"]
        and found["before"] == found["after"]
        and isinstance(requests, dict)
        and requests["accepted"] == requests["ended"]
        and bool(holding(notes))
        and quantile([float(str(note["steps"])) for note in holding(notes)], 0.99) <= LIMIT_STEPS
        and found["compiles_after_ready"] == 0
    )
    return evidence.write(
        args.out,
        passed,
        options=OPTIONS,
        seed=args.seed,
        steps_from_cancel_to_free=until_free,
        limit_steps_p99=LIMIT_STEPS,
        server_exit_code=exit_code,
        **found,
    )


if __name__ == "__main__":
    raise SystemExit(main())
