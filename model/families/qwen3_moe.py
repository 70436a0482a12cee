"""Qwen3 with experts in every layer, weighed by a softmax over all of them (arXiv:2505.09388)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from headrace.model.config_keys import ConfigKeys
from headrace.model.families.names import ATTENTION, EXPERT_INERT, QK_NORM, REQUIRED, TOP
from headrace.model.families.qwen3 import attention_options
from headrace.model.family import Family, SourceName
from headrace.model.router import Router

EXPERTS: Mapping[str, SourceName] = MappingProxyType(
    {
        "router_DE": SourceName(None, "model.layers.{layer}.mlp.gate.weight"),
        "gate_EDF": SourceName(None, "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight"),
        "up_EDF": SourceName(None, "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"),
        "down_EFD": SourceName(None, "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"),
    }
)


def expert_options(keys: ConfigKeys) -> Mapping[str, Any]:
    """Fields of the experts, which Qwen2 and Qwen3 name alike. Dense layers among them are refused."""
    keys.demand("decoder_sparse_step", 1)
    keys.demand("mlp_only_layers", [])
    keys.rest.pop("intermediate_size", None)  # Of dense layers, of which there are none.
    # transformers 5 writes num_local_experts for what the published files call num_experts.
    num_experts = keys.integer("num_local_experts" if "num_local_experts" in keys.rest else "num_experts")
    keys.demand("num_experts", num_experts)
    return {
        "num_experts": num_experts,
        "experts_per_token": keys.integer("num_experts_per_tok"),
        "expert_ffn_width": keys.integer("moe_intermediate_size"),
        "router": Router(renormalize=keys.boolean("norm_topk_prob", False)),
    }


def _options(keys: ConfigKeys, num_layers: int) -> Mapping[str, Any]:
    return {**attention_options(keys, num_layers), **expert_options(keys)}


QWEN3_MOE = Family(
    name="qwen3_moe",
    hf_model_type="qwen3_moe",
    hf_architecture="Qwen3MoeForCausalLM",
    top=TOP,
    layer=MappingProxyType({**ATTENTION, **QK_NORM, **EXPERTS}),
    hf_options=_options,
    hf_required=REQUIRED | {"num_experts_per_tok", "moe_intermediate_size"},
    hf_inert_keys=EXPERT_INERT,
)
