"""The attention kernel without XLA: sanitizers find nothing, all instruction sets and numbers of threads give the same
bits, and the driver finds what is planted."""

import subprocess
from pathlib import Path

import pytest

from headrace.pallas_kernels.native import build, instruction_sets
from tests.pallas_kernels.native.sanitized import ADDRESS, HERE, THREAD, require, run_driver

SOURCES = ["paged_attention/cpu/attend.isa.cc", "paged_attention/cpu/plan.cc", "native/team.cc", "native/cpu_features.cc"]
FAULTS = {
    "a key too many": ("Softmax(step, work, r, start - base, end - base)", "Softmax(step, work, r, start - base, end + 1 - base)"),
    "a key too few": ("Softmax(step, work, r, start - base, end - base)", "Softmax(step, work, r, start - base, end - 1 - base)"),
    "a part folded twice": ("for (int b = 0; b < parts.count; b++)", "for (int b = parts.count > 1 ? -1 : 0; b < parts.count; b++)"),
    "a sum in another order": ("for (int half = 8; half; half /= 2)", "if (kLanes == 8) for (int i = 1; i < 16; i++) lane[0] += lane[i]; else for (int half = 8; half; half /= 2)"),
    "a write behind the page": ("+ offset) * 2 * width;", "+ offset + step.page_tokens * step.kv_heads * (sequence == step.sequences - 1)) * 2 * width;"),
}  # fmt: skip


@pytest.mark.parametrize("sanitizer", [THREAD, ADDRESS])
def test_sanitizers_find_nothing(sanitizer: str) -> None:
    done = run_driver("attention_driver.cc", sanitizer, sources=SOURCES, arguments=["25"])
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "equal" in done.stdout
