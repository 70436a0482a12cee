"""The shipped tiny model: a random Llama of 2 layers, 64 wide, made on the spot, with a tokenizer of bytes. JAX-free.

For everything whose count would take hours on a trained model, and for a first look at a server without a download: it
loads, serves and fails as any other model directory does. What it writes means nothing. Its weights are a stretch of
SHAKE-256 (FIPS 202), a byte for each, so they have the same bits on every machine; and each fits into 8 binary digits,
so bfloat16 and float32 hold the same values.
"""

import hashlib
import json
import math
from collections.abc import Mapping

import numpy as np

from headrace.model.vocabulary import byte_alphabet

SEED = "headrace tiny 1"
SHA256 = "86599001d133c21cf0e0492d9edeeb991cb0330da6d538db37565bc33bebec83"
"""Of all files, as ``digest`` counts it."""

CONTEXT = 4096
LAYERS = 2
WIDTH = 64
FFN_WIDTH = 256
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 64
"""The narrowest heads that the kernels of all three platforms take."""

SPECIAL_TEXTS = (
    "<|begin|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|turn|>",
    "<|pad|>",
)
"""Ids from 256 on; an id below is the byte of that value."""
BEGIN, END, TURN, PAD = (256 + SPECIAL_TEXTS.index(text) for text in ("<|begin|>", "<|end|>", "<|turn|>", "<|pad|>"))
VOCAB = 256 + len(SPECIAL_TEXTS)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|turn|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_PRINTABLE = frozenset({*range(0x20, 0x7F), 0x0A})


def tiny_files() -> dict[str, bytes]:
    """Name -> content of each file of the model directory; the same bytes on every machine."""
    return {
        "config.json": _json(_config()),
        "model.safetensors": _safetensors(_tensors()),
        "tokenizer.json": _json(_tokenizer()),
        "tokenizer_config.json": _json(_tokenizer_config()),
    }


def digest(files: Mapping[str, bytes]) -> str:
    """SHA-256, in hex, over names and contents in the order of the names."""
    whole = hashlib.sha256()
    for name in sorted(files):
        whole.update(hashlib.sha256(name.encode()).digest() + hashlib.sha256(files[name]).digest())
    return whole.hexdigest()


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode("ascii") + b"\n"


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "num_hidden_layers": LAYERS,
        "hidden_size": WIDTH,
        "intermediate_size": FFN_WIDTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": BEGIN,
        "eos_token_id": [END, TURN],
        "pad_token_id": PAD,
        "torch_dtype": "bfloat16",
    }


def _tokenizer() -> dict[str, object]:
    """Byte-level BPE without merges, so that each byte stays a token."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 256 + i, "content": text, **flags} for i, text in enumerate(SPECIAL_TEXTS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": byte_alphabet(), "merges": []},
    }


def _tokenizer_config() -> dict[str, object]:
    return {
        "add_bos_token": True,
        "bos_token": SPECIAL_TEXTS[BEGIN - 256],
        "eos_token": SPECIAL_TEXTS[END - 256],
        "chat_template": CHAT_TEMPLATE,
    }


def _tensors() -> dict[str, np.ndarray]:
    """Name -> float32 weight, stored as [outputs, inputs].

    Gains: sharp attention and an embedding that is small beside what the layers add, so that the next token depends on
    the whole text and greedy text does not run in a short circle.
    """
    q_width, kv_width = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    tensors = {
        "model.embed_tokens.weight": _draw("embed", (VOCAB, WIDTH), 0.5),
        "model.norm.weight": np.ones(WIDTH, np.float32),
        "lm_head.weight": _draw("head", (VOCAB, WIDTH), 0.5) * _head_scale()[:, None],
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = np.ones(WIDTH, np.float32)
        for name, shape, scale in (
            ("self_attn.q_proj", (q_width, WIDTH), 0.5),
            ("self_attn.k_proj", (kv_width, WIDTH), 0.5),
            ("self_attn.v_proj", (kv_width, WIDTH), 0.25),
            ("self_attn.o_proj", (WIDTH, q_width), 0.25),
            ("mlp.gate_proj", (FFN_WIDTH, WIDTH), 0.25),
            ("mlp.up_proj", (FFN_WIDTH, WIDTH), 0.25),
            ("mlp.down_proj", (WIDTH, FFN_WIDTH), 0.25),
        ):
            tensors[f"{prefix}.{name}.weight"] = _draw(f"{layer}.{name}", shape, scale)
    return tensors


def _head_scale() -> np.ndarray:
    """Of each id's row of logits: text is likely, an end is less so, other bytes and control ids hardly come."""
    scale = np.full(VOCAB, 0.125, np.float32)
    scale[sorted(_PRINTABLE)] = 1.0
    scale[[END, TURN]] = 0.5
    return scale


def _draw(name: str, shape: tuple[int, ...], scale: float) -> np.ndarray:
    """Odd multiples of scale / 256 in (-scale, scale), each equally likely. scale: a power of two."""
    stream = hashlib.shake_256(f"{SEED}/{name}".encode()).digest(math.prod(shape))
    steps = 2 * np.frombuffer(stream, np.uint8).astype(np.float32) - 255
    return (steps * np.float32(scale / 256)).reshape(shape)


def _safetensors(tensors: Mapping[str, np.ndarray]) -> bytes:
    """The file, in bfloat16: the upper halves of the float32 words, whose lower halves are 0.

    Source: https://github.com/huggingface/safetensors#format
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name in sorted(tensors):
        words = np.ascontiguousarray(tensors[name], "<f4").view("<u4")
        assert not (words & 0xFFFF).any(), f"{name} does not fit into bfloat16"
        raw = (words >> 16).astype("<u2").tobytes()
        header[name] = {
            "dtype": "BF16",
            "shape": list(words.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(data)
