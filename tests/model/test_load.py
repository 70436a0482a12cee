"""Loading: layouts, both formats, tied and untied heads, and what is refused."""

import math
import os
import random
from dataclasses import replace
from pathlib import Path

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest

from headrace.model.config import ModelConfig
from headrace.model.errors import ModelFileError
from headrace.model.gguf_metadata import read_gguf
from headrace.model.gguf_tensors import GGUFSource
from headrace.model.init import init_weights
from headrace.model.load import LoadedModel, load_model
from headrace.model.specs import param_specs, weight_bytes
from headrace.model.tensor_source import read_bytes
from headrace.model.weights import Weights
from tests.model.tiny import SMALLEST, TINY, hf_config, stored, write_gguf, write_hf, write_json

Kind = gguf.GGMLQuantizationType
UNTIED = replace(TINY, tied_embeddings=False)


def assert_bit_equal(a: Weights[np.ndarray], b: Weights[np.ndarray]) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape, path
        assert x.tobytes() == y.tobytes(), path


@pytest.mark.parametrize("cfg", [TINY, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_safetensors_give_back_the_weights(tmp_path: Path, cfg: ModelConfig, num_shards: int) -> None:
    weights = init_weights(cfg, seed=1)
    model = load_model(write_hf(tmp_path, cfg, weights, num_shards=num_shards))
    assert model.config == cfg
    assert_bit_equal(model.weights, weights)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["f16", "bf16"])
def test_half_precision_safetensors_are_widened_exactly(tmp_path: Path, dtype: type) -> None:
    weights = init_weights(TINY, seed=1)
    model = load_model(write_hf(tmp_path, TINY, weights, dtype=dtype))
    assert_bit_equal(model.weights, jax.tree.map(lambda x: x.astype(dtype).astype(np.float32), weights))


@pytest.mark.parametrize("cfg", [TINY, UNTIED], ids=["tied", "untied"])
def test_gguf_gives_back_the_weights(tmp_path: Path, cfg: ModelConfig) -> None:
    """Covers the row order of q and k: the writer applies llama.cpp's permutation."""
    weights = init_weights(cfg, seed=2)
    model = load_model(write_gguf(tmp_path / "m.gguf", cfg, weights, Kind.F32))
    assert model.config == replace(cfg, rms_norm_eps=float(np.float32(cfg.rms_norm_eps)))
    assert_bit_equal(model.weights, weights)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1], ids=lambda k: k.name)
def test_gguf_types_are_dequantized_as_the_gguf_package_does(tmp_path: Path, kind: Kind) -> None:
    weights = init_weights(TINY, seed=3)
    model = load_model(write_gguf(tmp_path / "m.gguf", TINY, weights, kind))
    for (spec, x), (_, loaded) in zip(stored(TINY, weights), stored(TINY, model.weights), strict=True):
        if x.ndim == 1:
            expected = x
        elif spec.is_rotated:
            half = TINY.head_dim // 2
            permuted = x.reshape(-1, 2, half, TINY.width).swapaxes(1, 2).reshape(x.shape)
            y = gguf.dequantize(gguf.quantize(permuted, kind), kind)
            expected = y.reshape(-1, half, 2, TINY.width).swapaxes(1, 2).reshape(x.shape)
        else:
            expected = gguf.dequantize(gguf.quantize(x, kind), kind)
        assert loaded.tobytes() == expected.astype(np.float32).tobytes(), spec.name
        assert np.abs(loaded - x).max() < 0.5


def test_weights_can_be_held_in_bfloat16(tmp_path: Path) -> None:
    weights = init_weights(TINY, seed=1)
    model = load_model(write_hf(tmp_path, TINY, weights), dtype=ml_dtypes.bfloat16)
    rounded = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16) if x.ndim > 1 else x, weights)
    assert_bit_equal(model.weights, rounded)
    assert sum(x.nbytes for x in jax.tree.leaves(model.weights)) == weight_bytes(TINY, ml_dtypes.bfloat16)


def test_progress_ends_at_the_total_and_never_goes_back(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    path = write_hf(tmp_path, TINY, init_weights(TINY, seed=1))
    load_model(path, progress=lambda done, total: calls.append((done, total)))
    assert len(calls) == len(jax.tree.leaves(param_specs(TINY)))
    assert calls == sorted(calls) and calls[-1] == (weight_bytes(TINY), weight_bytes(TINY))


def test_hash_is_of_contents_not_of_paths_or_shards(tmp_path: Path) -> None:
    weights = init_weights(TINY, seed=1)
    one = load_model(write_hf(tmp_path / "a", TINY, weights)).model_hash
    assert load_model(write_hf(tmp_path / "b", TINY, weights, num_shards=2)).model_hash == one
    assert len(one) == 64 and int(one, 16) > 0
    changed = weights.replace(final_norm_D=weights.final_norm_D * np.float32(1.5))
    assert load_model(write_hf(tmp_path / "c", TINY, changed)).model_hash != one
    swapped = weights.replace(layers=weights.layers[::-1])
    assert load_model(write_hf(tmp_path / "d", TINY, swapped)).model_hash != one
    other = replace(TINY, rope_theta=5e5)
    assert load_model(write_hf(tmp_path / "e", other, weights)).model_hash != one


def refused(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        load_model(path)
    assert str(caught.value) == f"{caught.value.path}: {caught.value.reason}"
    return str(caught.value)


def test_a_missing_tensor_is_named_with_its_file(tmp_path: Path) -> None:
    write_hf(tmp_path, TINY, init_weights(TINY, 1))
    write_json(tmp_path / "config.json", hf_config(replace(TINY, num_layers=3)))
    text = refused(tmp_path)
    assert text.startswith(f"{tmp_path}: tensor 'model.layers.2.") and text.endswith("is missing")


def test_an_extra_tensor_is_named_with_its_file(tmp_path: Path) -> None:
    write_hf(tmp_path, TINY, init_weights(TINY, 1))
    write_json(tmp_path / "config.json", hf_config(replace(TINY, num_layers=1)))
    text = refused(tmp_path)
    assert text.startswith(str(tmp_path / "model.safetensors")) and "'model.layers.1." in text


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    write_hf(tmp_path, TINY, init_weights(TINY, 1))
    write_json(tmp_path / "config.json", hf_config(replace(TINY, vocab_size=97)))
    text = refused(tmp_path)
    assert "'model.embed_tokens.weight'" in text and "[96, 64]" in text and "[97, 64]" in text


def test_a_head_beside_tied_embeddings_is_refused_and_a_missing_head_too(tmp_path: Path) -> None:
    write_hf(tmp_path / "a", UNTIED, init_weights(UNTIED, 1))
    write_json(tmp_path / "a" / "config.json", hf_config(TINY))
    assert "'lm_head.weight', which config.json denies with tie_word_embeddings" in refused(tmp_path / "a")
    write_hf(tmp_path / "b", TINY, init_weights(TINY, 1))
    write_json(tmp_path / "b" / "config.json", hf_config(UNTIED))
    assert "tensor 'lm_head.weight' is missing" in refused(tmp_path / "b")


def test_unsupported_ggml_types_are_named(tmp_path: Path) -> None:
    cfg = replace(TINY, width=32 * 8, ffn_width=256, num_heads=4, head_dim=64, num_kv_heads=4)
    path = write_gguf(tmp_path / "m.gguf", cfg, init_weights(cfg, 1), Kind.TQ2_0)
    assert "type TQ2_0, which is not supported; supported: F32, F16, BF16, Q4_0, " in refused(path)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_refused(tmp_path: Path, bad: float) -> None:
    weights = init_weights(TINY, 1)
    weights.layers[1].up_DF[3, 5] = bad
    expected = "holds 1 NaN or infinite values of 6144"
    assert f"'model.layers.1.mlp.up_proj.weight' {expected}" in refused(write_hf(tmp_path, TINY, weights))
    assert f"'blk.1.ffn_up.weight' {expected}" in refused(write_gguf(tmp_path / "m.gguf", TINY, weights, Kind.F32))


def test_a_scale_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", TINY, init_weights(TINY, 1), Kind.Q4_1)
    tensor = read_gguf(path).tensors["blk.0.ffn_gate.weight"]
    data = bytearray(path.read_bytes())
    data[tensor.offset : tensor.offset + 2] = np.float16(math.nan).tobytes()
    path.write_bytes(data)
    assert "'blk.0.ffn_gate.weight' holds 32 NaN or infinite values" in refused(path)


def test_rope_factors_are_accepted_only_when_they_do_nothing(tmp_path: Path) -> None:
    weights = init_weights(TINY, 1)
    plain = load_model(write_gguf(tmp_path / "plain.gguf", TINY, weights, Kind.F32))
    ones = np.ones(TINY.head_dim // 2, np.float32)
    model = load_model(write_gguf(tmp_path / "a.gguf", TINY, weights, Kind.F32, extra={"rope_freqs.weight": ones}))
    assert model.model_hash == plain.model_hash
    path = write_gguf(tmp_path / "b.gguf", TINY, weights, Kind.F32, extra={"rope_freqs.weight": ones * 8})
    assert "'rope_freqs.weight' scales the rotary positions" in refused(path)
    path = write_gguf(tmp_path / "c.gguf", TINY, weights, Kind.F32, extra={"blk.0.attn_q.bias": ones})
    assert "holds tensor 'blk.0.attn_q.bias', which this model does not have" in refused(path)


def test_inverse_frequencies_are_ignored(tmp_path: Path) -> None:
    weights = init_weights(TINY, 1)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    assert_bit_equal(load_model(write_hf(tmp_path, TINY, weights, extra=extra)).weights, weights)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("model.bin", b"\x80\x02}q\x00.", "a pickle, which can run code"),
        ("model.pt", b"PK\x03\x04", "a pickle, which can run code"),
        ("model.safetensors", b"\0" * 16, "give the directory"),
        ("model.gguf", b"", "not a GGUF file"),
        ("model.onnx", b"\x08\x07", "not a GGUF file"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert refused(path).startswith(f"{path}: {reason}")


def test_a_missing_path_and_a_pipe_are_refused(tmp_path: Path) -> None:
    assert refused(tmp_path / "none.gguf").endswith("no such file or directory")
    os.mkfifo(tmp_path / "pipe.gguf")
    assert refused(tmp_path / "pipe.gguf").endswith("not a regular file")


def test_a_file_that_shrinks_after_its_header_was_read_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", TINY, init_weights(TINY, 1), Kind.F32)
    tensor = GGUFSource(read_gguf(path)).tensors["blk.1.ffn_up.weight"]
    os.truncate(path, tensor.offset + tensor.num_bytes - 1)
    with pytest.raises(ModelFileError, match=r"shrank while tensor 'blk\.1\.ffn_up\.weight' was read"):
        read_bytes(tensor)


@pytest.mark.parametrize("form", ["gguf", "safetensors"])
def test_a_damaged_model_loads_finite_or_is_refused(tmp_path: Path, form: str) -> None:
    """1,000 seeded bit flips, overwritten bytes and cuts anywhere in the weights file."""
    weights = init_weights(SMALLEST, 1)
    if form == "gguf":
        path = weights_file = write_gguf(tmp_path / "m.gguf", SMALLEST, weights, Kind.Q8_0)
    else:
        path = write_hf(tmp_path, SMALLEST, weights)
        weights_file = path / "model.safetensors"
    data = weights_file.read_bytes()
    shapes = jax.tree.map(np.shape, weights)
    outcomes = {"loaded": 0, "refused": 0}
    for seed in range(1_000):
        rng = random.Random(seed)
        damaged, at = bytearray(data), rng.randrange(len(data))
        match seed % 3:
            case 0:
                damaged[at] ^= 1 << rng.randrange(8)
            case 1:
                damaged[at : at + 4] = b"\xff\xff\xff\x7f"
            case 2:
                del damaged[at:]
        weights_file.write_bytes(damaged)
        try:
            model = load_model(path)
        except ModelFileError:
            outcomes["refused"] += 1
        else:
            outcomes["loaded"] += 1
            assert jax.tree.map(np.shape, model.weights) == shapes
            assert all(np.isfinite(x).all() for x in jax.tree.leaves(model.weights))
    assert outcomes["refused"] > 334 and outcomes["loaded"] > 100, outcomes


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> LoadedModel:
    return load_model(smollm2_path)


def test_smollm2_matches_the_gguf_package(smollm2_path: Path, smollm2: LoadedModel) -> None:
    model = smollm2
    assert (model.config.num_layers, model.config.width, model.config.vocab_size) == (30, 576, 49152)
    assert model.config.tied_embeddings and model.config.eos_ids == (2,)
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2_path).tensors}
    values = gguf.dequantize(reader["token_embd.weight"].data, reader["token_embd.weight"].tensor_type)
    assert model.weights.embed_VD.tobytes() == values.tobytes()
    q = gguf.dequantize(reader["blk.29.attn_q.weight"].data, reader["blk.29.attn_q.weight"].tensor_type)
    q_DX = q.reshape(9, 32, 2, 576).transpose(3, 0, 2, 1).reshape(576, 9 * 64)
    assert np.array_equal(model.weights.layers[29].q_DX, q_DX)
    down = gguf.dequantize(reader["blk.7.ffn_down.weight"].data, reader["blk.7.ffn_down.weight"].tensor_type)
    assert np.array_equal(model.weights.layers[7].down_FD, down.T)


def test_smollm2_exported_to_safetensors_is_bit_equal(tmp_path: Path, smollm2: LoadedModel) -> None:
    copy = load_model(write_hf(tmp_path, smollm2.config, smollm2.weights, num_shards=2))
    assert copy.config == smollm2.config
    assert_bit_equal(copy.weights, smollm2.weights)
