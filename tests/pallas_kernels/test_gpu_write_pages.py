"""Page writes on GPU against the reference, over a pool of NaN. That they happen in place is tests/aot's."""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest

from headrace.pallas_kernels import api
from headrace.pallas_kernels.paged_attention.cases import AttentionCase
from headrace.pallas_kernels.paged_attention.inputs import make_inputs, poisoned
from headrace.pallas_kernels.types import Kernels
from headrace.pallas_kernels.write_pages.cases import CASES
from tests.pallas_kernels.gpu_interpreter import GPU

pytestmark = pytest.mark.usefixtures("quick_compiles")

ALL_CASES = [
    replace(case, name=f"{case.name}, {dtype}", kv_dtype=dtype)
    for case in CASES
    for dtype in ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")
]


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.name)
def test_leaves_the_same_pool_as_the_reference(case: AttentionCase) -> None:
    inputs = make_inputs(case, seed=1)
    pool = poisoned(case, inputs)

    def write(kernels: Kernels) -> tuple[np.ndarray, ...]:
        call = jax.jit(functools.partial(api.write_pages, kernels=kernels))
        leaves = jax.tree.leaves(call(inputs.new, pool, inputs.first_row, inputs.batch.meta))
        # Padding rows meet in the null page in an order that nothing fixes.
        return tuple(np.delete(np.asarray(leaf), inputs.first_row, axis=0) for leaf in leaves)

    written, expected = write(GPU), write(Kernels())
    before = tuple(np.delete(leaf, inputs.first_row, axis=0) for leaf in jax.tree.leaves(pool))
    assert any((new.view(np.uint8) != old.view(np.uint8)).any() for new, old in zip(written, before, strict=True))
    for out, reference in zip(written, expected, strict=True):
        np.testing.assert_array_equal(out.view(np.uint8), reference.view(np.uint8))
