"""Small models with random weights, and writers of both file formats for them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import jax
import numpy as np
from safetensors.numpy import save_file

from headrace.model.config import ModelConfig
from headrace.model.rope_scaling import YarnScaling
from headrace.model.router import Gate, Router, RouterBias, RouterScore
from headrace.model.specs import ParamSpec, param_specs
from headrace.model.weights import Weights
from tests.model.ggml_blocks import READ_ONLY, random_blocks

SMOLLM2 = ModelConfig(
    family="llama",
    vocab_size=49152,
    num_layers=30,
    width=576,
    ffn_width=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_context=8192,
    rope_theta=100000.0,
    rms_norm_eps=1e-5,
    tied_embeddings=True,
    bos_id=1,
    eos_ids=(2,),
)
TINY = ModelConfig(
    family="llama",
    vocab_size=96,
    num_layers=2,
    width=64,
    ffn_width=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_context=128,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    tied_embeddings=True,
    bos_id=1,
    eos_ids=(2,),
)
_EXPERTS: Mapping[str, Any] = MappingProxyType(
    {"ffn_width": 0, "num_experts": 8, "experts_per_token": 2, "expert_ffn_width": 48, "tied_embeddings": False}
)
MIXTRAL_TINY = replace(TINY, family="mixtral", router=Router(renormalize=True), **_EXPERTS)
QWEN2_MOE_TINY = replace(
    TINY, family="qwen2_moe", qkv_bias=True, router=Router(), shared_expert_width=80, has_shared_gate=True, **_EXPERTS
)
QWEN3_TINY = replace(TINY, family="qwen3", qk_norm=True, tied_embeddings=False)
QWEN3_MOE_TINY = replace(TINY, family="qwen3_moe", qk_norm=True, router=Router(), **_EXPERTS)
GPT_OSS_TINY = replace(
    TINY,
    family="gpt_oss",
    rope_scaling=YarnScaling(factor=4.0, original_context=32, truncate=False),
    router=Router(score=RouterScore.SOFTMAX_CHOSEN, bias=RouterBias.LOGITS),
    expert_bias=True,
    gate=Gate(alpha=1.702, limit=7.0, up_offset=1.0),
    attention_bias=True,
    has_sinks=True,
    sliding_window=8,
    window_pattern=(True, False),
    **_EXPERTS,
)
FAMILIES_TINY = (MIXTRAL_TINY, QWEN2_MOE_TINY, QWEN3_TINY, QWEN3_MOE_TINY, GPT_OSS_TINY)
# A few kilobytes, for tests that write it out thousands of times.
SMALLEST = replace(TINY, num_layers=1, vocab_size=8, width=32, ffn_width=32, num_heads=2, num_kv_heads=1)


def stored(cfg: ModelConfig, weights: Weights[np.ndarray]) -> Iterator[tuple[ParamSpec, np.ndarray]]:
    """Each spec with its weight as a file stores it: [outputs, inputs], rotated heads in halves."""
    for spec, leaf in zip(jax.tree.leaves(param_specs(cfg)), jax.tree.leaves(weights), strict=True):
        x = np.asarray(leaf)
        if spec.is_product:
            x = np.ascontiguousarray(x.T)
        yield spec, x


def write_gguf(
    path: Path,
    cfg: ModelConfig,
    weights: Weights[np.ndarray],
    kind: gguf.GGMLQuantizationType,
    *,
    kinds: Mapping[str, gguf.GGMLQuantizationType] = MappingProxyType({}),
    extra: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> Path:
    """A GGUF file as llama.cpp's converter lays it out; matrices quantized to ``kind``, vectors float32.

    Types that the gguf package only reads hold random weights instead. extra: more tensors, by name. kinds: other types
    than ``kind``, by name of the tensor.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(cfg.num_layers)
    writer.add_context_length(cfg.max_context)
    writer.add_embedding_length(cfg.width)
    writer.add_feed_forward_length(cfg.ffn_width)
    writer.add_head_count(cfg.num_heads)
    writer.add_head_count_kv(cfg.num_kv_heads)
    writer.add_rope_freq_base(cfg.rope_theta)
    writer.add_layer_norm_rms_eps(cfg.rms_norm_eps)
    writer.add_vocab_size(cfg.vocab_size)
    writer.add_rope_dimension_count(cfg.head_dim)
    writer.add_bos_token_id(cfg.bos_id or 0)
    writer.add_eos_token_id(cfg.eos_ids[0])
    for spec, x in stored(cfg, weights):
        if spec.is_rotated:
            x = x.reshape(-1, 2, cfg.head_dim // 2, cfg.width).swapaxes(1, 2).reshape(x.shape)
        name = spec.source.gguf
        of = kinds.get(name, kind) if spec.is_product or x.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, encoded(x, of), raw_dtype=of)
    for name, x in extra.items():
        writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def encoded(x: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """In a type of GGUF: as the gguf package quantizes, or at random where it does not."""
    if kind.name not in READ_ONLY:
        return gguf.quantize(x, kind)
    size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(x.size)
    return random_blocks(rng, kind.name, x.size // size).reshape(*x.shape[:-1], x.shape[-1] // size * block_bytes)


def write_hf(
    directory: Path,
    cfg: ModelConfig,
    weights: Weights[np.ndarray],
    *,
    num_shards: int = 1,
    dtype: type = np.float32,
    extra: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> Path:
    """A Hugging Face directory: config.json, and model.safetensors or shards with their index.

    extra: more tensors, by name.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", hf_config(cfg))
    tensors = {spec.source.hf: x.astype(dtype) for spec, x in stored(cfg, weights)} | dict(extra)
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    names = sorted(tensors)
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        mine = names[shard::num_shards]
        save_file({name: tensors[name] for name in mine}, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(mine, file))
    total = sum(x.nbytes for x in tensors.values())
    write_json(
        directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
    )
    return directory


def hf_config(cfg: ModelConfig) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": cfg.vocab_size,
        "num_hidden_layers": cfg.num_layers,
        "hidden_size": cfg.width,
        "intermediate_size": cfg.ffn_width,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "max_position_embeddings": cfg.max_context,
        "rope_theta": cfg.rope_theta,
        "rms_norm_eps": cfg.rms_norm_eps,
        "tie_word_embeddings": cfg.tied_embeddings,
        "hidden_act": "silu",
        "bos_token_id": cfg.bos_id,
        "eos_token_id": list(cfg.eos_ids),
        "torch_dtype": "float32",
    }


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
