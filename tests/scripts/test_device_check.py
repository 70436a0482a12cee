"""scripts/device_check.py, tried where there is no accelerator."""

import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from headrace.pallas_kernels.types import Kernels
from scripts import device_correctness, device_steps
from scripts.device_check import Report
from scripts.device_timing import seconds_per_call

ROOT = Path(__file__).resolve().parent.parent.parent
ONLY_THESE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in {"headrace", "msgspec", "orjson", "gguf", "tokenizers", "safetensors", "jinja2", "click",
                    "websockets", "uvicorn", "starlette", "sentencepiece", "prometheus_client", "filelock"}:
            raise ModuleNotFoundError(f"{name} is not on a bare machine", name=name)
        return None
sys.meta_path.insert(0, Refuse())
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "headrace" else find(name, *rest)
import scripts.device_check
from headrace.pallas_kernels import api
print(api.__file__)
"""


def report(seconds: float = 60) -> Report:
    return Report(deadline_s=time.monotonic() + seconds)


def test_needs_only_numpy_jax_and_flax_and_the_source_tree() -> None:
    done = subprocess.run([sys.executable, "-c", ONLY_THESE], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == ROOT / "pallas_kernels" / "api.py"


def test_names_are_unique_and_cover_every_operation() -> None:
    names = [check.name for check in device_correctness.checks(Kernels(), "float8_e4m3fn", 1, is_tiny=False)]
    assert len(set(names)) == len(names)
    assert {name.split()[0] for name in names} == {"paged_attention", "quant_matmul", "grouped_matmul"}
    assert any("float8_e4m3fn" in name for name in names)


def test_a_kernel_that_agrees_passes_and_one_that_does_not_fails() -> None:
    rows = report()
    first = next(device_correctness.checks(Kernels(), None, 1, is_tiny=True))
    rows.compare(first.name, first.run)
    rows.compare("off", lambda: (0.5, 1e-2))
    rows.compare("not a number", lambda: (float("nan"), 1e-2))
    assert [row["passed"] for row in rows.correct] == [True, False, False]
    assert not rows.passed


def test_an_error_is_a_failure_of_its_own_row() -> None:
    rows = report()

    def broken() -> tuple[float, float]:
        raise ValueError("no such layout")

    rows.compare("broken", broken)
    rows.compare("fine", lambda: (0.0, 1e-2))
    assert rows.correct[0]["error"] == "ValueError: no such layout"
    assert [row["passed"] for row in rows.correct] == [False, True]


def test_what_the_time_limit_cuts_is_not_passed() -> None:
    rows = report(seconds=-1)
    rows.compare("late", lambda: (0.0, 1e-2))
    assert rows.not_run == ["late"]
    assert not rows.passed


def test_a_whole_step_of_the_reference_agrees_with_itself() -> None:
    cfg = device_steps.TINY
    weights = device_steps.random_weights(cfg, 1)
    case = device_correctness.AttentionCase(
        name="step", num_heads=4, num_kv_heads=2, head_dim=64, page_tokens=16, decode_lens=(20, 3), segments=((0, 20),)
    )
    step = device_steps.make_step(cfg, case, weights, "int8", 1)
    assert device_steps.compare(step, Kernels(), 1) == (0.0, 0.0)


def test_seconds_grow_with_the_work() -> None:
    def run(size: int) -> float:
        w = jnp.full((size, size), 1 / size, jnp.float32)
        return seconds_per_call(lambda x, w: x @ w, jnp.ones((size, size)), w)

    small, large = run(64), run(512)
    assert np.isfinite([small, large]).all()
    assert large > 4 * small


@pytest.mark.parametrize("missing", ["--out"])
def test_says_what_is_missing(missing: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.device_check"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert missing in done.stderr
