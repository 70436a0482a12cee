"""Every quantized type of GGUF as integers, scales and offsets: they come to the gguf package's bits."""

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.model.gguf_groups import Groups, groups_of
from headrace.model.quant_form import GGUF_FORMS, VALUES
from tests.model.ggml_blocks import FLOAT16_AT, random_blocks

Kind = gguf.GGMLQuantizationType


def theirs(raw: np.ndarray, kind: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.dequantize(raw, Kind[kind]).reshape(-1)


def ours(groups: Groups) -> np.ndarray:
    with np.errstate(all="ignore"):
        x = groups.values.astype(np.float32) * groups.scale.astype(np.float32)[:, None]
        if groups.offset is not None:
            x = x + groups.offset.astype(np.float32)[:, None]
    return x.reshape(-1)


@pytest.mark.parametrize("kind", GGUF_FORMS)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), blocks=st.integers(1, 40))
def test_groups_come_to_the_very_bits(kind: str, seed: int, blocks: int) -> None:
    """Of any bytes, so with factors that are subnormal or huge too. Where it is NaN, so is ours, of any bits."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[Kind[kind]]
    raw = np.random.default_rng(seed).integers(0, 256, (blocks, block_bytes), np.uint8)
    expected, groups = theirs(raw, kind), groups_of(raw.reshape(-1), kind)
    found = ours(groups)
    is_nan = np.isnan(expected)
    assert np.array_equal(np.isnan(found), is_nan)
    assert np.array_equal(found.view(np.uint32)[~is_nan], expected.view(np.uint32)[~is_nan])
    assert groups.num_not_finite() == np.count_nonzero(~np.isfinite(expected))


@pytest.mark.parametrize("kind", GGUF_FORMS)
def test_groups_are_of_the_form(kind: str) -> None:
    """And every value of it is used: a narrower form would not do."""
    form = GGUF_FORMS[kind]
    groups = groups_of(random_blocks(np.random.default_rng(1), kind, 200).reshape(-1), kind)
    assert groups.values.dtype == np.int8 and groups.values.shape[1] == form.group
    assert (groups.offset is not None) == form.is_affine
    assert all(x.dtype == form.scale_dtype for x in (groups.scale, groups.offset) if x is not None)
    low, high = groups.values.min(), groups.values.max()
    assert np.array_equal(groups.values.astype(VALUES[form.values]).astype(np.int8), groups.values)
    assert (low, high) == {
        "Q4_0": (-8, 7), "Q4_1": (0, 15), "Q5_0": (-16, 15), "Q5_1": (0, 31), "Q8_0": (-128, 127), "Q2_K": (0, 3),
        "Q3_K": (-4, 3), "Q4_K": (0, 15), "Q5_K": (0, 31), "Q6_K": (-32, 31), "MXFP4": (-12, 12),
    }[kind]  # fmt: skip


@pytest.mark.parametrize("kind", [kind for kind in GGUF_FORMS if FLOAT16_AT[kind]])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_counted(kind: str, bad: float) -> None:
    size, _ = gguf.GGML_QUANT_SIZES[Kind[kind]]
    for at in FLOAT16_AT[kind]:
        raw = random_blocks(np.random.default_rng(2), kind, 5)
        raw[3, at : at + 2] = np.array([bad], np.float16).view(np.uint8)
        groups = groups_of(raw.reshape(-1), kind)
        assert groups.num_not_finite() == np.count_nonzero(~np.isfinite(theirs(raw, kind))) > size // 2


def test_products_beyond_float32_are_counted_too() -> None:
    raw = random_blocks(np.random.default_rng(3), "MXFP4", 4)
    raw[:, 0] = (0, 252, 253, 255)
    expected = np.count_nonzero(~np.isfinite(theirs(raw, "MXFP4")))
    assert groups_of(raw.reshape(-1), "MXFP4").num_not_finite() == expected > 0
