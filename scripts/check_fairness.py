"""Fairness on the real server: a greedy tenant, shares by weight, and the lowest class under a flood of the highest.

Shows: with 64 long requests of one tenant waiting, a short request of another gets its first token within twice its
time on an idle server and one step; two tenants that always have requests waiting are served in proportion to their
weights within 10%; and of requests of the lowest class one gets its first token in each two times the aging, however
many of the highest come. Nothing else may run on the machine.
"""

import asyncio
import itertools
import json
import random
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import Progress

from headrace.serving.bench.outcome import spread
from headrace.serving.bench.stream_client import Frame, History, StreamClient
from headrace.serving.bench.workload import WORDS
from headrace.serving.edge.keys import digest_line, new_key
from scripts import evidence
from tests.live import LiveServer, start_server

TENANTS = ("greedy", "small", "light", "heavy")
HEAVY_WEIGHT = 3.0
SOCKETS = 8
"""Of each tenant; requests take turns on them."""
LIMIT_S = 120.0
READY_S = 900.0
"""A cold compile."""


class Tenant:
    """Requests under one key, spread over sockets as far as needed."""

    def __init__(self, url: str, key: str, seed: int) -> None:
        self._url, self._key = url, key
        self._rng = random.Random(seed)
        self._stack = AsyncExitStack()
        self._clients: list[StreamClient] = []
        self._ids = itertools.count()

    async def __aenter__(self) -> "Tenant":
        for _ in range(SOCKETS):
            self._clients.append(await self._stack.enter_async_context(StreamClient(self._url, token=self._key)))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def ask(self, words: int, max_tokens: int, **envelope: object) -> History:
        """Start one with a prompt of its own, so that no cache helps."""
        number = next(self._ids)
        body: Frame = {
            "prompt": " ".join(self._rng.choices(WORDS, k=words)),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        return await self._clients[number % SOCKETS].create(f"r{number}", "completion", body, **envelope)

    async def wait(self, history: History) -> None:
        async with asyncio.timeout(LIMIT_S):
            await history.ended.wait()
        for client in self._clients:
            client.forget(history)

    async def stop(self) -> None:
        """Cut the connections: the server cancels what runs."""
        for client in self._clients:
            client.abort()

    async def first_token_ms(self, words: int, max_tokens: int, **envelope: object) -> float:
        history = await self.ask(words, max_tokens, **envelope)
        await self.wait(history)
        deltas = history.of_type("delta")
        if not deltas:
            raise RuntimeError(f"a request came to nothing: {history.terminals}")
        return (deltas[0][0] - history.sent_s) * 1000


class Flood:
    """Keeps a number of requests of a tenant in flight until it is stopped."""

    def __init__(self, tenant: Tenant, number: int, words: int, max_tokens: int, **envelope: object) -> None:
        self._tenant, self._shape, self._envelope = tenant, (words, max_tokens), envelope
        self._number = number
        self.histories: list[History] = []
        self.errors: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Flood":
        self._tasks = [asyncio.create_task(self._keep()) for _ in range(self._number)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        ends = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._tenant.stop()
        self.errors += [repr(end) for end in ends if isinstance(end, Exception)]
        if self.errors:
            raise RuntimeError(f"the flood was refused {len(self.errors)} times: {self.errors[0]}")

    async def _keep(self) -> None:
        while True:
            history = await self._tenant.ask(*self._shape, **self._envelope)
            self.histories.append(history)
            await self._tenant.wait(history)
            if history.terminals and history.terminals[0]["type"] == "error":
                self.errors.append(str(history.terminals[0]["error"]["message"]))
                await asyncio.sleep(0.1)

    def counted(self, start_s: float, end_s: float) -> int:
        """Tokens that came in between."""
        frames = (pair for history in self.histories for pair in history.of_type("delta"))
        return sum(int(frame["n"]) for at_s, frame in frames if start_s <= at_s < end_s)

    def gaps_ms(self, start_s: float, end_s: float) -> list[float]:
        """Between deltas of one request."""
        gaps = []
        for history in self.histories:
            times = [at_s for at_s, _ in history.of_type("delta") if start_s <= at_s < end_s]
            gaps += [(b - a) * 1000 for a, b in itertools.pairwise(times)]
        return gaps


class Bench:
    def __init__(self, server: LiveServer, keys: dict[str, str], args: Namespace, progress: Progress) -> None:
        self.server, self.keys, self.args, self.progress = server, keys, args, progress

    @asynccontextmanager
    async def tenant(self, name: str) -> AsyncIterator[Tenant]:
        async with Tenant(self.server.stream_url, self.keys[name], TENANTS.index(name) + self.args.seed) as tenant:
            yield tenant

    async def waiting(self) -> int:
        headers = {"authorization": f"Bearer {self.keys['small']}"}
        async with httpx.AsyncClient(headers=headers) as client:
            return int((await client.get(self.server.url + "/v1/load")).json()["sequences"]["waiting"])

    async def until(self, wanted: Callable[[int], bool]) -> None:
        """As to the number of requests that wait."""
        async with asyncio.timeout(LIMIT_S):
            while not wanted(await self.waiting()):
                await asyncio.sleep(0.05)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def greedy_neighbour(bench: Bench) -> dict[str, object]:
    args = bench.args
    bar = bench.progress.add_task("a short request beside a greedy tenant", total=2 * args.probes)

    async def probes(small: Tenant) -> list[float]:
        found = []
        for _ in range(args.probes):
            found.append(await small.first_token_ms(16, 4))
            bench.progress.advance(bar)
            await asyncio.sleep(args.pause_s)
        return found

    async with bench.tenant("small") as small, bench.tenant("greedy") as greedy:
        await small.first_token_ms(16, 4)
        solo = await probes(small)
        async with Flood(greedy, 64 + 4 * args.max_streams, 40, args.long_tokens) as flood:
            await bench.until(lambda waiting: waiting >= 64)
            start_s = time.monotonic()
            beside = await probes(small)
            step_ms = percentile(flood.gaps_ms(start_s, time.monotonic()), 0.95)
    limit_ms = 2 * percentile(solo, 0.9) + step_ms
    return {
        "solo": spread(solo),
        "beside": spread(beside),
        "step_p95_ms": step_ms,
        "p90_ms": {"solo": percentile(solo, 0.9), "beside": percentile(beside, 0.9), "limit": limit_ms},
        "passed": percentile(beside, 0.9) <= limit_ms,
    }


async def shares(bench: Bench) -> dict[str, object]:
    args = bench.args
    bar = bench.progress.add_task("shares by weight", total=args.share_seconds)
    async with bench.tenant("light") as light, bench.tenant("heavy") as heavy:
        number = 6 * args.max_streams
        async with Flood(light, number, 16, 64) as one, Flood(heavy, number, 16, 64) as other:
            await asyncio.sleep(args.share_seconds / 5)
            start_s = time.monotonic()
            while (passed_s := time.monotonic() - start_s) < args.share_seconds:
                bench.progress.update(bar, completed=passed_s)
                await asyncio.sleep(0.25)
            end_s = time.monotonic()
            tokens = {"light": one.counted(start_s, end_s), "heavy": other.counted(start_s, end_s)}
    wanted = HEAVY_WEIGHT / (1 + HEAVY_WEIGHT)
    share = tokens["heavy"] / max(1, sum(tokens.values()))
    return {
        "seconds": end_s - start_s,
        "tokens": tokens,
        "share_of_heavy": share,
        "wanted": wanted,
        "passed": abs(share - wanted) <= 0.1 * wanted,
    }


async def lowest_class(bench: Bench) -> dict[str, object]:
    args = bench.args
    bar = bench.progress.add_task("the lowest class under a flood of the highest", total=args.low_requests)

    async def one(tenant: Tenant) -> float:
        took_ms = await tenant.first_token_ms(16, 8, priority="low")
        bench.progress.advance(bar)
        return took_ms

    async with (
        bench.tenant("greedy") as greedy,
        bench.tenant("greedy") as flooding,
        Flood(flooding, 8 * args.max_streams, 16, 64, priority="high") as flood,
    ):
        await bench.until(lambda waiting: waiting >= 2 * args.max_streams)
        start_s = time.monotonic()
        took = await asyncio.gather(*(one(greedy) for _ in range(args.low_requests)))
        tokens = flood.counted(start_s, time.monotonic())
    # The class ages, two levels up to the highest, and starts anew when one of it was served.
    slack_ms = 1000 * args.aging_slack_seconds
    limits_ms = [2000 * args.aging_seconds * (i + 1) + slack_ms for i in range(len(took))]
    return {
        "low": spread(took),
        "first_token_ms": [round(ms) for ms in sorted(took)],
        "limits_ms": limits_ms,
        "tokens_of_the_highest_meanwhile": tokens,
        "passed": tokens > 0 and all(ms <= limit for ms, limit in zip(sorted(took), limits_ms, strict=True)),
    }


async def measure(bench: Bench) -> dict[str, dict[str, object]]:
    found = {}
    for name, part in (("greedy", greedy_neighbour), ("shares", shares), ("lowest_class", lowest_class)):
        found[name] = await part(bench)
        bench.progress.console.print(f"{name}: {found[name]}", highlight=False)
        await bench.until(lambda waiting: waiting == 0)
    return found


def arguments() -> Namespace:
    parser = evidence.arguments(__doc__ or "")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--max-streams", type=int, default=8)
    parser.add_argument(
        "--probes", type=int, default=40, help="short requests, on the idle server and beside the flood"
    )
    parser.add_argument("--pause-s", type=float, default=0.25, help="between two of them")
    parser.add_argument("--long-tokens", type=int, default=800, help="of each greedy request")
    parser.add_argument("--share-seconds", type=float, default=30.0)
    parser.add_argument("--low-requests", type=int, default=4)
    parser.add_argument("--aging-seconds", type=float, default=10.0, help="of the server: a wait that lifts by a class")
    parser.add_argument("--aging-slack-seconds", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> int:
    args = arguments()
    keys = {name: new_key() for name in TENANTS}
    with tempfile.TemporaryDirectory() as folder, Progress(console=Console(stderr=True)) as progress:
        key_file, tenant_file = Path(folder) / "keys", Path(folder) / "tenants.toml"
        key_file.write_text("".join(digest_line(name, key) + "\n" for name, key in keys.items()))
        key_file.chmod(0o600)
        tenant_file.write_text(f"[tenants.heavy]\nweight = {json.dumps(HEAVY_WEIGHT)}\n")
        options = ("--max-streams", str(args.max_streams), "--context", "2048")
        files = ("--api-keys", str(key_file), "--tenants", str(tenant_file))
        server = start_server(Path(folder) / "log", args.model, *options, *files, ready_timeout_s=READY_S)
        try:
            found = asyncio.run(measure(Bench(server, keys, args, progress)))
        finally:
            exit_code = server.stop()
    passed = all(bool(part["passed"]) for part in found.values()) and exit_code == 0
    shown = {name: value for name, value in vars(args).items() if name != "out"}
    return evidence.write(args.out, passed, arguments=shown, server_exit_code=exit_code, **found)


if __name__ == "__main__":
    raise SystemExit(main())
