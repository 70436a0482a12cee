"""The Triton back end is to leave JAX: without any gpu*.py the package must import and its reference be right."""

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "pallas_kernels"
WITHOUT_GPU = """
import functools, sys, types

package = types.ModuleType("headrace")
package.__path__ = [sys.argv[1]]
sys.modules["headrace"] = package

import jax, numpy as np
from headrace.pallas_kernels import api
from headrace.pallas_kernels.paged_attention.cases import SMOLLM2, AttentionCase
from headrace.pallas_kernels.paged_attention.inputs import expected, make_inputs, poisoned
from headrace.pallas_kernels.tolerances import relative_error, tolerance
from headrace.pallas_kernels.types import GroupQuant, Implementation, Kernels, UnsupportedCase

assert api.__file__.startswith(sys.argv[1])
case = AttentionCase(name="mixed", **SMOLLM2, decode_lens=(17, 0), segments=((16, 20),), kv_dtype="int8")
inputs = make_inputs(case, seed=3)
pool, meta, gpu = poisoned(case, inputs), inputs.batch.meta, Kernels(implementation=Implementation.GPU, chip="h100")
attend = jax.jit(functools.partial(api.paged_attention, spec=inputs.spec, kernels=Kernels()))
out, _ = attend(inputs.q_TNH, inputs.new, pool, inputs.first_row, meta)
out = np.asarray(out)[[token for token, _, _ in inputs.batch.rows]]
assert relative_error(out, expected(case, inputs)) < tolerance("float32")

x, weight = np.ones((2, 4), np.float32), GroupQuant(np.ones((4, 2), np.int8), np.ones((1, 2), np.float32))
for call in (
    lambda: api.paged_attention(inputs.q_TNH, inputs.new, pool, 0, meta, inputs.spec, kernels=gpu),
    lambda: api.write_pages(inputs.new, pool, 0, meta, kernels=gpu),
    lambda: api.quant_matmul(x, weight, kernels=gpu),
    lambda: api.grouped_matmul(x, np.ones((1, 4, 2), np.float32), np.array([2]), kernels=gpu),
):
    try:
        call()
    except UnsupportedCase as error:
        assert "has no gpu implementation" in error.why, error.why
    else:
        raise AssertionError("a deleted implementation ran")
print("reference alone: right")
"""


def imports(path: Path) -> Iterator[str]:
    """Dotted names, ``from a import b`` as a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_gpu_only(name: str) -> bool:
    return any(part.startswith("gpu") or part in ("triton", "plgpu") for part in name.split("."))


SHARED = [path for path in sorted(PACKAGE.rglob("*.py")) if not path.name.startswith("gpu")]


@pytest.mark.parametrize("path", SHARED, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_else_imports_a_gpu_module(path: Path) -> None:
    assert not [name for name in imports(path) if is_gpu_only(name)]


def test_the_check_sees_such_an_import() -> None:
    assert any(is_gpu_only(name) for name in imports(PACKAGE / "paged_attention" / "gpu.py"))


def test_the_reference_is_right_without_them(tmp_path: Path) -> None:
    copy = tmp_path / "pallas_kernels"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("gpu*.py", "__pycache__"))
    assert not list(copy.rglob("gpu*"))
    command = [sys.executable, "-c", WITHOUT_GPU, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "reference alone: right" in done.stdout
