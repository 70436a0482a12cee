"""Llama: RMSNorm, rotary positions over the whole head, grouped-query attention, SwiGLU."""

from types import MappingProxyType

from headrace.model.family import Family, SourceName

LLAMA = Family(
    name="llama",
    gguf_architecture="llama",
    hf_model_type="llama",
    hf_architecture="LlamaForCausalLM",
    top=MappingProxyType(
        {
            "embed_VD": SourceName("token_embd.weight", "model.embed_tokens.weight"),
            "final_norm_D": SourceName("output_norm.weight", "model.norm.weight"),
            "head_DV": SourceName("output.weight", "lm_head.weight"),
        }
    ),
    layer=MappingProxyType(
        {
            "attn_norm_D": SourceName("blk.{layer}.attn_norm.weight", "model.layers.{layer}.input_layernorm.weight"),
            "q_DX": SourceName("blk.{layer}.attn_q.weight", "model.layers.{layer}.self_attn.q_proj.weight"),
            "k_DY": SourceName("blk.{layer}.attn_k.weight", "model.layers.{layer}.self_attn.k_proj.weight"),
            "v_DY": SourceName("blk.{layer}.attn_v.weight", "model.layers.{layer}.self_attn.v_proj.weight"),
            "o_XD": SourceName("blk.{layer}.attn_output.weight", "model.layers.{layer}.self_attn.o_proj.weight"),
            "ffn_norm_D": SourceName(
                "blk.{layer}.ffn_norm.weight", "model.layers.{layer}.post_attention_layernorm.weight"
            ),
            "gate_DF": SourceName("blk.{layer}.ffn_gate.weight", "model.layers.{layer}.mlp.gate_proj.weight"),
            "up_DF": SourceName("blk.{layer}.ffn_up.weight", "model.layers.{layer}.mlp.up_proj.weight"),
            "down_FD": SourceName("blk.{layer}.ffn_down.weight", "model.layers.{layer}.mlp.down_proj.weight"),
        }
    ),
    gguf_interleaved_rotary=True,
    hf_inert_keys=frozenset({"pretraining_tp", "is_llama_config"}),
    gguf_unit_tensors=frozenset({"rope_freqs.weight"}),
    hf_ignored_tensors=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq"),
)
