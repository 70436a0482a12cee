"""Compile every kernel, and whole steps with them, by the CUDA compiler for GPUs that are not there.

``make aot-cuda`` runs this in an environment of its own. It shows that everything compiles, in place, without spills
and within the chip's shared memory; not that it is right on the device or fast: scripts/device_check.py shows that.
"""

import argparse
import functools
import importlib.metadata
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from scripts import aot_progress, evidence
from tests.aot import cuda_faults, cuda_jobs, matrix, steps, swaps, workers
from tests.aot.outcome import Outcome
from tests.aot.workers import Named

CHIPS = ("h100", "h200")
PARTS = ("matrix", "faults", "steps", "swaps")
PTXAS_PACKAGE, PTXAS_VERSION = "nvidia-cuda-nvcc-cu12", "12.9.86"


def main() -> int:
    args = _arguments()
    if args.install:
        install()
    # Workers take these over. JAX's own back end is the CPU, and XLA does not print that it finds no driver.
    os.environ |= {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    started_s = time.monotonic()
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    outcomes = {
        part: list(aot_progress.run(console, part, jobs, args.workers, workers.no_preparation))
        for part, jobs in _jobs(args).items()
    }
    for part, of_part in outcomes.items():
        if of_part:
            console.print(_table(part, of_part))
    problems = [f"{o.name}: {failing}: {what}" for of in outcomes.values() for o in of for failing, what in o.failures]
    seconds = round(time.monotonic() - started_s)
    for problem in problems:
        console.print(f"FAILED {problem[:400]}", style="red")
    console.print(f"{sum(map(len, outcomes.values()))} compilations in {seconds} s: {len(problems)} problems")
    if args.out:
        about = {"seconds": seconds, "workers": args.workers, "chips": list(args.chips), "versions": _versions()}
        sections = {part: [outcome.as_json() for outcome in of_part] for part, of_part in outcomes.items()}
        evidence.save(args.out, not problems, about=about, problems=problems, **sections)
    return 1 if problems else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=CHIPS)
    parser.add_argument("--only", type=re.compile, default=re.compile(""), help="entries and steps whose name has this")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--workers", type=int, choices=(1, 2, 3, 4), default=2, help="processes that compile")
    parser.add_argument("--install", action="store_true", help="first install the compiler into this environment")
    parser.add_argument("--out", type=Path, help="evidence file to write")
    return parser.parse_args()


def _jobs(args: argparse.Namespace) -> dict[str, list[Named]]:
    entries = [e for e in matrix.entries(tuple(args.chips)) if args.only.search(e.name)]
    copies = [s for s in swaps.swaps(args.chips) if args.only.search(s.name)]
    whole = [s for s in steps.whole_steps(tuple(args.chips)) if args.only.search(s.name)]
    jobs = {
        "matrix": [Named(name=e.name, job=functools.partial(cuda_jobs.entry, e)) for e in entries],
        "faults": [Named(name=n, job=functools.partial(cuda_jobs.fault, n)) for n in cuda_faults.FAULTS],
        "steps": [Named(name=s.name, job=functools.partial(cuda_jobs.step, s)) for s in whole],
        "swaps": [Named(name=s.name, job=functools.partial(cuda_jobs.swap, s)) for s in copies],
    }
    return {part: of_part for part, of_part in jobs.items() if part in args.parts}


def _wanted() -> dict[str, str]:
    """The compiler at the version of JAX, and ptxas; the rest of CUDA is for running, 4 GB, and stays away."""
    jax_version = importlib.metadata.version("jax")
    return {"jax-cuda12-plugin": jax_version, "jax-cuda12-pjrt": jax_version, PTXAS_PACKAGE: PTXAS_VERSION}


def install() -> None:
    """The CUDA compiler into this environment, at the version of its JAX."""
    wanted = _wanted()
    if {name: _version(name) for name in wanted} == wanted:
        return
    print("Installing the CUDA compiler (1.2 GB on disk the first time)", flush=True)
    pins = [f"{name}=={version}" for name, version in wanted.items()]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", *pins]
    if subprocess.run(pip, check=False).returncode:
        raise SystemExit("aot_cuda: pip could not install the compiler (see above)")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> dict[str, str | None]:
    return {name: _version(name) for name in _wanted()}


def _table(part: str, outcomes: Sequence[Outcome]) -> Table:
    """One row for each outcome, in the order of names."""
    table = Table("", "s", "temporaries", "kernels of ours: registers, bytes spilled, shared memory", title=part)
    for outcome in sorted(outcomes, key=lambda outcome: outcome.name):
        kernels = "; ".join(
            f"{name} {kernel.registers} / {kernel.spill_bytes} / {kernel.shared_bytes / 1024:.0f} KiB"
            for name, kernel in sorted(outcome.kernels.items())
        )
        temporary = f"{outcome.temporary_bytes / 2**20:.1f} MiB"
        style = "red" if outcome.failures else None
        table.add_row(outcome.name, f"{outcome.seconds:.1f}", temporary, kernels, style=style)
    return table


if __name__ == "__main__":
    raise SystemExit(main())
