"""Quantized matrices of GGUF files that stay as they are: the very weights that dequantizing gives."""

from dataclasses import replace
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.model import oracle
from headrace.model.errors import ModelFileError
from headrace.model.group_quant import dequantized, form_of
from headrace.model.init import init_weights
from headrace.model.load import load_model, open_weights
from headrace.model.quant_form import GGUF_FORMS
from headrace.model.specs import WeightScheme, param_specs, weight_bytes
from headrace.pallas_kernels.types import GroupQuant
from tests.model.ggml_blocks import READ_ONLY
from tests.model.tiny import TINY, write_gguf, write_hf

Kind = gguf.GGMLQuantizationType
UNTIED = replace(TINY, tied_embeddings=False, ffn_width=128)
WIDE = replace(TINY, width=256, ffn_width=512, num_heads=4, head_dim=64)
"""Whole blocks of 256 inputs."""


def written(tmp_path: Path, kind: str, **changes: object) -> Path:
    cfg = WIDE if kind in READ_ONLY else UNTIED
    return write_gguf(tmp_path / "m.gguf", cfg, init_weights(cfg, 3), Kind[kind], **changes)


def leaves(tree: object) -> list[np.ndarray | GroupQuant]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, GroupQuant))


@pytest.mark.parametrize("kind", GGUF_FORMS)
def test_they_come_to_the_bits_of_a_dequantized_load(tmp_path: Path, kind: str) -> None:
    """In the order of products, rotated rows put right, whatever the blocks in which a tensor is read."""
    path = written(tmp_path, kind)
    floats, kept = load_model(path), load_model(path, keeps_forms=True)
    assert kept.model_hash == floats.model_hash and kept.digests == floats.digests
    specs = jax.tree.leaves(param_specs(floats.config))
    for spec, x, y in zip(specs, leaves(floats.weights), leaves(kept.weights), strict=True):
        if len(spec.shape) == 1:
            assert np.array_equal(x, y)
            continue
        assert isinstance(y, GroupQuant) and form_of(y) == GGUF_FORMS[kind], spec.name
        w = dequantized(y)
        w = w if spec.is_product else w.T
        assert w.shape == x.shape and np.array_equal(w.copy().view(np.uint32), x.view(np.uint32)), spec.name


def test_rows_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "Q4_1")
    whole = load_model(path, keeps_forms=True)
    monkeypatch.setattr("headrace.model.weight_files.BLOCK_BYTES", 700)
    parts = load_model(path, keeps_forms=True)
    assert parts.model_hash == whole.model_hash
    for x, y in zip(jax.tree.leaves(whole.weights), jax.tree.leaves(parts.weights), strict=True):
        assert np.array_equal(x, y)


def test_forms_are_known_before_anything_is_read_and_bytes_follow(tmp_path: Path) -> None:
    path = written(tmp_path, "Q4_0", kinds={"output.weight": Kind.Q8_0, "blk.1.ffn_down.weight": Kind.F16})
    files = open_weights(path)
    assert files.forms["head_DV"] == GGUF_FORMS["Q8_0"] and files.forms["layers.1.up_DF"] == GGUF_FORMS["Q4_0"]
    assert files.forms["embed_VD"] == GGUF_FORMS["Q4_0"]
    assert "layers.1.down_FD" not in files.forms and "layers.0.attn_norm_D" not in files.forms
    assert files.types["layers.1.down_FD"] == "F16" and files.types.keys() == files.specs.keys()
    weights = load_model(path, keeps_forms=True).weights
    taken = sum(form_of(x).num_bytes(x.shape) if isinstance(x, GroupQuant) else x.nbytes for x in leaves(weights))
    assert weight_bytes(files.config, forms=files.forms) == taken < weight_bytes(files.config) // 4
    specs = files.keeping(files.forms).specs
    assert specs["layers.0.up_DF"].read_bytes == 64 * 128 + 2 * 128 * 2


def test_values_that_are_not_finite_are_refused_in_either_form(tmp_path: Path) -> None:
    path = written(tmp_path, "Q4_1")
    tensor = next(x for x in gguf.GGUFReader(path).tensors if x.name == "blk.1.attn_k.weight")
    data = bytearray(path.read_bytes())
    data[tensor.data_offset : tensor.data_offset + 2] = b"\x00\x7c"  # infinity, the scale of 32 values
    path.write_bytes(data)
    messages = []
    for keeps in (False, True):
        with pytest.raises(ModelFileError) as caught:
            load_model(path, keeps_forms=keeps)
        messages.append(str(caught.value))
    assert messages[0] == messages[1] and "'blk.1.attn_k.weight' holds 32 NaN or infinite values" in messages[0]


@pytest.mark.parametrize(("scheme", "dtype"), [(WeightScheme.BF16, jnp.bfloat16), (WeightScheme.F32, np.float32)])
def test_schemes_that_name_a_type_dequantize_to_it(tmp_path: Path, scheme: WeightScheme, dtype: type) -> None:
    path = written(tmp_path, "Q4_1")
    floats = load_model(path).weights
    for of in (np.float32, jnp.bfloat16):
        found = load_model(path, dtype=of, scheme=scheme).weights
        for x, y in zip(jax.tree.leaves(floats), jax.tree.leaves(found), strict=True):
            assert y.dtype == (dtype if x.ndim > 1 else np.float32) and np.array_equal(x.astype(y.dtype), y)


def test_forms_are_of_the_native_scheme_alone(tmp_path: Path) -> None:
    forms = open_weights(written(tmp_path, "Q4_1")).forms
    with pytest.raises(ValueError, match="forms of weights in files are of the native scheme, not of int8"):
        param_specs(UNTIED, scheme=WeightScheme.INT8, forms=forms)


def test_safetensors_hold_nothing_that_stays_quantized(tmp_path: Path) -> None:
    assert not open_weights(write_hf(tmp_path, TINY, init_weights(TINY, 1))).forms


def test_the_oracle_takes_either_form(tmp_path: Path) -> None:
    for kind, tied in (("Q4_1", False), ("Q4_K", True)):
        path = written(tmp_path, kind)
        floats, kept = load_model(path), load_model(path, keeps_forms=True)
        assert floats.config.tied_embeddings == tied
        logits = [oracle.logits_SV(x.weights, x.config, (1, 7, 90, 3)) for x in (floats, kept)]
        np.testing.assert_allclose(*logits, rtol=1e-5, atol=1e-5)
