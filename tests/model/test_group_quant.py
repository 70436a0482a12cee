"""Weights rounded to int8 channels and int4 groups on the host, counted, loaded; and brought to wider forms."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from headrace.model.group_quant import dequantized as in_float32
from headrace.model.group_quant import form_of, quantized, widened
from headrace.model.init import init_weights
from headrace.model.load import load_model
from headrace.model.quant_form import GGUF_FORMS, INT4_GROUPS, QuantForm, common_form
from headrace.model.specs import ParamSpec, WeightScheme, param_specs, weight_bytes
from headrace.pallas_kernels.quant_matmul.cases import dequantized, random_weight
from headrace.pallas_kernels.quant_matmul.quantize import quantize_groups
from headrace.pallas_kernels.types import GroupQuant
from tests.model.tiny import MIXTRAL_TINY, TINY, write_hf

UNTIED = replace(TINY, tied_embeddings=False)
INT8 = WeightScheme.INT8


def a_spec(field: str = "gate_EDF") -> ParamSpec:
    return getattr(param_specs(MIXTRAL_TINY, ml_dtypes.bfloat16, INT8).layers[0], field)


def by_channel(spec: ParamSpec, values: np.ndarray) -> GroupQuant:
    assert spec.form is not None
    return quantized(values, spec.form, spec.dtype)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_host_rounds_as_the_device_does(dtype: type) -> None:
    w = random_weight(np.random.default_rng(1), (3, 96, 40)).astype(dtype)
    w[1, :, 7] = 0
    ours = by_channel(a_spec(), w)
    theirs = quantize_groups(jnp.asarray(w), 8, 96, scale_dtype=jnp.dtype(jnp.float32))
    assert (ours.values_KN.dtype, ours.scale_GN.dtype, ours.dtype) == (np.int8, np.float32, jnp.bfloat16)
    for x, y in ((ours.values_KN, theirs.values_KN), (ours.scale_GN, theirs.scale_GN)):
        assert x.shape == y.shape and x.tobytes() == np.asarray(y).tobytes()
    assert ours.group == 96 and ours.shape == (3, 96, 40) and not ours.scale_GN[1, 0, 7]


def test_the_error_is_at_most_half_a_step() -> None:
    w = random_weight(np.random.default_rng(2), (64, 32))
    quant = by_channel(a_spec("q_DX"), w)
    step = np.abs(w).max(axis=0) / 127
    assert (np.abs(dequantized(quant) - w) <= step * (0.5 + 1e-5)).all()
    assert np.abs(quant.values_KN).max(axis=0).tolist() == [127] * 32


def test_matrices_of_products_are_quantized_and_nothing_else() -> None:
    for cfg, native in ((UNTIED, {"embed_VD"}), (TINY, {"embed_VD"}), (MIXTRAL_TINY, {"embed_VD", "router_DE"})):
        for spec in jax.tree.leaves(param_specs(cfg, ml_dtypes.bfloat16, INT8)):
            field = spec.name.rsplit(".", 1)[-1]
            assert spec.is_quantized == (len(field.rsplit("_", 1)[1]) > 1 and field not in native), spec.name
    assert not any(spec.is_quantized for spec in jax.tree.leaves(param_specs(UNTIED, ml_dtypes.bfloat16)))


def test_bytes_are_those_of_values_and_factors() -> None:
    spec = a_spec()
    assert spec.scale_shape == (8, 1, 48) and spec.num_bytes == 8 * 64 * 48 + 4 * 8 * 48
    for cfg in (UNTIED, MIXTRAL_TINY):
        leaves = jax.tree.leaves(init_weights(cfg, 1, ml_dtypes.bfloat16, INT8))
        assert weight_bytes(cfg, ml_dtypes.bfloat16, INT8) == sum(x.nbytes for x in leaves)


def test_loading_quantizes_what_the_file_holds(tmp_path: Path) -> None:
    """And not what bfloat16 leaves of it."""
    weights = init_weights(UNTIED, 1)
    folder = write_hf(tmp_path, UNTIED, weights)
    model = load_model(folder, dtype=ml_dtypes.bfloat16, scheme=INT8)
    q_DX = model.weights.layers[1].q_DX
    assert isinstance(q_DX, GroupQuant) and q_DX.dtype == jnp.bfloat16
    expected = init_weights(UNTIED, 1, ml_dtypes.bfloat16, INT8)
    for x, y in zip(jax.tree.leaves(model.weights), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == y.tobytes()
    rounded = by_channel(a_spec("q_DX"), weights.layers[1].q_DX.astype(ml_dtypes.bfloat16))
    assert not np.array_equal(rounded.scale_GN, q_DX.scale_GN)
    assert model.model_hash == load_model(folder).model_hash


def test_int4_groups_are_rounded_as_the_device_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many groups are rounded at once."""
    w = random_weight(np.random.default_rng(3), (2, 96, 40))
    w[1, 32:64, 7] = 0
    theirs = quantize_groups(jnp.asarray(w), 4, 32, scale_dtype=jnp.dtype(jnp.float16))
    for block in (1 << 22, 1):
        monkeypatch.setattr("headrace.model.group_quant.BLOCK_VALUES", block)
        ours = quantized(w, INT4_GROUPS, np.dtype(np.float32))
        assert (ours.values_KN.dtype, ours.scale_GN.dtype, ours.group) == (ml_dtypes.int4, np.float16, 32)
        assert np.array_equal(ours.values_KN, np.asarray(theirs.values_KN))
        assert ours.scale_GN.tobytes() == np.asarray(theirs.scale_GN).tobytes()


def test_int4_is_of_matrices_whose_inputs_are_whole_groups() -> None:
    cfg = replace(UNTIED, ffn_width=80)
    layer = param_specs(cfg, scheme=WeightScheme.INT4).layers[0]
    assert layer.gate_DF.form == layer.q_DX.form == INT4_GROUPS and layer.q_DX.rounded_to == INT4_GROUPS
    assert layer.down_FD.form is None and layer.attn_norm_D.form is None
    assert param_specs(cfg, scheme=WeightScheme.INT4).embed_VD.form is None
    assert layer.gate_DF.num_bytes == 64 * 80 // 2 + 2 * 80 * 2


@pytest.mark.parametrize("wrong", [GGUF_FORMS["Q4_1"], replace(INT4_GROUPS, values="uint4")])
def test_no_weight_is_rounded_to_a_form_with_offsets_or_without_a_sign(wrong: QuantForm) -> None:
    with pytest.raises(ValueError, match="weights are not rounded to uint4"):
        quantized(np.ones((64, 8), np.float32), wrong, np.dtype(np.float32))


def random_of(form: QuantForm, seed: int) -> GroupQuant:
    rng = np.random.default_rng(seed)
    low, high = {"int4": (-8, 8), "uint4": (0, 16), "int8": (-128, 128)}[form.values]
    values = rng.integers(low, high, (64, 24)).astype(np.int8).astype(form.values_dtype)
    scale, offset = rng.standard_normal((2, form.num_groups(64), 24)).astype(form.scale_dtype)
    return GroupQuant(values, scale, offset if form.is_affine else None, stands_for="bfloat16")


def test_a_common_form_holds_each_of_its_forms_bit_for_bit() -> None:
    kinds = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
    for first in kinds:
        for second in kinds:
            form = common_form([GGUF_FORMS[first], GGUF_FORMS[second]])
            for kind in (first, second):
                weight = random_of(GGUF_FORMS[kind], 4)
                wide = widened(weight, form)
                assert form_of(wide) == form and wide.dtype == jnp.bfloat16
                assert in_float32(wide).tobytes() == in_float32(weight).tobytes()
    assert common_form([GGUF_FORMS["Q4_K"], GGUF_FORMS["Q6_K"]]) == QuantForm(values="int8", group=16, is_affine=True)
    assert common_form([GGUF_FORMS["Q4_0"]]) == GGUF_FORMS["Q4_0"]


def test_zeros_keep_their_sign_beside_an_offset_that_was_not_there() -> None:
    values = np.zeros((32, 2), np.int8)
    weight = GroupQuant(values, np.array([[1, -1]], np.float32))
    wide = widened(weight, QuantForm(values="int8", group=None, is_affine=True))
    assert np.signbit(in_float32(weight)[0]).tolist() == np.signbit(in_float32(wide)[0]).tolist() == [False, True]


@pytest.mark.parametrize(("own", "other"), [("Q8_0", "Q4_0"), ("Q4_1", "Q4_0"), ("Q4_K", "Q4_1"), ("Q6_K", "Q8_0")])
def test_no_weight_is_brought_to_a_narrower_form(own: str, other: str) -> None:
    with pytest.raises(ValueError, match="is not brought to"):
        widened(random_of(GGUF_FORMS[own], 5), GGUF_FORMS[other])
