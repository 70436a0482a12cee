"""The draw under sanitizers, and what its driver finds of planted mistakes."""

import shutil
from pathlib import Path

import pytest

from headrace.pallas_kernels.native import build, instruction_sets
from tests.pallas_kernels.native.sanitized import ADDRESS, THREAD, run_driver

KERNEL = "sample/cpu/draw.isa.cc"
SOURCES = ("native/team.cc", "native/cpu_features.cc", KERNEL)
FAULTS = {
    "a candidate too few": ("static_cast<float>(row.top_k)", "static_cast<float>(row.top_k + 1)"),
    "top_p of all candidates": ("mass = masses[0]", "mass += 0 * masses[0]"),
    "min_p left out": ("? ValueOf(key) : cut;", "? ValueOf(key) : -kInfinity;"),
    "the last of equal ones": ("if (largest > top)", "if (largest >= top)"),
    "a tail unseen": ("for (; i < end; i++)", "for (; i < end - 1; i++)"),
    "an overrun": ("for (int i = 0; i < count; i++) room[i]", "for (int i = 0; i <= 4 * row.size; i++) room[i]"),
}
"""What is planted in the kernel: text, and what it becomes."""


@pytest.mark.parametrize("sanitizer", [THREAD, ADDRESS])
def test_draws_of_all_forms(sanitizer: str) -> None:
    done = run_driver("sample_driver.cc", sanitizer, sources=SOURCES)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    for isa in instruction_sets.of_this_machine():
        assert f"{isa}: 400 rows are right" in done.stdout


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_mistake_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "kernels"
    for folder in ("native", "sample/cpu"):
        shutil.copytree(build.ROOT / folder, root / folder, ignore=shutil.ignore_patterns("prebuilt"))
    before, after = FAULTS[fault]
    text = (root / KERNEL).read_text()
    assert text.count(before) == 1
    (root / KERNEL).write_text(text.replace(before, after))
    monkeypatch.setattr(build, "ROOT", root)
    jobs = build.jobs
    monkeypatch.setattr(build, "jobs", lambda isas: jobs(isas, root))
    done = run_driver("sample_driver.cc", ADDRESS, sources=SOURCES)
    assert done.returncode != 0
