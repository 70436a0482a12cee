"""config.json of each family as it is published: what it becomes, and what would change the result and is refused."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.model.config import ModelConfig
from headrace.model.config_files import read_config
from headrace.model.errors import ModelFileError
from headrace.model.rope_scaling import YarnScaling
from headrace.model.router import Gate, Router, RouterBias, RouterScore
from headrace.model.specs import weight_bytes
from tests.model.tiny import write_json

# The published files (Hugging Face), without what every family has in common.
_MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache": True,
    "vocab_size": 32000,
}  # fmt: skip
_QWEN3_32B = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
    "intermediate_size": 25600, "max_position_embeddings": 40960, "max_window_layers": 64, "model_type": "qwen3",
    "num_attention_heads": 64, "num_hidden_layers": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
_QWEN3_30B_A3B = _QWEN3_32B | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1, "hidden_size": 2048,
    "intermediate_size": 6144, "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False, "router_aux_loss_coef": 0.001,
    "rope_theta": 1000000.0,
}  # fmt: skip
_QWEN2_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "decoder_sparse_step": 1, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21, "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 60,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16, "output_router_logits": False,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.39.0.dev0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
_GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
    "pad_token_id": 199999, "rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
    "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0",
    "use_cache": True, "vocab_size": 201088,
}  # fmt: skip
PUBLISHED: Mapping[str, dict[str, Any]] = {
    "mixtral": _MIXTRAL, "qwen2_moe": _QWEN2_MOE, "qwen3": _QWEN3_32B, "qwen3_moe": _QWEN3_30B_A3B,
    "gpt_oss": _GPT_OSS_20B,
}  # fmt: skip
MIXTRAL = ModelConfig(
    family="mixtral", vocab_size=32000, num_layers=32, width=4096, ffn_width=0, num_heads=32, num_kv_heads=8,
    head_dim=128, max_context=32768, rope_theta=1e6, rms_norm_eps=1e-5, tied_embeddings=False, bos_id=1, eos_ids=(2,),
    num_experts=8, experts_per_token=2, expert_ffn_width=14336, router=Router(renormalize=True),
)  # fmt: skip
QWEN3 = ModelConfig(
    family="qwen3", vocab_size=151936, num_layers=64, width=5120, ffn_width=25600, num_heads=64, num_kv_heads=8,
    head_dim=128, max_context=40960, rope_theta=1e6, rms_norm_eps=1e-6, tied_embeddings=False, bos_id=151643,
    eos_ids=(151645,), qk_norm=True,
)  # fmt: skip
EXPECTED = {
    "mixtral": MIXTRAL,
    "qwen3": QWEN3,
    "qwen2_moe": replace(
        QWEN3, family="qwen2_moe", num_layers=24, width=2048, ffn_width=0, num_heads=16, num_kv_heads=16,
        max_context=8192, eos_ids=(151643,), qk_norm=False, qkv_bias=True, num_experts=60, experts_per_token=4,
        expert_ffn_width=1408, router=Router(), shared_expert_width=5632, has_shared_gate=True,
    ),
    "qwen3_moe": replace(
        QWEN3, family="qwen3_moe", num_layers=48, width=2048, ffn_width=0, num_heads=32, num_kv_heads=4,
        num_experts=128, experts_per_token=8, expert_ffn_width=768, router=Router(renormalize=True),
    ),
    "gpt_oss": ModelConfig(
        family="gpt_oss", vocab_size=201088, num_layers=24, width=2880, ffn_width=0, num_heads=64, num_kv_heads=8,
        head_dim=64, max_context=131072, rope_theta=150000.0, rms_norm_eps=1e-5, tied_embeddings=False,
        eos_ids=(200002,), rope_scaling=YarnScaling(factor=32.0, original_context=4096, truncate=False),
        num_experts=32, experts_per_token=4, expert_ffn_width=2880,
        router=Router(score=RouterScore.SOFTMAX_CHOSEN, bias=RouterBias.LOGITS), expert_bias=True,
        gate=Gate(alpha=1.702, limit=7.0, up_offset=1.0), attention_bias=True, has_sinks=True, sliding_window=128,
        window_pattern=(True, False),
    ),
}  # fmt: skip
BILLIONS = {"mixtral": 46.70, "qwen2_moe": 14.3, "qwen3": 32.76, "qwen3_moe": 30.53, "gpt_oss": 20.91}
"""Parameters, as published."""


def read(directory: Path, family: str, change: Mapping[str, Any]) -> ModelConfig:
    values = PUBLISHED[family] | change
    write_json(directory / "config.json", {key: value for key, value in values.items() if value is not ...})
    return read_config(directory)


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_models(tmp_path: Path, family: str) -> None:
    config = read(tmp_path, family, {})
    assert config == EXPECTED[family]
    # Vectors and routers are float32: less than a thousandth.
    assert weight_bytes(config, "float16") / 2e9 == pytest.approx(BILLIONS[family], rel=2e-3)


@pytest.mark.parametrize(
    ("family", "change", "expected"),
    [
        ("mixtral", {"sliding_window": 4096}, {"sliding_window": 4096, "window_pattern": (True,)}),
        ("qwen3", {"sliding_window": 4096, "layer_types": ["full_attention"] * 64}, {}),
        ("qwen3_moe", {"num_experts": ..., "num_local_experts": 64}, {"num_experts": 64}),
        ("qwen2_moe", {"qkv_bias": False}, {"qkv_bias": False}),
        ("qwen2_moe", {"norm_topk_prob": True}, {"router": Router(renormalize=True)}),
        ("qwen3_moe", {"norm_topk_prob": ...}, {"router": Router()}),
        ("gpt_oss", {"layer_types": ...}, {}),
        ("gpt_oss", {"layer_types": ["full_attention"] * 24}, {"sliding_window": None, "window_pattern": ()}),
        ("gpt_oss", {"layer_types": ["sliding_attention"] * 24}, {"window_pattern": (True,)}),
        (
            "gpt_oss",
            {"layer_types": ..., "num_hidden_layers": 3},
            {"num_layers": 3, "window_pattern": (True, False, True)},
        ),
        ("gpt_oss", {"swiglu_alpha": 2.0}, {"gate": Gate(alpha=2.0, limit=7.0, up_offset=1.0)}),
        ("gpt_oss", {"attention_bias": False}, {"attention_bias": False}),
    ],
)
def test_other_values(tmp_path: Path, family: str, change: dict[str, Any], expected: dict[str, Any]) -> None:
    assert read(tmp_path, family, change) == replace(EXPECTED[family], **expected)


@pytest.mark.parametrize(
    ("family", "key", "value", "reason"),
    [
        ("mixtral", "num_local_experts", ..., "is missing"),
        ("mixtral", "num_key_value_heads", ..., "is missing"),
        ("mixtral", "num_local_experts", 0, "experts_per_token is 2, but num_experts is 0"),
        ("mixtral", "num_experts_per_tok", 9, "experts_per_token is 9; it must be from 1 to 8"),
        ("mixtral", "num_local_experts", 1 << 20, "num_experts is 1048576; it must be from 1 to 4096"),
        ("mixtral", "sliding_window", 0, "sliding_window is 0"),
        ("mixtral", "attention_bias", True, "is True, which is not supported"),
        ("mixtral", "quantization_config", {"quant_method": "mxfp4"}, "quantized safetensors are not supported"),
        ("qwen3", "use_sliding_window", True, "is True, which is not supported; False is"),
        ("qwen3", "layer_types", ["sliding_attention"] * 64, "which is not supported; 'full_attention'"),
        ("qwen3", "head_dim", ..., "is missing"),
        ("qwen3", "num_hidden_layers", 10**15, "num_layers is 1000000000000000; it must be from 1 to 1024"),
        ("gpt_oss", "num_hidden_layers", 10**15 + 1, "num_layers is 1000000000000001; it must be from 1 to 1024"),
        ("qwen3", "num_experts", 8, "(value 8) is not known to this version"),
        ("qwen2_moe", "use_sliding_window", True, "is True, which is not supported; False is"),
        ("qwen2_moe", "shared_expert_intermediate_size", ..., "is missing"),
        ("qwen2_moe", "shared_expert_intermediate_size", 0, "has_shared_gate is True, but shared_expert_width is 0"),
        ("qwen2_moe", "shared_expert_intermediate_size", -1, "shared_expert_width is -1; it must be from 0"),
        ("qwen2_moe", "decoder_sparse_step", 2, "is 2, which is not supported; 1 is"),
        ("qwen3_moe", "decoder_sparse_step", 2, "is 2, which is not supported; 1 is"),
        ("qwen3_moe", "mlp_only_layers", [3], "is [3], which is not supported; [] is"),
        ("qwen3_moe", "num_local_experts", 64, "is 128, which is not supported; 64 is"),
        ("qwen3_moe", "shared_expert_intermediate_size", 64, "(value 64) is not known to this version"),
        ("gpt_oss", "experts_per_token", 2, "is 2, which is not supported; 4 is"),
        ("gpt_oss", "layer_types", ["full_attention"] * 3, "has 3 entries for 24 layers"),
        ("gpt_oss", "layer_types", ["chunked_attention"] * 24, "it must be a list of sliding_attention"),
        ("gpt_oss", "sliding_window", None, "is missing"),
        ("gpt_oss", "swiglu_limit", -1.0, "gate limit is -1.0"),
        ("gpt_oss", "hidden_act", "gelu", "is 'gelu', which is not supported"),
        ("gpt_oss", "quantization_config", {"quant_method": "gptq"}, "is 'gptq', which is not supported; 'mxfp4' is"),
        ("gpt_oss", "model_type", "gptoss", "supported: gpt_oss, llama, mixtral, qwen2_moe, qwen3, qwen3_moe"),
    ],
)
def test_what_would_change_the_result_is_refused(
    tmp_path: Path, family: str, key: str, value: Any, reason: str
) -> None:
    with pytest.raises(ModelFileError) as caught:
        read(tmp_path, family, {key: value})
    assert caught.value.path == str(tmp_path / "config.json") and reason in caught.value.reason
