"""Tiles hold a weight exactly, or refuse it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.pallas_kernels import api
from headrace.pallas_kernels.quant_matmul.cases import dequantized
from headrace.pallas_kernels.quant_matmul.cpu.tiles import tiled, untiled
from headrace.pallas_kernels.types import GroupQuant, Implementation, Kernels, UnsupportedCase
from tests.pallas_kernels.tiled_weights import FORMS, Form, on_device, random_weight


@st.composite
def weights(draw: st.DrawFn) -> GroupQuant:
    """Any weight that has an exact form: groups of any multiple of 16, or whole columns of any number of rows."""
    group = draw(st.sampled_from([16, 32, 48, 64, 96, 128, None]))
    k = draw(st.integers(1, 200)) if group is None else group * draw(st.integers(1, 4))
    n, layers = draw(st.integers(1, 70)), draw(st.sampled_from([None, 1, 3]))
    lead = () if layers is None else (layers,)
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    low, high = draw(st.sampled_from([(-128, 127), (-127, 127), (-8, 7), (0, 15), (0, 31), (-32, 31), (0, 0)]))
    values = rng.integers(low, high + 1, (*lead, k, n)).astype(np.int8)
    if (low, high) == (-8, 7) and draw(st.booleans()):
        values = values.astype(jnp.int4)
    dtype = draw(st.sampled_from([np.float16, np.float32, jnp.bfloat16]))
    stored = jnp.bfloat16 if dtype == jnp.bfloat16 else np.float32

    def factor() -> np.ndarray:
        size = np.exp2(rng.uniform(-20, 3, (*lead, 1 if group is None else k // group, n)))
        return (rng.standard_normal(size.shape) * size).astype(dtype).astype(stored)

    return GroupQuant(values, factor(), factor() if draw(st.booleans()) else None)


@settings(max_examples=200, deadline=None)
@given(weights())
def test_tiles_give_the_weight_back(weight: GroupQuant) -> None:
    tiles = tiled(weight)
    back = untiled(tiles)
    assert tiles.shape == weight.shape == back.shape
    np.testing.assert_array_equal(back.values_KN, np.asarray(weight.values_KN).astype(np.int8))
    np.testing.assert_array_equal(dequantized(back), dequantized(weight))


@settings(max_examples=50, deadline=None)
@given(weights().filter(lambda weight: weight.values_KN.ndim == 2), st.data())
def test_columns_are_those_of_the_weight(weight: GroupQuant, data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(0, weight.shape[1] - 1), min_size=1, max_size=4))
    kernels = Kernels(implementation=Implementation.CPU)
    out = api.columns(on_device(tiled(weight)), jnp.asarray(index, jnp.int32), kernels=kernels)
    right = np.asarray(weight.values_KN).astype(np.float32) * np.repeat(
        np.asarray(weight.scale_GN, np.float32), weight.group, axis=0
    )
    if weight.offset_GN is not None:
        right = right + np.repeat(np.asarray(weight.offset_GN, np.float32), weight.group, axis=0)
    np.testing.assert_array_equal(out, right[:, index].T)


def test_a_column_that_is_not_there() -> None:
    weight = on_device(tiled(random_weight(np.random.default_rng(0), Form(bits=8), 64, 20)))
    for index in (-1, 20):
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="outside of the 20"):
            api.columns(weight, jnp.asarray([3, index], jnp.int32), kernels=Kernels(implementation=Implementation.CPU))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_narrowest_form_is_chosen(form: Form) -> None:
    tiles = tiled(random_weight(np.random.default_rng(1), form, 96, 48))
    assert (tiles.bits, tiles.is_affine, tiles.scale_dtype) == (form.bits, form.is_affine, form.scale)
    assert tiles.group == (form.group or 32)
    assert tiles.zero == (128 if form.bits == 8 else -form.low)


def test_sizes_in_bytes() -> None:
    sizes = {
        (4, True): 320, (4, False): 288, (8, False): 544, (8, True): 576,
    }  # fmt: skip
    for (bits, is_affine), size in sizes.items():
        weight = random_weight(np.random.default_rng(1), Form(bits=bits, is_affine=is_affine), 64, 32)
        assert tiled(weight).blocks_NGU.shape == (2, 2, size)


def refused(weight: GroupQuant, **kwargs: int) -> str:
    with pytest.raises(UnsupportedCase) as caught:
        tiled(weight, **kwargs)
    return caught.value.why


def test_refusals() -> None:
    def ones(shape: tuple[int, ...], groups: int, dtype: type = np.int8) -> GroupQuant:
        return GroupQuant(np.full(shape, 9, dtype), np.ones((groups, shape[-1]), np.float32))

    assert "multiple of 16" in refused(ones((80, 8), 10))
    assert "3 scales for 80 rows" in refused(ones((80, 8), 3))
    assert "0 scales" in refused(ones((80, 8), 0))
    assert "int32" in refused(ones((32, 8), 1, np.int32))
    assert "from 9 to 9 do not fit 4 bits" in refused(ones((32, 8), 1), bits=4)
    assert "5 bits" in refused(ones((32, 8), 1), bits=5)
    assert "(0, 8)" in refused(ones((0, 8), 1))
    bad = ones((32, 8), 1)
    assert "scale that is not finite" in refused(GroupQuant(bad.values_KN, bad.scale_GN * np.nan))
    assert "offset that is not finite" in refused(GroupQuant(bad.values_KN, bad.scale_GN, bad.scale_GN * np.inf))
