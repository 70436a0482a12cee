"""Qwen3: Llama with queries and keys normalized per head before they are rotated (arXiv:2505.09388)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from headrace.model.config_keys import ConfigKeys
from headrace.model.families.names import ATTENTION, DENSE, QK_NORM, REQUIRED, TOP
from headrace.model.family import Family


def refuse_windows(keys: ConfigKeys, num_layers: int) -> None:
    """No published model of these families has one."""
    keys.demand("use_sliding_window", False)
    keys.rest.pop("sliding_window", None)  # Of no effect without use_sliding_window.
    keys.rest.pop("max_window_layers", None)
    kinds = keys.rest.pop("layer_types", [])
    if kinds not in ([], ["full_attention"] * num_layers):
        raise keys.fail("layer_types", f"is {kinds!r:.60}, which is not supported; 'full_attention' for each layer is")


def attention_options(keys: ConfigKeys, num_layers: int) -> Mapping[str, Any]:
    """Fields that dense layers and layers of experts share."""
    refuse_windows(keys, num_layers)
    return {"qk_norm": True}


QWEN3 = Family(
    name="qwen3",
    hf_model_type="qwen3",
    hf_architecture="Qwen3ForCausalLM",
    top=TOP,
    layer=MappingProxyType({**ATTENTION, **QK_NORM, **DENSE}),
    hf_options=attention_options,
    hf_required=REQUIRED | {"head_dim"},
)
