"""Overload: a fixed trace of arrivals at the measured capacity, then at a multiple of it, then at capacity again.

Shows: goodput under overload is a stated share of goodput at capacity (interval by bootstrap), everything that is not
served is refused with a type, a hint and within 50 ms, what is accepted keeps the objective, memory does not grow, and
a few seconds after the overload the server is what it was before. Capacity is what a closed loop that keeps every row
busy was served; nothing else may run on the machine.
"""

import asyncio
import random
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import psutil
from rich.console import Console
from rich.progress import Progress

from headrace.serving.bench.make_workload import WorkloadPlan, make_workload, parse_lengths
from headrace.serving.bench.native_target import NativeTarget
from headrace.serving.bench.objective import Objective, share_interval
from headrace.serving.bench.open_loop import OpenLoop, OpenRun, OpenStanding
from headrace.serving.bench.outcome import Outcome, spread
from headrace.serving.bench.targets import Server
from headrace.serving.bench.workload_file import WorkloadFile
from scripts import evidence
from tests.live import LiveServer, start_server

SOCKETS = 32
REFUSAL_MS = 50.0
RESAMPLES = 2000
BLOCK_S = 5
"""Neighbouring seconds have a queue in common; five of them are drawn together."""
MEMORY_EVERY_S = 0.5
READY_S = 900.0
"""A cold compile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is served to whom. ttft_ms, itl_ms: the objective as clients see it; the server refuses what would take
    more than server_share of ttft_ms by its own estimate."""

    model: str
    requests: int
    max_streams: int
    prompt: str
    max_tokens: str
    ttft_ms: float
    itl_ms: float
    context: int
    server_share: float = 0.7


CASES = {
    "tiny": Case(
        model="tiny", requests=1000, max_streams=4, prompt="uniform:16:48", max_tokens="uniform:96:160",
        ttft_ms=1000, itl_ms=50, context=512,
    ),
    "smollm2-135m": Case(
        model="smollm2-135m", requests=500, max_streams=8, prompt="uniform:16:48", max_tokens="uniform:12:24",
        ttft_ms=5000, itl_ms=600, context=512,
    ),
}  # fmt: skip


class Bench:
    """One server, and the loops against it."""

    def __init__(self, case: Case, server: LiveServer, args: Namespace, progress: Progress) -> None:
        self.case, self.server, self.args, self.progress = case, server, args, progress
        self.objective = Objective(ttft_ms=case.ttft_ms, itl_ms=case.itl_ms)

    def plan(self, *phases: tuple[float, float], seed: int) -> WorkloadFile:
        return make_workload(
            WorkloadPlan(
                phases=phases,
                prompt=parse_lengths(self.case.prompt),
                max_tokens=parse_lengths(self.case.max_tokens),
                seed=seed,
            )
        )

    @asynccontextmanager
    async def target(self) -> AsyncIterator[NativeTarget]:
        async with NativeTarget(Server(base=self.server.url, limit_s=120.0), None, sockets=SOCKETS) as target:
            yield target

    async def capacity_per_s(self) -> float:
        """Answers per second of a closed loop, in its second half."""
        in_flight = self.case.max_streams + max(2, self.case.max_streams // 2)
        seconds, workload = self.args.capacity_seconds, self.plan((1000.0, 20.0), seed=self.args.seed + 99)
        bar = self.progress.add_task(f"{self.case.model}: capacity", total=seconds)
        start_s, index, ends = time.monotonic(), 0, []

        async def worker(target: NativeTarget) -> None:
            nonlocal index
            while (passed_s := time.monotonic() - start_s) < seconds:
                self.progress.update(bar, completed=passed_s)
                index += 1
                outcome = await target.ask(index, workload.body(index % len(workload.requests)))
                if outcome.error is None:
                    ends.append(outcome.ended_s - start_s)

        async with self.target() as target:
            await asyncio.gather(*(worker(target) for _ in range(in_flight)))
        self.progress.update(bar, completed=seconds)
        return sum(seconds / 2 <= end_s < seconds for end_s in ends) / (seconds / 2)

    async def run(self, title: str, workload: WorkloadFile) -> tuple[OpenRun, list[tuple[float, int]]]:
        """The run, and (seconds, bytes of all processes) while it lasted."""
        bar = self.progress.add_task(f"{self.case.model}: {title}", total=len(workload.requests))
        memory: list[tuple[float, int]] = []

        def watch(standing: OpenStanding) -> None:
            self.progress.update(bar, completed=standing.ended)

        async with self.target() as target:
            loop = OpenLoop(workload=workload, target=target, objective=self.objective, warmup=3, watch=watch)
            sampler = asyncio.create_task(_sample(self.server, memory))
            try:
                found = await loop.run()
            finally:
                sampler.cancel()
        self.progress.update(bar, completed=len(workload.requests))
        return found, [(at_s - found.start_s, size) for at_s, size in memory]

    async def load(self) -> dict[str, object]:
        async with httpx.AsyncClient() as client:
            document: dict[str, object] = (await client.get(self.server.url + "/v1/load")).json()
            return document


async def _sample(server: LiveServer, memory: list[tuple[float, int]]) -> None:
    root = psutil.Process(server.process.pid)
    processes = [root, *root.children(recursive=True)]
    while True:
        memory.append((time.monotonic(), sum(process.memory_info().rss for process in processes)))
        await asyncio.sleep(MEMORY_EVERY_S)


# Figures


def good_in_seconds(run: OpenRun, objective: Objective, start_s: float, end_s: float) -> list[int]:
    """Good answers by the second in which they ended, from start_s to end_s of the run."""
    counts = [0] * max(1, round(end_s - start_s))
    for outcome in run.outcomes:
        second = int(outcome.ended_s - run.start_s - start_s)
        if 0 <= outcome.ended_s - run.start_s - start_s < len(counts) and not objective.missed_by(outcome):
            counts[second] += 1
    return counts


def ratio_interval(over: Sequence[int], base: Sequence[int]) -> tuple[float, float, float]:
    """Of the means: the ratio, and its 95% interval by a bootstrap of blocks of BLOCK_S seconds."""
    rng = random.Random(1)

    def mean(counts: Sequence[int]) -> float:
        return sum(counts) / len(counts)

    def resampled(counts: Sequence[int]) -> float:
        number = max(1, len(counts) // BLOCK_S)
        starts = [rng.randrange(len(counts)) for _ in range(number)]
        return mean([counts[(start + i) % len(counts)] for start in starts for i in range(BLOCK_S)])

    ratios = sorted(resampled(over) / max(resampled(base), 1e-9) for _ in range(RESAMPLES))
    return mean(over) / max(mean(base), 1e-9), ratios[int(RESAMPLES * 0.025)], ratios[int(RESAMPLES * 0.975)]


def part(outcomes: Sequence[Outcome], objective: Objective) -> dict[str, object]:
    """Of the requests that arrived in one phase."""
    refused = [outcome for outcome in outcomes if outcome.is_refused]
    accepted = [outcome for outcome in outcomes if not outcome.is_refused]
    kept = [not objective.missed_by(outcome) for outcome in accepted]
    codes: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            codes[outcome.error] = codes.get(outcome.error, 0) + 1
    return {
        "offered": len(outcomes),
        "accepted": len(accepted),
        "refused": len(refused),
        "errors": codes,
        "untyped_or_failed": sum(outcome.error is not None and not outcome.is_refused for outcome in outcomes),
        "refusals_without_hint": sum(outcome.retry_after_ms is None for outcome in refused),
        "refusal": spread([(outcome.ended_s - outcome.sent_s) * 1000 for outcome in refused]),
        "retry_after": spread([outcome.retry_after_ms for outcome in refused if outcome.retry_after_ms is not None]),
        "first_token": spread([o.first_token_ms for o in accepted if o.first_token_ms is not None]),
        "good_share_of_offered": sum(kept) / max(1, len(outcomes)),
        "accepted_that_kept_the_objective": sum(kept) / max(1, len(kept)),
        "accepted_interval": share_interval(kept),
    }


def growth(memory: Sequence[tuple[float, int]], start_s: float, end_s: float) -> dict[str, float]:
    """Between the first and the last fifth of a phase, in MB: medians, since collections come in steps."""
    sizes = [size for at_s, size in memory if start_s <= at_s < end_s]
    fifth = max(1, len(sizes) // 5)
    first, last = (sorted(part)[len(part) // 2] for part in (sizes[:fifth], sizes[-fifth:]))
    return {"first_mb": first / 1e6, "last_mb": last / 1e6, "growth_mb": (last - first) / 1e6}


def planned_in(run: OpenRun, workload: WorkloadFile, start_s: float, end_s: float) -> list[Outcome]:
    return [o for o in run.outcomes if start_s <= workload.requests[o.index].at_s < end_s]


async def measure(bench: Bench) -> dict[str, object]:
    args, case, objective = bench.args, bench.case, bench.objective
    rate = args.capacity_per_s or await bench.capacity_per_s()
    base_s = max(args.seconds, case.requests / rate)
    say = bench.progress.console.print
    say(f"{case.model}: capacity {rate:.2f} requests/s; {base_s:.0f} s at it, then {args.seconds:.0f} s at a multiple")
    base_plan = bench.plan((rate, base_s), seed=args.seed)
    base_run, _ = await bench.run("at capacity", base_plan)
    say(f"{case.model}: at capacity {part(base_run.outcomes, objective)}", highlight=False)
    over_s, after_s = args.seconds, args.after_seconds
    over_plan = bench.plan((args.factor * rate, over_s), (rate, after_s), seed=args.seed + 1)
    over_run, memory = await bench.run(f"at {args.factor:g} times capacity, and after", over_plan)
    base, over = (
        good_in_seconds(base_run, objective, 0, base_s),
        good_in_seconds(over_run, objective, 0, over_s),
    )
    after_run_s = over_s + args.settle_seconds
    after = good_in_seconds(over_run, objective, after_run_s, over_s + after_s)
    ratio, after_ratio = ratio_interval(over, base), ratio_interval(after, base)
    return {
        "capacity_per_s": rate,
        "phases": {"at_capacity_s": base_s, "overload_s": over_s, "after_s": after_s},
        "goodput": {
            "at_capacity_per_s": sum(base) / len(base),
            "overload_per_s": sum(over) / len(over),
            "after_per_s": sum(after) / len(after),
            "overload_over_capacity": {"ratio": ratio[0], "interval": ratio[1:]},
            "after_over_capacity": {"ratio": after_ratio[0], "interval": after_ratio[1:]},
        },
        "at_capacity": part(base_run.outcomes, objective),
        "overload": part(planned_in(over_run, over_plan, 0, over_s), objective),
        "after": part(planned_in(over_run, over_plan, after_run_s, over_s + after_s), objective),
        "memory": growth(memory, 0, over_s),
        "workload": {"at_capacity": base_plan.hash, "overload": over_plan.hash, "description": over_plan.description},
        "load_at_the_end": await bench.load(),
    }


def judge(found: dict[str, object], args: Namespace) -> dict[str, bool]:
    over, goodput, memory = found["overload"], found["goodput"], found["memory"]
    base, after = found["at_capacity"], found["after"]
    assert isinstance(over, dict) and isinstance(goodput, dict) and isinstance(memory, dict)
    assert isinstance(base, dict) and isinstance(after, dict)
    return {
        "enough_offered_at_capacity": base["offered"] >= 0.9 * args.wanted,
        "goodput": goodput["overload_over_capacity"]["ratio"] >= args.goodput_share,
        "refusals_are_typed": over["refused"] > 0 and over["untyped_or_failed"] == 0,
        "refusals_have_hints": over["refusals_without_hint"] == 0,
        "refusals_are_quick": over["refusal"]["p99_ms"] is not None and over["refusal"]["p99_ms"] < REFUSAL_MS,
        "accepted_keep_the_objective": over["accepted_that_kept_the_objective"] >= args.kept_share,
        "memory_is_flat": memory["growth_mb"] <= args.growth_mb,
        # By shares: in a few seconds as many requests arrive as chance has it.
        "normal_after": after["good_share_of_offered"] >= args.goodput_share * base["good_share_of_offered"],
    }


def check(case: Case, args: Namespace, progress: Progress) -> dict[str, object]:
    options = (
        case.model, "--max-streams", str(case.max_streams), "--context", str(case.context),
        "--first-token-ms", str(round(case.ttft_ms * case.server_share)),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(Path(folder) / "log", *options, ready_timeout_s=READY_S)
        try:
            found = asyncio.run(measure(Bench(case, server, args, progress)))
        finally:
            exit_code = server.stop()
    bars = judge(found, Namespace(**{**vars(args), "wanted": case.requests}))
    objective = {"ttft_ms": case.ttft_ms, "itl_ms": case.itl_ms}
    return {"options": options, "objective": objective, "bars": bars, "server_exit_code": exit_code, **found}


def arguments() -> Namespace:
    parser = evidence.arguments(__doc__ or "")
    parser.add_argument("--model", choices=CASES, action="append", help="only this one; may be given twice")
    parser.add_argument("--requests", type=int, help="offered at capacity, instead of those of the case")
    parser.add_argument("--factor", type=float, default=5.0, help="of the overload")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the overload, and at least at capacity")
    parser.add_argument("--after-seconds", type=float, default=30.0, help="at capacity after the overload")
    parser.add_argument("--settle-seconds", type=float, default=5.0, help="after which all must be as before")
    parser.add_argument("--capacity-seconds", type=float, default=20.0, help="of the closed loop that finds capacity")
    parser.add_argument("--capacity-per-s", type=float, help="requests a second instead of measuring them")
    parser.add_argument("--goodput-share", type=float, default=0.9, help="of the goodput at capacity")
    parser.add_argument("--kept-share", type=float, default=0.95, help="of accepted requests within the objective")
    parser.add_argument("--growth-mb", type=float, default=16.0, help="of all processes during the overload")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> int:
    args = arguments()
    results: dict[str, dict[str, object]] = {}
    with Progress(console=Console(stderr=True)) as progress:
        for name in args.model or CASES:
            case = CASES[name]
            results[name] = check(replace(case, requests=args.requests or case.requests), args, progress)
    passed = all(all(found["bars"].values()) for found in results.values())  # type: ignore[attr-defined]
    return evidence.write(args.out, passed, factor=args.factor, seed=args.seed, models=results)


if __name__ == "__main__":
    raise SystemExit(main())
