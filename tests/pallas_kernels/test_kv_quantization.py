import jax.numpy as jnp
import numpy as np
import pytest

from headrace.pallas_kernels.kv_quantization import LARGEST, to_pool
from headrace.pallas_kernels.types import UnsupportedCase

HALF_STEP = {"int8": 0.5 / 127, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}
"""Largest rounding error over the largest element: half a level, or half a step of 3 and 2 bits of mantissa."""


@pytest.mark.parametrize("dtype", HALF_STEP)
def test_what_comes_back_is_within_half_a_step(dtype: str) -> None:
    k, v = np.random.default_rng(1).standard_normal((2, 50, 3, 64), np.float32) * 10.0
    new = to_pool(jnp.asarray(k), jnp.asarray(v), jnp.dtype(dtype))
    assert new.kv_TKC.dtype == dtype
    levels = np.asarray(new.kv_TKC, np.float32).reshape(50, 3, 2, 64)
    back = levels * np.asarray(new.scale_TK2)[..., None]
    both = np.stack([k, v], axis=2)
    error = np.abs(back - both).max(axis=-1) / np.abs(both).max(axis=-1)
    assert error.max() <= HALF_STEP[dtype] * 1.001
    np.testing.assert_array_equal(np.abs(levels).max(axis=-1), LARGEST[jnp.dtype(dtype)])


@pytest.mark.parametrize("dtype", HALF_STEP)
def test_a_token_of_zeros_stays_zero(dtype: str) -> None:
    new = to_pool(jnp.zeros((2, 1, 8)), jnp.ones((2, 1, 8)), jnp.dtype(dtype))
    assert (np.asarray(new.kv_TKC, np.float32)[..., :8] == 0).all()
    np.testing.assert_array_equal(np.asarray(new.scale_TK2)[..., 0], 0)
    assert np.isfinite(new.scale_TK2).all()


def test_wide_types_have_no_scale() -> None:
    new = to_pool(jnp.ones((2, 1, 8)), jnp.zeros((2, 1, 8)), jnp.dtype(jnp.bfloat16))
    assert new.kv_TKC.dtype == jnp.bfloat16
    assert new.scale_TK2 is None


def test_other_types_are_refused() -> None:
    with pytest.raises(UnsupportedCase, match="a KV pool of int16"):
        to_pool(jnp.ones((2, 1, 8)), jnp.zeros((2, 1, 8)), jnp.dtype(jnp.int16))
