"""Names in Hugging Face files that families share, and keys of their configurations."""

from collections.abc import Mapping
from types import MappingProxyType

from headrace.model.family import SourceName

TOP: Mapping[str, SourceName] = MappingProxyType(
    {
        "embed_VD": SourceName(None, "model.embed_tokens.weight"),
        "final_norm_D": SourceName(None, "model.norm.weight"),
        "head_DV": SourceName(None, "lm_head.weight"),
    }
)

ATTENTION: Mapping[str, SourceName] = MappingProxyType(
    {
        "attn_norm_D": SourceName(None, "model.layers.{layer}.input_layernorm.weight"),
        "q_DX": SourceName(None, "model.layers.{layer}.self_attn.q_proj.weight"),
        "k_DY": SourceName(None, "model.layers.{layer}.self_attn.k_proj.weight"),
        "v_DY": SourceName(None, "model.layers.{layer}.self_attn.v_proj.weight"),
        "o_XD": SourceName(None, "model.layers.{layer}.self_attn.o_proj.weight"),
        "ffn_norm_D": SourceName(None, "model.layers.{layer}.post_attention_layernorm.weight"),
    }
)
"""And the two norms of a layer."""

QKV_BIAS: Mapping[str, SourceName] = MappingProxyType(
    {
        "q_bias_X": SourceName(None, "model.layers.{layer}.self_attn.q_proj.bias"),
        "k_bias_Y": SourceName(None, "model.layers.{layer}.self_attn.k_proj.bias"),
        "v_bias_Y": SourceName(None, "model.layers.{layer}.self_attn.v_proj.bias"),
    }
)

QK_NORM: Mapping[str, SourceName] = MappingProxyType(
    {
        "q_norm_H": SourceName(None, "model.layers.{layer}.self_attn.q_norm.weight"),
        "k_norm_H": SourceName(None, "model.layers.{layer}.self_attn.k_norm.weight"),
    }
)

DENSE: Mapping[str, SourceName] = MappingProxyType(
    {
        "gate_DF": SourceName(None, "model.layers.{layer}.mlp.gate_proj.weight"),
        "up_DF": SourceName(None, "model.layers.{layer}.mlp.up_proj.weight"),
        "down_FD": SourceName(None, "model.layers.{layer}.mlp.down_proj.weight"),
    }
)

REQUIRED = frozenset({"num_key_value_heads", "rms_norm_eps"})
"""transformers' defaults of these differ between families."""

EXPERT_INERT = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})
"""They concern training, or what a call reports."""
