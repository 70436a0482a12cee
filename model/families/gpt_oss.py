"""gpt-oss: sinks, a window in every other layer, biases everywhere, clamped gates, experts weighed after the choice.

Source: the model card (arXiv:2508.10925) and transformers' modeling_gpt_oss.py.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from headrace.model.config_keys import ConfigKeys
from headrace.model.families.names import ATTENTION, EXPERT_INERT, QKV_BIAS, REQUIRED, TOP
from headrace.model.family import Family, SourceName
from headrace.model.router import Gate, Router, RouterBias, RouterScore

_ATTENTION = "model.layers.{layer}.self_attn."
_EXPERTS = "model.layers.{layer}.mlp.experts."
_KINDS = ("sliding_attention", "full_attention")


def _options(keys: ConfigKeys, num_layers: int) -> Mapping[str, Any]:
    chosen = keys.integer("num_experts_per_tok")
    keys.demand("experts_per_token", chosen)
    _read_quantization(keys)
    window, pattern = keys.integer("sliding_window"), _pattern(keys, num_layers)
    return {
        "num_experts": keys.integer("num_local_experts"),
        "experts_per_token": chosen,
        "expert_ffn_width": keys.integer("intermediate_size"),
        "router": Router(score=RouterScore.SOFTMAX_CHOSEN, bias=RouterBias.LOGITS),
        "expert_bias": True,
        "gate": Gate(alpha=keys.number("swiglu_alpha", 1.702), limit=keys.number("swiglu_limit", 7.0), up_offset=1.0),
        "attention_bias": keys.boolean("attention_bias", True),
        "has_sinks": True,
        "sliding_window": window if any(pattern) else None,
        "window_pattern": pattern if any(pattern) else (),
    }


def _read_quantization(keys: ConfigKeys) -> None:
    """MXFP4 is what the files are; which tensors have it is read from their headers."""
    value = keys.rest.pop("quantization_config", {})
    if not isinstance(value, dict):
        raise keys.fail("quantization_config", f"is {value!r:.60}; it must be an object")
    inner = ConfigKeys(keys.path, {f"quantization_config.{k}": v for k, v in value.items()}, "quantization_config.")
    inner.demand("quant_method", "mxfp4")
    inner.refuse_rest({"modules_to_not_convert"})


def _pattern(keys: ConfigKeys, layers: int) -> tuple[bool, ...]:
    """The shortest part of layer_types that repeats to the whole; every other layer has a window where it is absent."""
    kinds = keys.rest.pop("layer_types", None)
    if kinds is None:
        return (True, False) if layers % 2 == 0 else tuple(i % 2 == 0 for i in range(layers))
    if not isinstance(kinds, list) or not kinds or any(kind not in _KINDS for kind in kinds):
        raise keys.fail("layer_types", f"is {kinds!r:.100}; it must be a list of {' and '.join(_KINDS)}")
    if len(kinds) != layers:
        raise keys.fail("layer_types", f"has {len(kinds)} entries for {layers} layers")
    has_window = tuple(kind == _KINDS[0] for kind in kinds)
    period = next(p for p in range(1, layers + 1) if layers % p == 0 and has_window[:p] * (layers // p) == has_window)
    return has_window[:period]


GPT_OSS = Family(
    name="gpt_oss",
    hf_model_type="gpt_oss",
    hf_architecture="GptOssForCausalLM",
    top=TOP,
    layer=MappingProxyType(
        {
            **ATTENTION,
            **QKV_BIAS,
            "o_bias_D": SourceName(None, _ATTENTION + "o_proj.bias"),
            "sinks_N": SourceName(None, _ATTENTION + "sinks"),
            "router_DE": SourceName(None, "model.layers.{layer}.mlp.router.weight"),
            "router_bias_E": SourceName(None, "model.layers.{layer}.mlp.router.bias"),
            "gate_EDF": SourceName(None, _EXPERTS + "gate_up_proj", is_inputs_first=True, half=0),
            "up_EDF": SourceName(None, _EXPERTS + "gate_up_proj", is_inputs_first=True, half=1),
            "down_EFD": SourceName(None, _EXPERTS + "down_proj", is_inputs_first=True),
            "gate_bias_EF": SourceName(None, _EXPERTS + "gate_up_proj_bias", half=0),
            "up_bias_EF": SourceName(None, _EXPERTS + "gate_up_proj_bias", half=1),
            "down_bias_ED": SourceName(None, _EXPERTS + "down_proj_bias"),
        }
    ),
    hf_options=_options,
    hf_required=REQUIRED | {"head_dim", "num_local_experts", "num_experts_per_tok", "sliding_window"},
    hf_inert_keys=EXPERT_INERT | {"initial_context_length"},
)
