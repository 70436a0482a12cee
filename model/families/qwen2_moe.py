"""Qwen2 with experts in every layer, and beside them one that every token takes, weighed by a gate of its own.

Source: Qwen's report (arXiv:2407.10671) and transformers' modeling_qwen2_moe.py.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from headrace.model.config_keys import ConfigKeys
from headrace.model.families.names import ATTENTION, EXPERT_INERT, QKV_BIAS, REQUIRED, TOP
from headrace.model.families.qwen3 import refuse_windows
from headrace.model.families.qwen3_moe import EXPERTS, expert_options
from headrace.model.family import Family, SourceName

_SHARED = "model.layers.{layer}.mlp.shared_expert."


def _options(keys: ConfigKeys, num_layers: int) -> Mapping[str, Any]:
    refuse_windows(keys, num_layers)
    return {
        **expert_options(keys),
        "qkv_bias": keys.boolean("qkv_bias", True),
        "shared_expert_width": keys.integer("shared_expert_intermediate_size"),
        "has_shared_gate": True,
    }


QWEN2_MOE = Family(
    name="qwen2_moe",
    hf_model_type="qwen2_moe",
    hf_architecture="Qwen2MoeForCausalLM",
    top=TOP,
    layer=MappingProxyType(
        {
            **ATTENTION,
            **QKV_BIAS,
            **EXPERTS,
            "shared_gate_DF": SourceName(None, _SHARED + "gate_proj.weight"),
            "shared_up_DF": SourceName(None, _SHARED + "up_proj.weight"),
            "shared_down_FD": SourceName(None, _SHARED + "down_proj.weight"),
            "shared_score_D1": SourceName(None, "model.layers.{layer}.mlp.shared_expert_gate.weight"),
        }
    ),
    hf_options=_options,
    hf_required=REQUIRED | {"num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"},
    hf_inert_keys=EXPERT_INERT,
)
