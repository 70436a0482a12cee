"""Compile every kernel, and whole steps with them, by the TPU's own compiler for chips that are not there.

``make aot-tpu`` runs this in an environment with libtpu. What it shows and what it cannot is in ARCHITECTURE.md.
"""

import argparse
import functools
import os
import re
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from headrace.pallas_kernels.chips import CHIPS
from headrace.pallas_kernels.types import Implementation
from scripts import aot_progress, evidence
from tests.aot import golden, matrix, tpu, tpu_jobs
from tests.aot.decode_cost import DecodeCost, decode_cost
from tests.aot.matrix import Entry, Operation
from tests.aot.outcome import Outcome
from tests.aot.steps import whole_steps
from tests.aot.swaps import swaps
from tests.aot.tpu_faults import FAULTS
from tests.aot.workers import Named

TPUS = tuple(chip.name for chip in CHIPS.values() if chip.implementation is Implementation.TPU)
PARTS = ("matrix", "faults", "steps", "swaps")
COSTED = ("v6e decode bf16 D128 K8 W128", "v6e decode int8 D128 K8 W128")
SHOWN_BYTES = 1 << 20


def main() -> int:
    args = _arguments()
    # Workers set it too; here, where nothing is compiled, it keeps JAX from looking for a TPU.
    os.environ["JAX_PLATFORMS"] = "cpu"
    started_s = time.monotonic()
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    entries = {e.name: e for e in matrix.entries(args.chips) if "matrix" in args.parts and args.only.search(e.name)}
    found = {
        part: list(aot_progress.run(console, part, jobs, args.workers, tpu.prepare))
        for part, jobs in _jobs(args, entries).items()
    }
    counts = golden.counts_of(entries, found["matrix"])
    compared = golden.compare(counts, version("libtpu"), update=args.update)
    costs, problems = _costs(entries, found["matrix"])
    outcomes = [outcome for part in found.values() for outcome in part]
    problems += [f"{o.name}: {check}: {what}" for o in outcomes for check, what in o.failures]
    problems += compared.problems
    for part, of_part in found.items():
        if of_part:
            console.print(_table(part, of_part))
    console.print(_cost_table(costs))
    for problem in problems:
        console.print(f"FAILED {problem}", style="red")
    seconds = round(time.monotonic() - started_s)
    console.print(f"{len(outcomes)} compilations in {seconds} s: {len(problems)} problems; {compared.note}")
    if args.out:
        sections = {part: [outcome.as_json() for outcome in of_part] for part, of_part in found.items()}
        about = {"libtpu": version("libtpu"), "seconds": seconds, "workers": args.workers, "chips": list(args.chips)}
        evidence.save(
            args.out,
            not problems,
            about=about,
            problems=problems,
            golden=compared.note,
            decode_cost=[cost.as_json() for cost in costs],
            **sections,
        )
    return 1 if problems else 0


def _arguments() -> argparse.Namespace:
    def chips(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := set(names) - set(TPUS):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}; known: {', '.join(TPUS)}")
        return names

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chips", type=chips, default=TPUS, help=f"of {','.join(TPUS)}")
    parser.add_argument("--only", type=re.compile, default=re.compile(""), help="entries and steps whose name has this")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--update", action="store_true", help="write the golden bundle counts instead of comparing")
    parser.add_argument("--workers", type=int, choices=(1, 2), default=2, help="processes that compile")
    parser.add_argument("--out", type=Path, help="evidence file to write")
    return parser.parse_args()


def _jobs(args: argparse.Namespace, entries: dict[str, Entry]) -> dict[str, list[Named]]:
    jobs = {part: list[Named]() for part in PARTS}
    jobs["matrix"] = [Named(name=n, job=functools.partial(tpu_jobs.entry, e)) for n, e in entries.items()]
    if "faults" in args.parts:
        jobs["faults"] = [Named(name=name, job=functools.partial(tpu_jobs.fault, name)) for name in FAULTS]
    if "steps" in args.parts:
        steps = [step for step in whole_steps(args.chips) if args.only.search(step.name)]
        jobs["steps"] = [Named(name=step.name, job=functools.partial(tpu_jobs.step, step)) for step in steps]
    if "swaps" in args.parts:
        found = [swap for swap in swaps(args.chips) if args.only.search(swap.name)]
        jobs["swaps"] = [Named(name=swap.name, job=functools.partial(tpu_jobs.swap, swap)) for swap in found]
    return jobs


def _costs(entries: dict[str, Entry], outcomes: Sequence[Outcome]) -> tuple[list[DecodeCost], list[str]]:
    """(static costs of decode, those that pass a limit or could not be had)."""
    costs, problems = list[DecodeCost](), list[str]()
    for outcome in outcomes:
        entry = entries[outcome.name]
        if entry.operation is Operation.DECODE and entry.name in COSTED and outcome.kernels:
            try:
                costs.append(decode_cost(entry, next(iter(outcome.kernels.values()))))
            except ValueError as error:
                problems.append(f"static cost: {error}")
    problems += [f"{cost.name}: decode is above its limits" for cost in costs if not cost.passed]
    return costs, problems


def _table(part: str, outcomes: Sequence[Outcome]) -> Table:
    """One row for each outcome, in the order of names."""
    table = Table("", "s", "temporaries", "kernels: bundles of the whole and of its largest loop, spills", title=part)
    for outcome in sorted(outcomes, key=lambda outcome: outcome.name):
        kernels = "; ".join(
            f"{name} {sum(own.values())}/{max(own.values())}/{loop.spills()}"
            for name, loop in sorted(outcome.kernels.items())
            if (own := loop.own())
        )
        style = "red" if outcome.failures else None
        temporary = f"{outcome.temporary_bytes / SHOWN_BYTES:.1f} MiB"
        table.add_row(outcome.name, f"{outcome.seconds:.1f}", temporary, kernels, style=style)
    return table


def _cost_table(costs: Sequence[DecodeCost]) -> Table:
    table = Table("", "bundles", "us of bundles", "us of bytes", "ratio", "per sequence", title="static decode cost")
    for cost in costs:
        table.add_row(
            cost.name,
            str(cost.bundles),
            f"{cost.bundles_us}",
            f"{cost.bytes_us}",
            f"{cost.time_ratio:.3f}",
            f"{cost.sequence_bundles:.0f}",
            style=None if cost.passed else "red",
        )
    return table


if __name__ == "__main__":
    raise SystemExit(main())
