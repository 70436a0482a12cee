"""Run seeds of the simulator on all cores; make a failing world small enough to be pasted into a test.

    python -m scripts.simulate --seeds 20000 --seed0 0 --out evidence/simulate.json
    python -m scripts.simulate --seeds 1 --seed0 1234     one seed again
    python -m scripts.simulate --fairness 1000            worlds with a greedy tenant, and with weights and classes
    python -m scripts.simulate --isolation 1000           what one tenant's prompts show of another's

The exit code is 1 when a promise was broken.
"""

import argparse
import hashlib
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headrace.serving.core.shrinker import shrink
from headrace.serving.core.simulated_fairness import fairness
from headrace.serving.core.simulated_isolation import isolation
from headrace.serving.core.simulated_world import draw_world
from headrace.serving.core.simulator import SimulationFailure
from headrace.serving.core.world_source import world_source
from headrace.serving.engine.fake_runner import FakeRunner
from headrace.serving.engine.simulated_seed import broken_promise, run_seed, run_world
from scripts import evidence

MAX_SHOWN = 3
"""Failing seeds that are shrunk and printed; more usually fail for the same reason."""


@dataclass(frozen=True, slots=True)
class Ran:
    """One seed. broken: the text of its failure; None = all held. cpu_s: of this process."""

    seed: int
    trace_hash: str
    num_steps: int
    covered: dict[str, int]
    broken: str | None
    cpu_s: float


@dataclass(slots=True)
class Total:
    num_seeds: int = 0
    num_steps: int = 0
    cpu_s: float = 0.0
    times: Counter[str] = field(default_factory=Counter)
    worlds: Counter[str] = field(default_factory=Counter)
    largest: dict[str, int] = field(default_factory=dict)
    hashes: dict[int, str] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)

    def add(self, ran: Ran) -> None:
        self.num_seeds += 1
        self.num_steps += ran.num_steps
        self.cpu_s += ran.cpu_s
        self.times.update(ran.covered)
        self.worlds.update(ran.covered.keys())
        for name, value in ran.covered.items():
            self.largest[name] = max(value, self.largest.get(name, 0))
        self.hashes[ran.seed] = ran.trace_hash
        if ran.broken is not None:
            self.failed[ran.seed] = ran.broken

    @property
    def hash(self) -> str:
        """Over the traces of all seeds: equal on every machine and Python version."""
        lines = [f"{seed} {self.hashes[seed]}" for seed in sorted(self.hashes)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def run_one(seed: int) -> Ran:
    started_s = time.process_time()
    try:
        report = run_seed(seed)
    except SimulationFailure as failure:
        return Ran(seed, "", 0, {}, str(failure), time.process_time() - started_s)
    cpu_s = time.process_time() - started_s
    return Ran(seed, report.trace_hash, report.num_steps, dict(report.covered), None, cpu_s)


def run_fairness(seed: int) -> Ran:
    started_s = time.process_time()
    found = fairness(seed)
    figures = {
        "first token by its limit of two solo times and one step, percent": round(100 * found.first_s / found.limit_s),
        "share error, per mille": round(1e3 * found.share_error),
        "lowest class by its limit, percent": round(100 * (found.low_s or 0.0) / found.low_limit_s),
    }
    return Ran(seed, repr(found), 0, figures, "; ".join(found.broken) or None, time.process_time() - started_s)


def run_isolation(seed: int) -> Ran:
    started_s = time.process_time()
    found = isolation(seed, lambda config: FakeRunner(config, vocab_size=16))
    figures = {
        "control: tokens found by the same tenant": found.hits,
        "control: prompts that could hit": int(found.could_hit),
    }
    return Ran(seed, repr(found), 0, figures, found.broken, time.process_time() - started_s)


def run_all(seeds: range, jobs: int, one: Callable[[int], Ran], console: Console) -> Total:
    """With a progress bar on standard error."""
    total = Total()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("seeds", total=len(seeds))
        for ran in _results(seeds, jobs, one):
            total.add(ran)
            failed = f", {len(total.failed)} failed" if total.failed else ""
            progress.update(task, advance=1, description=f"seeds{failed}")
            if not console.is_terminal and total.num_seeds % 1_000 == 0:
                console.print(f"{total.num_seeds} of {len(seeds)} seeds{failed}", highlight=False)
    return total


def _results(seeds: range, jobs: int, one: Callable[[int], Ran]) -> Iterator[Ran]:
    if jobs == 1 or len(seeds) < 50:
        yield from map(one, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(one, seeds, chunksize=10)


def show_failures(total: Total, console: Console) -> list[dict[str, object]]:
    """Print the first failing seeds, each shrunk."""
    shown = []
    for seed in sorted(total.failed)[:MAX_SHOWN]:
        print(total.failed[seed])
        console.print(f"shrinking the world of seed {seed} …")
        small = shrink(draw_world(seed), broken_promise)
        source = world_source(small)
        try:
            run_world(small)
        except SimulationFailure as failure:
            broken = failure.broken
        print(f"\nThe smallest world that still breaks {broken.partition(':')[0]} ({broken}):\n\n{source}\n")
        shown.append({"seed": seed, "broken": broken, "world": source})
    return shown


def replays(seeds: range, total: Total) -> dict[str, object]:
    """One seed in a hundred again, in this process."""
    again = [seed for seed in seeds[:: max(1, len(seeds) // 100)] if seed not in total.failed]
    differing = [seed for seed in again if run_seed(seed).trace_hash != total.hashes[seed]]
    return {"seeds": len(again), "differing": differing}


def special_section(total: Total) -> dict[str, object]:
    """largest: over all seeds, of what each reports."""
    for seed in sorted(total.failed)[: 2 * MAX_SHOWN]:
        print(f"seed {seed}: {total.failed[seed]}")
    return {
        "seeds": total.num_seeds,
        "cpu_ms_per_seed": round(1e3 * total.cpu_s / max(1, total.num_seeds), 2),
        "trace_hash": total.hash,
        "failed_seeds": sorted(total.failed),
        "reasons": {seed: total.failed[seed] for seed in sorted(total.failed)[:20]},
        "largest": dict(sorted(total.largest.items())),
        "sums": dict(sorted(total.times.items())),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--seed0", type=int, default=0)
    parser.add_argument("--fairness", type=int, default=0, metavar="SEEDS")
    parser.add_argument("--isolation", type=int, default=0, metavar="SEEDS")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="evidence file to write")
    options = parser.parse_args()
    console = Console(stderr=True)
    sections: dict[str, object] = {}
    passed = True
    if options.seeds:
        seeds = range(options.seed0, options.seed0 + options.seeds)
        started_s = time.monotonic()
        total = run_all(seeds, options.jobs, run_one, console)
        seconds = time.monotonic() - started_s
        again = replays(seeds, total)
        passed &= not total.failed and not again["differing"]
        sections["worlds"] = {
            "first_seed": options.seed0,
            "seeds": total.num_seeds,
            "steps": total.num_steps,
            "seconds": round(seconds, 1),
            "jobs": options.jobs,
            "cpu_ms_per_seed": round(1e3 * total.cpu_s / max(1, total.num_seeds), 2),
            "trace_hash": total.hash,
            "replayed": again,
            "failed_seeds": sorted(total.failed),
            "shrunk": show_failures(total, console),
            "worlds_in_which": dict(sorted(total.worlds.items())),
            "times": dict(sorted(total.times.items())),
        }
    for name, one in (("fairness", run_fairness), ("isolation", run_isolation)):
        count = getattr(options, name)
        if count:
            total = run_all(range(options.seed0, options.seed0 + count), options.jobs, one, console)
            passed &= not total.failed
            sections[name] = special_section(total)
    if options.out is not None:
        return evidence.write(options.out, passed, **sections)
    for name, section in sections.items():
        assert isinstance(section, dict)
        print(name, {key: value for key, value in section.items() if key not in ("times", "worlds_in_which", "shrunk")})
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
