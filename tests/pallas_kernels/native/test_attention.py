"""The attention kernel without XLA: sanitizers find nothing, all instruction sets and numbers of threads give the same
bits, and the driver finds what is planted.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.pallas_kernels.native import build, instruction_sets
from headrace.pallas_kernels.native.compiler import BuildError, find_compiler
from tests.pallas_kernels.native.sanitized import ADDRESS, HERE, THREAD, run_driver

KERNEL, PLAN = "paged_attention/cpu/attend.isa.cc", "paged_attention/cpu/plan.cc"
SOURCES = [KERNEL, PLAN, "native/team.cc", "native/cpu_features.cc"]
SOFTMAX = "Softmax(step, work, r, start - base, end - base)"
FAULTS = {
    "a key too many": (SOFTMAX, SOFTMAX.replace("end -", "end + 1 -")),
    "a key too few": (SOFTMAX, SOFTMAX.replace("end -", "end - 1 -")),
    "a part left out": ("b < parts.count; b++", "b < parts.count - 1; b++"),
    "an instruction set of its own": ("Sum64(weight)", "Sum64(weight) * (1 + 6e-8f * kLanes)"),
    "a turn the other way": ("cos[i], -(high * sin[i]))", "cos[i], high * sin[i])"),
}
"""What is planted in the kernel: text, and what it becomes."""


@pytest.mark.parametrize("sanitizer", [THREAD, ADDRESS])
def test_sanitizers_find_nothing(sanitizer: str) -> None:
    done = run_driver("attention_driver.cc", sanitizer, sources=SOURCES, arguments=["25"])
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "equal" in done.stdout


def test_nothing_behind_the_pool_is_read() -> None:
    done = run_driver("attention_edge_driver.cc", ADDRESS, sources=SOURCES)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "done" in done.stdout


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_the_driver_finds_what_is_planted(fault: str | None, tmp_path: Path) -> None:
    root = tmp_path / "kernels"
    for folder in ("native", "paged_attention/cpu"):
        shutil.copytree(build.ROOT / folder, root / folder)
    if fault is not None:
        before, after = FAULTS[fault]
        text = (root / KERNEL).read_text()
        assert text.count(before) == 1
        (root / KERNEL).write_text(text.replace(before, after))
    done = _driven(root, tmp_path)
    assert done.returncode == (fault is not None), done.stdout
    assert ("equal" in done.stdout) == (fault is None)


def _driven(root: Path, work: Path) -> "subprocess.CompletedProcess[str]":
    try:
        compiler = find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    isas = instruction_sets.of_this_machine()
    jobs = [job for job in build.jobs(isas, root) if job.source.relative_to(root).as_posix() in SOURCES]
    has = tuple(f"-D{build.MACROS}_HAS_{isa.upper()}=1" for isa in isas)
    jobs.append(build.Job(source=HERE / "attention_driver.cc", isa=None, flags=has))
    objects = [str(work / job.object_name) for job in jobs]
    for job, out in zip(jobs, objects, strict=True):
        flags = ("-O1", "-std=c++17", "-ffp-contract=off", "-pthread", *job.flags, "-I", str(root), "-I", str(HERE))
        compiler.run((*flags, "-c", str(job.source), "-o", out), job.name)
    compiler.run((*objects, "-pthread", "-o", str(work / "driver")), "driver")
    return subprocess.run([str(work / "driver"), "40"], capture_output=True, text=True, timeout=200)
