"""Kernels on a machine with a GPU or TPU: right against the reference, then their time; nothing new starts
after 330 seconds.

Needs numpy, jax and flax, and this source tree; nothing is installed and nothing is fetched. Run it from the root:

    python -m scripts.device_check --out device.json

A table and a JSON file come out. What the time limit cuts is listed as not run; the exit code is 1 where something is
wrong, failed to run, or was not run.
"""

import argparse
import dataclasses
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from scripts import device_package

device_package.provide()

from headrace.pallas_kernels.chips import chip_of  # noqa: E402 - the package is made by the line above
from headrace.pallas_kernels.types import Kernels  # noqa: E402
from scripts import device_correctness, device_speed, device_steps  # noqa: E402


@dataclasses.dataclass
class Report:
    """Rows as they come; each is printed at once. deadline_s: on the clock of time.monotonic."""

    deadline_s: float
    correct: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    timed: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    not_run: list[str] = dataclasses.field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.not_run and all(row["passed"] for row in self.correct + self.timed)

    def compare(self, name: str, run: Callable[[], tuple[float, float]]) -> None:
        row = self._guard(name, run)
        if row is None:
            return
        if "error" not in row:
            error, bound = row.pop("result")
            row |= {"relative_error": error, "bound": bound, "passed": bool(error <= bound)}
        self.correct.append(row)
        figure = f"{row['relative_error']:.1e} of {row['bound']:.1e}" if "error" not in row else row["error"]
        print(f"{'ok  ' if row['passed'] else 'FAIL'} {name}: {figure}", flush=True)

    def time(self, timing: device_speed.Timing, limits: device_speed.Limits) -> None:
        row = self._guard(timing.name, timing.run)
        if row is None:
            return
        if "error" not in row:
            seconds = row.pop("result")
            share = limits.seconds(timing.cost) / max(seconds, 1e-12)
            row |= {"microseconds": seconds * 1e6, "share_of_limit": share, "passed": True}
        self.timed.append(row)
        figure = (
            f"{row['microseconds']:10.1f} us  {row['share_of_limit']:6.1%} of the limit"
            if "error" not in row
            else row["error"]
        )
        print(f"{timing.name:<70} {figure}", flush=True)

    def _guard(self, name: str, run: Callable[[], Any]) -> dict[str, Any] | None:
        """A row with its result or its error; None where time is up."""
        if time.monotonic() > self.deadline_s:
            self.not_run.append(name)
            return None
        started = time.monotonic()
        try:
            result = run()
        except Exception as error:  # one kernel that does not run must not hide the others
            message = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
            return {"name": name, "error": message, "passed": False, "wall_s": time.monotonic() - started}
        return {"name": name, "result": result, "wall_s": time.monotonic() - started}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--seconds", type=float, default=330, help="start nothing new after this time (default 330)")
    parser.add_argument("--seed", type=int, default=None, help="of the inputs; default: from the clock")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="tiny shapes, and the reference where there is no accelerator: tries the script",
    )
    options = parser.parse_args()
    report = Report(deadline_s=time.monotonic() + options.seconds)
    seed = time.time_ns() % 2**31 if options.seed is None else options.seed
    device = jax.devices()[0]
    if device.platform == "cpu" and not options.tiny:
        print("device_check: JAX found no accelerator; --tiny tries the script with the reference", file=sys.stderr)
        return 2
    chip = None if device.platform == "cpu" else chip_of(device.device_kind)
    kernels = Kernels() if chip is None else Kernels(implementation=chip.implementation, chip=chip.name)
    print(f"{device.device_kind}, JAX {jax.__version__}, Python {platform.python_version()}, seed {seed}", flush=True)
    limits = run_checks(report, kernels, None if chip is None else chip.fp8, seed, is_tiny=options.tiny)
    document = {
        "passed": report.passed,
        "device": device.device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime()),
        "seed": seed,
        "implementation": str(kernels.implementation),
        "measured_limits": dataclasses.asdict(limits),
        "correct": report.correct,
        "timed": report.timed,
        "not_run": report.not_run,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=2) + "\n")
    wrong = sum(not row["passed"] for row in report.correct + report.timed)
    print(f"{len(report.correct)} compared, {len(report.timed)} timed, {wrong} wrong, {len(report.not_run)} not run")
    return 0 if report.passed else 1


def run_checks(report: Report, kernels: Kernels, fp8: str | None, seed: int, *, is_tiny: bool) -> device_speed.Limits:
    for check in device_correctness.checks(kernels, fp8, seed, is_tiny=is_tiny):
        report.compare(check.name, check.run)
    scale = device_speed.TINY if is_tiny else device_speed.FULL
    limits = device_speed.measure_limits(scale)
    print(f"copy {limits.copy_bytes_per_s / 1e9:.0f} GB/s, bfloat16 matmul {limits.matmul_per_s / 1e12:.1f} TFLOP/s")
    for step, timing in device_speed.step_timings(kernels, is_tiny, seed):
        report.compare(f"{timing.name}, logits", lambda step=step: step_difference(step, kernels, seed))
        report.time(timing, limits)
    for timing in device_speed.timings(kernels, fp8, scale, seed):
        report.time(timing, limits)
    return limits


def step_difference(step: device_steps.Step, kernels: Kernels, seed: int) -> tuple[float, float]:
    return device_steps.compare(step, kernels, seed)[0], device_steps.LOGIT_BOUND


if __name__ == "__main__":
    raise SystemExit(main())
