"""Pools that hold narrow floats as integers give the same results, bit for bit."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.pallas_kernels import api
from headrace.pallas_kernels.paged_attention.cases import FLOAT32_CASES, AttentionCase
from headrace.pallas_kernels.paged_attention.inputs import AttentionInputs, make_inputs, poisoned
from headrace.pallas_kernels.types import Implementation, Kernels, KVPool, UnsupportedCase

MIXED = next(case for case in FLOAT32_CASES if case.name == "smollm2-135m mixed, padding everywhere")
UNSIGNED = {1: np.uint8, 2: np.uint16}


def as_bits(pool: KVPool) -> KVPool:
    pages = np.asarray(pool.pages_RKWC)
    return KVPool(pages.view(UNSIGNED[pages.itemsize]), pool.scale_RK2W, bits_of=pages.dtype.name)


def attend(inputs: AttentionInputs, pool: KVPool) -> tuple[np.ndarray, KVPool]:
    run = jax.jit(lambda *arguments: api.paged_attention(*arguments, inputs.spec, kernels=Kernels()))
    out, after = run(inputs.q_TNH, inputs.new, pool, inputs.first_row, inputs.batch.meta)
    return np.asarray(out), after


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_the_same_bits(kv_dtype: str) -> None:
    case = replace(MIXED, kv_dtype=kv_dtype)
    inputs = make_inputs(case, seed=5)
    pool = poisoned(case, inputs)
    plain, plain_pool = attend(inputs, pool)
    packed, packed_pool = attend(inputs, as_bits(pool))
    real = [token for token, _, _ in inputs.batch.rows]
    assert np.isfinite(plain[real]).all()
    np.testing.assert_array_equal(packed[real], plain[real])
    assert packed_pool.dtype == plain_pool.dtype == jnp.dtype(kv_dtype)
    values = np.asarray(packed_pool.pages_RKWC).view(packed_pool.dtype)
    # NaN is NaN: XLA:CPU changes its payload on the way through float32.
    np.testing.assert_array_equal(values.astype(np.float32), np.asarray(plain_pool.pages_RKWC).astype(np.float32))


def test_they_are_for_the_reference_alone() -> None:
    case: AttentionCase = replace(MIXED, kv_dtype="bfloat16")
    inputs = make_inputs(case, seed=5)
    kernels = Kernels(implementation=Implementation.TPU, chip="v6e")
    with pytest.raises(UnsupportedCase, match="holds bfloat16 as integers"):
        api.write_pages(inputs.new, as_bits(inputs.pool), 0, inputs.batch.meta, kernels=kernels)
