"""Mixtral: Llama's attention; experts weighed by a softmax over all, made to sum to 1 (arXiv:2401.04088)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from headrace.model.config_keys import ConfigKeys
from headrace.model.families.names import ATTENTION, EXPERT_INERT, REQUIRED, TOP
from headrace.model.family import Family, SourceName
from headrace.model.router import Router

_EXPERTS = "model.layers.{layer}.block_sparse_moe.experts.{expert}."


def _options(keys: ConfigKeys, num_layers: int) -> Mapping[str, Any]:
    options: dict[str, Any] = {
        "num_experts": keys.integer("num_local_experts"),
        "experts_per_token": keys.integer("num_experts_per_tok"),
        "expert_ffn_width": keys.integer("intermediate_size"),
        "router": Router(renormalize=True),
    }
    if "sliding_window" in keys.rest:
        options |= {"sliding_window": keys.integer("sliding_window"), "window_pattern": (True,)}
    return options


MIXTRAL = Family(
    name="mixtral",
    hf_model_type="mixtral",
    hf_architecture="MixtralForCausalLM",
    top=TOP,
    layer=MappingProxyType(
        {
            **ATTENTION,
            "router_DE": SourceName(None, "model.layers.{layer}.block_sparse_moe.gate.weight"),
            "gate_EDF": SourceName(None, _EXPERTS + "w1.weight"),
            "up_EDF": SourceName(None, _EXPERTS + "w3.weight"),
            "down_EFD": SourceName(None, _EXPERTS + "w2.weight"),
        }
    ),
    hf_options=_options,
    hf_required=REQUIRED | {"num_local_experts", "num_experts_per_tok"},
    hf_inert_keys=EXPERT_INERT,
)
