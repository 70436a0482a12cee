"""Weights as int8 with a factor for each output channel: made on the host, counted, loaded."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from headrace.model.group_quant import quantized
from headrace.model.init import init_weights
from headrace.model.load import load_model
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
