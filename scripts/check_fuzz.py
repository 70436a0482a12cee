"""20,000 malformed frames, handshakes and bodies against a real server with the tiny model, from one seed.

Shows: the server lives; every connection ends with a close code from the table, every body with a typed error, never a
500 or internal_error; its memory is bounded, and nothing is left of it all; and a neighbour's greedy stream has its
known ids throughout. A case draws from the seed and its own number: --only NUMBER plays it alone and shows it.
"""

import argparse
import asyncio
import itertools
import random
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from rich.console import Console
from rich.progress import Progress

from headrace.serving.bench.stream_client import StreamClient
from scripts import evidence
from scripts.check_load import footprint, idle
from scripts.fuzz.oracle import Wrong
from scripts.fuzz.play import ANSWER_S, StreamPlayer, play_frames, play_handshake, play_http
from tests.live import LiveServer, start_server
from tests.raw_websocket import Lost

KINDS = ("frames", "handshake", "http", "stream")
WEIGHTS = (45, 5, 25, 25)
WORKERS = 6
KEPT_FAULTS = 20
MEMORY_LIMIT = 64 << 20
"""Growth of the processes together, from the end of the first tenth of the cases on."""
PROMPTS = ("the mill wheel turns", "Grüße", "a")
NEIGHBOUR_TOKENS = 96
OPTIONS = ("--max-streams", "8", "--context", "512")


@dataclass(slots=True)
class Found:
    ends: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    faults: list[dict[str, object]] = field(default_factory=list)
    num_faults: int = 0
    rss: list[tuple[int, int]] = field(default_factory=list)
    """(cases done, bytes of all processes)."""


class Neighbour:
    """Asks for the same greedy texts again and again, and compares their ids."""

    def __init__(self, server: LiveServer) -> None:
        self._url = server.stream_url
        self._known: dict[str, list[int]] = {}
        self.streams = 0
        self.differences: list[str] = []
        self.longest_s = 0.0

    async def learn(self) -> None:
        """Before anything else runs; each text twice, since an answer that varies shows nothing."""
        async with StreamClient(self._url) as client:
            for prompt in PROMPTS:
                first, second = [await self._ids(client, f"{prompt[:1]}{i}x", prompt) for i in range(2)]
                if first != second or len(first) != NEIGHBOUR_TOKENS:
                    raise SystemExit(f"the neighbour's text is not repeatable: {first} {second}")
                self._known[prompt] = first

    async def run(self) -> None:
        async with StreamClient(self._url) as client:
            for number in itertools.count():
                prompt = PROMPTS[number % len(PROMPTS)]
                started_s = time.monotonic()
                try:
                    ids = await asyncio.wait_for(self._ids(client, f"n{number}", prompt), ANSWER_S)
                except TimeoutError:
                    ids = []
                self.longest_s = max(self.longest_s, time.monotonic() - started_s)
                self.streams += 1
                if ids != self._known[prompt]:
                    self.differences.append(f"stream {number}: {len(ids)} ids, not those of {prompt!r}")
                    if client.close_code is not None:
                        return

    async def _ids(self, client: StreamClient, name: str, prompt: str) -> list[int]:
        name = "".join(char for char in name if char.isascii() and char.isalnum())
        body = {
            "prompt": prompt, "max_tokens": NEIGHBOUR_TOKENS, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        history = await client.create(name, "completion", body)
        await history.ended.wait()
        faults = history.faults()
        client.forget(history)
        return [] if faults else [i for _, frame in history.of_type("delta") for i in frame["token_ids"]]


class Fuzz:
    """Cases from a seed, by a few workers at once."""

    def __init__(self, server: LiveServer, seed: int, num_cases: int) -> None:
        self._server, self._seed, self._num_cases = server, seed, num_cases
        self._port = int(server.url.rsplit(":", 1)[1])
        self._numbers = iter(range(num_cases))
        self._done = 0
        self.found = Found()

    async def run(self, progress: Progress) -> None:
        bar = progress.add_task(f"fuzzing, seed {self._seed}", total=self._num_cases)
        await asyncio.gather(*(self._work(progress, bar) for _ in range(WORKERS)))

    async def _work(self, progress: Progress, bar: object) -> None:
        player = StreamPlayer(self._port)
        for number in self._numbers:
            await self.play(number, player)
            self._done += 1
            progress.advance(bar)
            if self._done % max(1, self._num_cases // 200) == 0:
                self.found.rss.append((self._done, sum(rss_of(self._server).values())))
        await player.close()

    async def play(self, number: int, player: StreamPlayer) -> tuple[str, str, list[bytes]]:
        """One case; its kind, how it ended, and what was sent."""
        rng = random.Random(f"{self._seed}/{number}")
        kind = rng.choices(KINDS, WEIGHTS)[0]
        ways: dict[str, Callable[[list[bytes]], Awaitable[str]]] = {
            "frames": lambda sent: play_frames(self._port, rng, sent),
            "handshake": lambda sent: play_handshake(self._port, rng, sent),
            "http": lambda sent: play_http(self._port, rng, sent),
            "stream": lambda sent: player.play(rng, sent),
        }
        sent: list[bytes] = []
        try:
            end = await asyncio.wait_for(ways[kind](sent), 2 * ANSWER_S)
        except (Wrong, Lost, OSError, TimeoutError) as error:
            end = f"FAULT {type(error).__name__}"
            self.found.num_faults += 1
            if len(self.found.faults) < KEPT_FAULTS:
                shown = b"".join(sent)
                self.found.faults.append(
                    {
                        "case": number,
                        "kind": kind,
                        "what": f"{type(error).__name__}: {error}",
                        "sent": repr(shown[:600]),
                    }
                )
        self.found.ends[kind][end] += 1
        return kind, end, sent


def rss_of(server: LiveServer) -> dict[str, int]:
    """Resident bytes by process: edge first."""
    root = psutil.Process(server.process.pid)
    return {
        " ".join(p.cmdline()[-3:]) + f" {p.pid}": p.memory_info().rss for p in (root, *root.children(recursive=True))
    }


async def run(server: LiveServer, args: argparse.Namespace, console: Console) -> dict[str, object]:
    fuzz = Fuzz(server, args.seed, args.cases)
    if args.only is not None:
        player = StreamPlayer(int(server.url.rsplit(":", 1)[1]))
        kind, end, sent = await fuzz.play(args.only, player)
        await player.close()
        console.print(f"case {args.only}: {kind}, {end}", *map(repr, sent), sep="\n", markup=False)
        return {"faults": fuzz.found.faults, "only": args.only}
    neighbour = Neighbour(server)
    await neighbour.learn()
    engine = server.engine.pid
    await asyncio.sleep(1)  # what the start and the first streams opened is closed again
    before, places_before = await idle(server), footprint(server)
    started_s = time.monotonic()
    beside = asyncio.create_task(neighbour.run())
    with Progress(console=console) as progress:
        await fuzz.run(progress)
    took_s = time.monotonic() - started_s
    beside.cancel()
    await asyncio.wait((beside,))
    await asyncio.sleep(2)
    after, places_after = await idle(server), footprint(server)
    found = fuzz.found
    warm = [rss for done, rss in found.rss if done >= args.cases / 10] or [0]
    watched = ("num_requests_running", "num_requests_waiting", "kv_pages_held", "event_loop_tasks", "ws_connections")
    left = {
        name: (before["headrace_" + name], after["headrace_" + name])
        for name in watched
        if before["headrace_" + name] != after["headrace_" + name]
    }
    return {
        "seed": args.seed,
        "cases": args.cases,
        "seconds": round(took_s, 1),
        "ends": {kind: dict(ends.most_common()) for kind, ends in sorted(found.ends.items())},
        "num_faults": found.num_faults,
        "faults": found.faults,
        "same_engine": engine == server.engine.pid,
        "neighbour": {
            "streams": neighbour.streams,
            "tokens_each": NEIGHBOUR_TOKENS,
            "differences": neighbour.differences[:5],
            "longest_s": round(neighbour.longest_s, 2),
        },
        "memory": {"after_a_tenth": warm[0], "most_after": max(warm), "limit_of_growth": MEMORY_LIMIT},
        "left_over": left,
        "footprint": {"before": places_before, "after": places_after},
        "compiles_after_ready": after["headrace_compiles_after_ready_total"],
    }


def verdict(found: dict[str, object], exit_code: int) -> bool:
    if "only" in found:
        return not found["faults"]
    memory, neighbour, places = found["memory"], found["neighbour"], found["footprint"]
    return (
        exit_code == 0
        and not found["num_faults"]
        and found["same_engine"] is True
        and not neighbour["differences"]  # type: ignore[index]
        and neighbour["streams"] > 0  # type: ignore[index]
        and memory["most_after"] - memory["after_a_tenth"] < MEMORY_LIMIT  # type: ignore[index]
        and not found["left_over"]
        and places["before"] == places["after"]  # type: ignore[index]
        and found["compiles_after_ready"] == 0
    )


def tracebacks_in(log: str) -> Counter[str]:
    """The last line of each traceback, with the line that was logged before it: no client may cause one."""
    found: Counter[str] = Counter()
    before, is_inside = "", False
    for line in log.splitlines():
        if line.startswith("Traceback"):
            is_inside = True
        elif is_inside and line and not line.startswith(" "):
            found[f"{before[:200]} | {line[:200]}"] += 1
            is_inside = False
        if not is_inside:
            before = line
    return found


def main() -> int:
    parser = evidence.arguments(__doc__)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="play this case alone")
    args = parser.parse_args()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        server = start_server(log, "tiny", *OPTIONS)
        try:
            found = asyncio.run(run(server, args, console))
        finally:
            exit_code = server.stop()
        tracebacks = tracebacks_in(log.read_text(errors="replace"))
    passed = verdict(found, exit_code) and not tracebacks
    return evidence.write(
        args.out, passed, options=OPTIONS, **found, tracebacks_in_log=dict(tracebacks), server_exit_code=exit_code
    )


if __name__ == "__main__":
    raise SystemExit(main())
