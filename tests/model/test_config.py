"""Configuration: what is read from both formats, and that no key is ignored in silence."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from headrace.model.config import ModelConfig
from headrace.model.config_files import config_from_gguf, read_config
from headrace.model.errors import ModelFileError
from headrace.model.gguf_metadata import GGUFFile
from headrace.model.rope_scaling import Llama3Scaling, YarnScaling
from headrace.serving.core.errors import ConfigError
from tests.model.tiny import SMOLLM2, TINY, hf_config, write_json


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 0), ("vocab_size", 1 << 23), ("num_layers", 0), ("num_layers", 1 << 31), ("width", 1 << 40),
        ("ffn_width", -1), ("num_heads", 0), ("num_kv_heads", 3), ("num_kv_heads", 8), ("head_dim", 15),
        ("max_context", 0), ("rope_theta", 1.0), ("rope_theta", math.inf), ("rope_theta", math.nan),
        ("rms_norm_eps", 0.0), ("rms_norm_eps", 1.0), ("rms_norm_eps", math.nan), ("bos_id", 96), ("eos_ids", (2, -1)),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{field} "):
        replace(TINY, **{field: value})


def test_smollm2(smollm2_path: Path) -> None:
    found = read_config(smollm2_path)
    assert found.rms_norm_eps == pytest.approx(1e-5, rel=1e-6)
    assert replace(found, rms_norm_eps=1e-5) == SMOLLM2


FIELDS: Mapping[str, object] = MappingProxyType(
    {
        "general.architecture": "llama",
        "general.name": "tiny",
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": 96,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
)


def from_fields(fields: Mapping[str, object]) -> ModelConfig:
    return config_from_gguf(
        GGUFFile(path=Path("m.gguf"), version=3, fields=fields, tensors={}, data_offset=0, file_bytes=0)
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, {}),
        ({"llama.rope.freq_base": 5e5}, {"rope_theta": 5e5}),
        ({"llama.rope.scaling.type": "none", "llama.rope.dimension_count": 16}, {}),
        ({"llama.attention.head_count_kv": None}, {"num_kv_heads": 4}),
        ({"llama.attention.head_count_kv": [2, 2]}, {}),
        ({"llama.attention.key_length": 32, "llama.attention.value_length": 32}, {"head_dim": 32}),
        ({"tokenizer.ggml.eot_token_id": 3}, {"eos_ids": (2, 3)}),
        ({"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.eos_token_id": None}, {"bos_id": None, "eos_ids": ()}),
        ({"llama.vocab_size": None, "tokenizer.ggml.tokens": ["a"] * 50}, {"vocab_size": 50}),
        ({"llama.expert_count": 0, "llama.rope.scaling.finetuned": False}, {}),
    ],
)
def test_gguf_fields(change: dict[str, object], expected: dict[str, object]) -> None:
    fields = {key: value for key, value in {**FIELDS, **change}.items() if value is not None}
    assert from_fields(fields) == replace(TINY, **expected)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("general.architecture", "mamba", "is 'mamba', which is not supported; supported: llama"),
        ("general.architecture", "qwen3moe", "is 'qwen3moe', which is not supported; supported: llama"),
        ("general.architecture", 7, "is 7, which is not supported"),
        ("general.architecture", None, "is missing"),
        ("general.type", "adapter", "is 'adapter', which is not supported; 'model' is"),
        ("split.count", 4, "is 4, which is not supported"),
        ("llama.block_count", None, "is missing"),
        ("llama.block_count", "2", "is '2'; it must be an integer"),
        ("llama.block_count", True, "is True; it must be an integer"),
        ("llama.embedding_length", 2.0, "is 2.0; it must be an integer"),
        ("llama.feed_forward_length", [96, 48], "differs between layers"),
        ("llama.attention.layer_norm_rms_epsilon", None, "is missing"),
        ("llama.attention.layer_norm_rms_epsilon", math.nan, "is nan; it must be a finite number"),
        ("llama.attention.value_length", 8, "is 8, which is not supported; 16 is"),
        ("llama.rope.dimension_count", 8, "is 8, which is not supported; 16 is"),
        ("llama.rope.scaling.type", "yarn", "is 'yarn', which is not supported"),
        ("llama.rope.scaling.factor", 8.0, "is 8.0, which is not supported"),
        ("llama.expert_count", 8, "is 8, which is not supported"),
        ("llama.attention.sliding_window", 4096, "is 4096, which is not supported"),
        ("llama.attention.causal", False, "is False, which is not supported"),
        ("llama.logit_scale", 0.5, "(value 0.5) is not known to this version"),
        ("tokenizer.ggml.eos_token_id", -1, "eos_ids -1 is not in the vocabulary"),
        ("tokenizer.ggml.tokens", ["a"] * 95, "is 96, but tokenizer.ggml.tokens has 95 tokens"),
    ],
)
def test_gguf_fields_that_change_the_result_are_refused(key: str, value: object, reason: str) -> None:
    fields = {k: v for k, v in {**FIELDS, key: value}.items() if v is not None}
    with pytest.raises(ModelFileError) as caught:
        from_fields(fields)
    assert caught.value.path == "m.gguf" and reason in caught.value.reason
    assert key in caught.value.reason or key.startswith("tokenizer.")


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


def read_changed(directory: Path, change: Mapping[str, object]) -> ModelConfig:
    write_json(directory / "config.json", {**hf_config(TINY), **change})
    return read_config(directory)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, {}),
        ({"head_dim": None, "hidden_size": 128}, {"width": 128, "head_dim": 32}),
        ({"num_key_value_heads": None}, {"num_kv_heads": 4}),
        ({"rope_theta": None}, {"rope_theta": 10000.0}),
        ({"rope_theta": 500000}, {"rope_theta": 5e5}),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}, {"rope_theta": 1e5}),
        (
            {"rope_scaling": LLAMA3},
            {
                "rope_scaling": Llama3Scaling(
                    factor=8.0, original_context=8192, low_freq_factor=1.0, high_freq_factor=4.0
                )
            },
        ),
        (
            {"rope_scaling": YARN},
            {"rope_scaling": YarnScaling(factor=32.0, original_context=4096, truncate=False)},
        ),
        ({"rope_scaling": None, "attention_bias": False, "mlp_bias": False}, {}),
        ({"tie_word_embeddings": None}, {"tied_embeddings": False}),
        ({"eos_token_id": 5}, {"eos_ids": (5,)}),
        ({"bos_token_id": None, "eos_token_id": None}, {"bos_id": None, "eos_ids": ()}),
        ({"use_cache": True, "transformers_version": "5.0", "_name_or_path": "x", "unheard_of": None}, {}),
    ],
)
def test_hf_config(tmp_path: Path, change: dict[str, object], expected: dict[str, object]) -> None:
    assert read_changed(tmp_path, change) == replace(TINY, **expected)


def test_generation_config_adds_end_ids(tmp_path: Path) -> None:
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [7, 2], "temperature": 0.6})
    assert read_changed(tmp_path, {}).eos_ids == (2, 7)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("model_type", "mistral3", "is 'mistral3', which is not supported; supported: gpt_oss, llama, mixtral"),
        ("model_type", None, "is missing"),
        ("architectures", ["LlamaForSequenceClassification"], "['LlamaForCausalLM'] is supported"),
        ("hidden_size", None, "is missing"),
        ("hidden_size", "64", "is '64'; it must be an integer"),
        ("num_hidden_layers", 10**9, "num_layers is 1000000000; it must be from 1 to 1024"),
        ("num_attention_heads", 0, "num_heads is 0"),
        ("hidden_act", "gelu", "is 'gelu', which is not supported; 'silu' or 'swish' is"),
        ("attention_bias", True, "is True, which is not supported"),
        ("mlp_bias", True, "is True, which is not supported"),
        ("partial_rotary_factor", 0.5, "is 0.5, which is not supported"),
        ("rope_interleaved", True, "is True, which is not supported"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}, "original_max_position_embeddings is missing"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 8.0}, "original_max_position_embeddings is missing"),
        ("rope_scaling", LLAMA3 | {"factor": 0.5}, "rope_scaling factor is 0.5; it must be from 1 to 65536"),
        ("rope_scaling", LLAMA3 | {"high_freq_factor": 1.0}, "low_freq_factor 1.0 and high_freq_factor 1.0"),
        ("rope_scaling", LLAMA3 | {"beta_fast": 32.0}, "rope_scaling.beta_fast (value 32.0) is not known"),
        ("rope_scaling", YARN | {"mscale": 0.7}, "rope_scaling.mscale (value 0.7) is not known"),
        ("rope_scaling", YARN | {"beta_slow": 40.0}, "beta_fast 32.0 and beta_slow 40.0"),
        ("rope_scaling", YARN | {"truncate": 0}, "rope_scaling.truncate is 0; it must be true or false"),
        ("rope_scaling", YARN | {"attention_factor": 0.0}, "rope_scaling attention_factor is 0.0"),
        ("rope_scaling", YARN | {"original_max_position_embeddings": 0}, "rope_scaling original_context is 0"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, "rope_scaling.type is 'linear'"),
        ("rope_scaling", {"factor": 2.0}, "rope_scaling.factor (value 2.0) is not known"),
        ("rope_scaling", "linear", "it must be an object"),
        ("rope_parameters", {"rope_type": "longrope"}, "rope_parameters.rope_type is 'longrope'"),
        ("rope_theta", True, "it must be a finite number"),
        ("tie_word_embeddings", 1, "is 1; it must be true or false"),
        ("quantization_config", {"bits": 4}, "quantized safetensors are not supported"),
        ("sliding_window", 4096, "(value 4096) is not known to this version"),
        ("logits_soft_cap", 30, "(value 30) is not known to this version"),
        ("eos_token_id", "</s>", "it must be a token id or a list of them"),
        ("eos_token_id", [2, 96], "eos_ids 96 is not in the vocabulary of 96 ids"),
    ],
)
def test_hf_keys_that_change_the_result_are_refused(tmp_path: Path, key: str, value: object, reason: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        read_changed(tmp_path, {key: value})
    assert caught.value.path == str(tmp_path / "config.json") and reason in caught.value.reason


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b"[]", "holds a JSON list, not an object"),
        (b'{"a": 1, "a": 2}', "key 'a' appears twice"),
        (b'{"rms_norm_eps": NaN}', "NaN is not JSON"),
        (b'{"a": ' + b"[" * 200_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5_000 + b"}", "not JSON"),
    ],
)
def test_a_config_that_is_not_json_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelFileError) as caught:
        read_config(tmp_path)
    assert caught.value.path == str(tmp_path / "config.json") and reason in caught.value.reason


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"config\.json: missing"):
        read_config(tmp_path)
