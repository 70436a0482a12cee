"""Tiles of every form that a file can have: their shapes are known before their bytes are."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from headrace.model.group_quant import as_integers, dequantized, quantized
from headrace.model.quant_form import GGUF_FORMS, INT4_GROUPS, INT8_CHANNELS, QuantForm
from headrace.model.specs import ParamSpec, param_specs
from headrace.pallas_kernels.quant_matmul.cpu import tiles
from headrace.pallas_kernels.quant_matmul.cpu.tiles import untiled
from headrace.pallas_kernels.types import GroupQuant, UnsupportedCase
from headrace.serving.runner.tiling import tiled, tiled_shape
from tests.model.tiny import TINY

RANGES = {"int4": (-8, 7), "uint4": (0, 15), "int8": (-128, 127)}


def a_spec(form: QuantForm) -> ParamSpec:
    """Of 64 inputs; its 200 outputs are no whole tiles."""
    return replace(param_specs(replace(TINY, ffn_width=200)).layers[0].gate_DF, form=form)


def a_weight(form: QuantForm, *, is_zero: bool) -> GroupQuant:
    rng = np.random.default_rng(1)
    low, high = (0, 0) if is_zero else RANGES[form.values]
    values = as_integers(rng.integers(low, high + 1, (64, 200)).astype(np.int8), form).view(form.values_dtype)
    size = 0 if is_zero else 1
    scale, offset = (size * rng.standard_normal((2, form.num_groups(64), 200))).astype(form.scale_dtype)
    return GroupQuant(values, scale, offset if form.is_affine else None, stands_for="float32")


@pytest.mark.parametrize("form", sorted({*GGUF_FORMS.values(), INT4_GROUPS, INT8_CHANNELS}, key=str), ids=str)
@pytest.mark.parametrize("is_zero", [False, True])
def test_shapes_are_those_of_the_tiles(form: QuantForm, is_zero: bool) -> None:
    """Also where the data would fit a narrower form: weights of zeros."""
    spec, weight = a_spec(form), a_weight(form, is_zero=is_zero)
    made, shape = tiled(weight, spec), tiled_shape(spec)
    assert jax.tree.structure(made) == jax.tree.structure(shape)
    assert (made.blocks_NGU.shape, made.blocks_NGU.dtype) == (shape.blocks_NGU.shape, shape.blocks_NGU.dtype)
    assert made.bits == form.bits and made.scale_dtype == form.scale and made.shape == spec.shape
    assert dequantized(untiled(made)).tobytes() == dequantized(weight).tobytes()


def test_a_channel_of_any_length_has_tiles() -> None:
    cfg = replace(TINY, width=48, num_heads=3, num_kv_heads=1, ffn_width=40)
    spec = replace(param_specs(cfg).layers[0].down_FD, form=INT8_CHANNELS)
    weight = quantized(np.random.default_rng(2).standard_normal((40, 48), np.float32), INT8_CHANNELS, spec.dtype)
    made = tiled(weight, spec)
    assert made.blocks_NGU.shape == tiled_shape(spec).blocks_NGU.shape == (3, 2, 32 * 16 + 16 * 4)
    assert np.array_equal(dequantized(untiled(made)), dequantized(weight))


def test_factors_are_in_the_type_that_was_asked_for_or_refused() -> None:
    weight = a_weight(GGUF_FORMS["Q6_K"], is_zero=False)
    with pytest.raises(UnsupportedCase, match="factors that float16 does not hold exactly"):
        tiles.tiled(weight, scale_dtype="float16")
    assert tiles.tiled(a_weight(GGUF_FORMS["Q8_0"], is_zero=False), scale_dtype="float32").scale_dtype == "float32"
