"""Deterministic mode: 50 requests by themselves, then in random company; every id and every bit of every logprob.

Shows: the answers of a request that runs alone = among strangers, at random times, with a cold and a warm prefix cache,
preempted by a pool of few pages, after the engine was killed and started again, and in another server that compiled its
programs afresh. For comparison the same requests in normal mode, where bits do depend on company; and what the mode
costs, from both modes by turns in the same run.
"""

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from scripts import evidence, exact_answers
from scripts.exact_answers import Answer, Company, preemption_counts, together
from tests.live import LiveServer, start_server

SERVER = ("--max-streams", "8", "--context", "640", "--chunk-tokens", "128", "--page-size", "8")
FEW_PAGES = ("--pages", "76", "--swap-memory", "256MB", "--restart-engine")
"""75 usable pages: the longest request takes 61 of them, and 8 requests take 137 on average. Short pages, so that
answers outgrow what was free when they started."""
DETERMINISTIC = ("--deterministic",)
STRANGERS = 15
CONTROLS = 10
"""Requests that are asked alone in normal mode too."""
TURNS = 2


@contextmanager
def server_of(*options: str) -> Iterator[LiveServer]:
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(Path(folder) / "log", *options, ready_timeout_s=600)
        try:
            yield server
        finally:
            server.stop()


def differing(found: Sequence[Answer], expected: Sequence[Answer]) -> dict[str, int]:
    pairs = list(zip(found, expected, strict=True))
    return {
        "ids_differ": sum(mine.ids != theirs.ids for mine, theirs in pairs),
        "logprob_bits_differ": sum(mine.bits != theirs.bits for mine, theirs in pairs),
    }


def facts(found: Sequence[Answer]) -> dict[str, int]:
    return {
        "answers_that_were_preempted": sum(answer.preemptions > 0 for answer in found),
        "preemptions": sum(answer.preemptions for answer in found),
        "answers_with_cached_tokens": sum(answer.cached_tokens > 0 for answer in found),
    }


class Check:
    """passed: of all parts so far."""

    def __init__(self, args: argparse.Namespace, progress: Progress) -> None:
        self.model, self.seed = args.model, args.seed
        self.spread_s = args.spread
        self.bodies = exact_answers.asks(args.model, args.requests, args.seed)
        self.parts: dict[str, dict[str, Any]] = {}
        self._progress = progress
        self._expected: list[Answer] = []

    def bar(self, name: str, total: int) -> Any:
        bar = self._progress.add_task(name, total=total)
        return lambda: self._progress.advance(bar)

    def compare(self, name: str, found: Sequence[Answer], **more: Any) -> None:
        self.parts[name] = differing(found, self._expected) | facts(found) | more
        self._progress.console.print(f"{name}: {self.parts[name]}", highlight=False, soft_wrap=True)

    async def few_pages(self, server: LiveServer) -> None:
        name = "alone"
        self._expected = await exact_answers.alone(server, self.bodies, self.bar(name, len(self.bodies)))
        self.parts[name] = facts(self._expected)
        for name, kill in (("company", False), ("company again", False), ("company, engine killed", True)):
            company = Company(
                server, self.model, self.seed + len(self.parts), strangers=STRANGERS, spread_s=self.spread_s
            )
            found = await company.run(self.bodies, self.bar(name, len(self.bodies)), kill=kill)
            self.compare(
                name,
                found,
                strangers=STRANGERS,
                strangers_cancelled=company.num_cancelled,
                answers_lost_and_asked_again=company.num_died,
                metrics=preemption_counts(server),
            )

    async def fresh(self, server: LiveServer) -> None:
        """Another process, which compiled everything itself; more pages, so nothing is preempted."""
        found, _ = await together(server, self.bodies, self.bar("fresh programs", len(self.bodies)))
        self.compare("another server, programs compiled afresh", found)

    async def cost(self, mode: LiveServer, normal: LiveServer) -> dict[str, Any]:
        """By turns, so that both see the same machine."""
        tokens = sum(body["max_tokens"] for body in self.bodies)
        prompts = sum(len(body["prompt"]) for body in self.bodies)
        control = self.bodies[:CONTROLS]
        by_itself = await exact_answers.alone(normal, control, self.bar("normal mode, alone", len(control)))
        advance = self.bar("by turns", 2 * TURNS * len(self.bodies))
        seconds: dict[str, list[float]] = {"deterministic": [], "normal": []}
        for _ in range(TURNS):
            for name, server in (("deterministic", mode), ("normal", normal)):
                found, took_s = await together(server, self.bodies, advance)
                seconds[name].append(round(took_s, 2))
                if name == "normal":
                    self.parts["control: normal mode, company against alone"] = differing(found[:CONTROLS], by_itself)
        medians = {name: statistics.median(of) for name, of in seconds.items()}
        return {
            "prompt_tokens": prompts,
            "output_tokens": tokens,
            "seconds": seconds,
            "output_tokens_per_s": {name: round(tokens / of, 1) for name, of in medians.items()},
            "throughput_of_deterministic_over_normal": round(medians["normal"] / medians["deterministic"], 3),
        }


def passed(parts: dict[str, dict[str, Any]]) -> bool:
    compared = [part for name, part in parts.items() if not name.startswith("control")]
    return (
        not any(part.get("logprob_bits_differ") or part.get("ids_differ") for part in compared)
        and parts["alone"]["preemptions"] == 0
        and all(parts[name]["preemptions"] > 0 for name in ("company", "company again"))
        and parts["company again"]["answers_with_cached_tokens"] > 0
        and parts["company, engine killed"]["answers_lost_and_asked_again"] > 0
    )


def main() -> int:
    parser = evidence.arguments(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--spread", type=float, default=15.0, help="seconds over which a company arrives")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--no-cost", dest="cost", action="store_false", help="leave the comparison with normal mode out"
    )
    args = parser.parse_args()
    with Progress(console=Console(stderr=True)) as progress, tempfile.TemporaryDirectory() as cache:
        check = Check(args, progress)
        with server_of(args.model, *SERVER, *DETERMINISTIC, *FEW_PAGES) as server:
            asyncio.run(check.few_pages(server))
        with server_of(args.model, *SERVER, *DETERMINISTIC, "--compile-cache", cache) as mode:
            asyncio.run(check.fresh(mode))
            cost: dict[str, Any] = {}
            if args.cost:
                with server_of(args.model, *SERVER) as normal:
                    cost = asyncio.run(check.cost(mode, normal))
    return evidence.write(
        args.out,
        passed(check.parts),
        model=args.model,
        seed=args.seed,
        requests=args.requests,
        options={"server": SERVER, "mode": DETERMINISTIC, "few pages": FEW_PAGES},
        parts=check.parts,
        cost=cost,
    )


if __name__ == "__main__":
    raise SystemExit(main())
