"""A Llama GGUF as Hugging Face directories, float32 and bfloat16: ``python make_hf.py MODEL.gguf FOLDER``.

Runs where torch, transformers and gguf are, such as in vLLM's environment; headrace does not need it. What it writes
has the very weights that the GGUF's blocks stand for: FOLDER/smollm2-hf-f32 exactly, FOLDER/smollm2-hf rounded.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
"""Of a layer: in a GGUF and in transformers."""


def unpermuted(weight_ND: torch.Tensor, heads: int) -> torch.Tensor:
    """A GGUF has the two halves of each head's rotary pairs next to each other, transformers one after the other."""
    rows, width = weight_ND.shape
    return weight_ND.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


def config_of(numbers: dict[str, Any], vocabulary: int) -> LlamaConfig:
    """numbers: of the GGUF, without the name of the architecture."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=numbers["embedding_length"],
        intermediate_size=numbers["feed_forward_length"],
        num_hidden_layers=numbers["block_count"],
        num_attention_heads=numbers["attention.head_count"],
        num_key_value_heads=numbers["attention.head_count_kv"],
        max_position_embeddings=numbers["context_length"],
        rms_norm_eps=numbers["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_theta": numbers["rope.freq_base"], "rope_type": "default"},
        tie_word_embeddings=True,
        hidden_act="silu",
    )


def main() -> None:
    path, folder = Path(sys.argv[1]), Path(sys.argv[2])
    reader = GGUFReader(path)
    values = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.ggml.")}
    kind = values["general.architecture"]
    if kind != "llama":
        raise SystemExit(f"{path} is a {kind}; this writes llama alone")
    numbers = {name.removeprefix(f"{kind}."): value for name, value in values.items()}
    weights = {
        tensor.name: torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).astype(np.float32).copy())
        for tensor in reader.tensors
    }
    config = config_of(numbers, weights["token_embd.weight"].shape[0])
    found = {
        "model.embed_tokens.weight": weights["token_embd.weight"],
        "model.norm.weight": weights["output_norm.weight"],
        "lm_head.weight": weights["token_embd.weight"],
    }
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        for name, target in NAMES.items():
            weight = weights[f"blk.{layer}.{name}.weight"]
            weight = unpermuted(weight, heads[name]) if name in heads else weight
            found[f"model.layers.{layer}.{target}.weight"] = weight
    model = LlamaForCausalLM(config)
    model.load_state_dict(found, strict=True)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for name, dtype in (("smollm2-hf-f32", torch.float32), ("smollm2-hf", torch.bfloat16)):
        model.to(dtype).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


if __name__ == "__main__":
    main()
