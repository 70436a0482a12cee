"""Record what Hugging Face transformers makes of SmolLM2-135M-Instruct: greedy ids and logprobs, and token ids.

    python scripts/make_golden.py greedy|tokenizer MODEL.gguf [--threads N]

Writes tests/golden/smollm2_135m_greedy.json or …_tokenizer.json. Needs an environment of its own with torch,
transformers, gguf and accelerate; the records change only on request, and nothing else imports this file.

The model runs in float32 on the CPU, from the very weights of the GGUF file, dequantized by the ``gguf`` package.
llama.cpp stores q and k with the two halves of each head interleaved; the permutation is undone here. Reference
tokenizer: transformers' own conversion of the GGUF vocabulary, with one correction. transformers ignores
``tokenizer.ggml.pre``, and the model's own tokenizer.json (pre-tokenizer "smollm") splits digits one by one first.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from gguf import GGUFReader, dequantize
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "scripts"))

import golden_prompts  # noqa: E402
import golden_texts  # noqa: E402

from tests.golden import random_text  # noqa: E402

NUM_TOKENS = 48


def load_tokenizer(path: Path, *, split_digits: bool = True) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if split_digits:
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
        )
    return tokenizer


def load_model(path: Path) -> Any:
    reader = GGUFReader(path)
    tensors = {
        t.name: torch.from_numpy(dequantize(t.data, t.tensor_type).astype(np.float32).copy()) for t in reader.tensors
    }

    def field(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    num_heads, num_kv_heads = field("attention.head_count"), field("attention.head_count_kv")
    vocab_size, width = tensors["token_embd.weight"].shape
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=width // num_heads,
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_theta": field("rope.freq_base"), "rope_type": "default"},
        hidden_act="silu",
        tie_word_embeddings="output.weight" not in tensors,
    )

    def halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
        pairs = rows.view(heads, rows.shape[0] // heads // 2, 2, rows.shape[1])
        return pairs.transpose(1, 2).reshape(rows.shape)

    names = {
        "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    state = {
        "model.embed_tokens.weight": tensors["token_embd.weight"],
        "model.norm.weight": tensors["output_norm.weight"],
        "lm_head.weight": tensors.get("output.weight", tensors["token_embd.weight"]),
    }
    for layer in range(config.num_hidden_layers):
        for ours, theirs in names.items():
            rows = tensors[f"blk.{layer}.{ours}.weight"]
            if ours in ("attn_q", "attn_k"):
                rows = halves(rows, num_heads if ours == "attn_q" else num_kv_heads)
            state[f"model.layers.{layer}.{theirs}.weight"] = rows
    model = LlamaForCausalLM(config)
    model.load_state_dict(state, strict=True)
    return model.float().eval()


@torch.no_grad()
def greedy(model: Any, prompt_ids: list[int]) -> dict[str, list[Any]]:
    """NUM_TOKENS greedy ids (no id ends it), each with its logprob and the gap between the two best logits."""
    ids, logprobs, gaps = [], [], []
    fed, cache = torch.tensor([prompt_ids]), DynamicCache(config=model.config)
    for _ in range(NUM_TOKENS):
        out = model(input_ids=fed, cache=cache, use_cache=True, logits_to_keep=1)
        row = out.logits[0, -1].double()
        best = torch.topk(row, 2)
        ids.append(int(best.indices[0]))
        logprobs.append(round(float(torch.log_softmax(row, -1)[ids[-1]]), 5))
        gaps.append(round(float(best.values[0] - best.values[1]), 5))
        fed = torch.tensor([[ids[-1]]])
    return {"ids": ids, "logprobs": logprobs, "gaps": gaps}


def chat_messages(chat: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in chat]


def chat_ids(tokenizer: Any, messages: list[dict[str, str]], **options: Any) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, return_dict=True, **options)["input_ids"])


def greedy_prompts(tokenizer: Any) -> Iterable[dict[str, Any]]:
    for text in golden_prompts.RAW:
        yield {"kind": "raw", "text": text, "prompt_ids": tokenizer(text, add_special_tokens=False)["input_ids"]}
    for chat in (*golden_prompts.CHATS, *golden_prompts.long_chats()):
        messages = chat_messages(chat)
        ids = chat_ids(tokenizer, messages, add_generation_prompt=True)
        yield {"kind": "chat", "messages": messages, "prompt_ids": ids}
    for length in golden_prompts.EXACT_LENGTHS:
        text = golden_prompts.prose(golden_prompts.SEED + 100 + length, length // 14 + 2)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][:length]
        assert len(ids) == length
        yield {"kind": "ids", "prompt_ids": ids}


def record_greedy(path: Path) -> dict[str, Any]:
    tokenizer, model = load_tokenizer(path), load_model(path)
    prompts = []
    for prompt in greedy_prompts(tokenizer):
        prompts.append(prompt | greedy(model, prompt["prompt_ids"]))
        print(len(prompts), len(prompt["prompt_ids"]), repr(tokenizer.decode(prompts[-1]["ids"]))[:100], flush=True)
    return {
        "recipe": "float32 on CPU, weights dequantized from the GGUF file, greedy with no stop id; per generated "
        "position: id, logprob (log-softmax of the raw logits), gap (difference of the two best logits)",
        "seed": golden_prompts.SEED,
        "num_tokens": NUM_TOKENS,
        "prompts": prompts,
    }


def record_tokenizer(path: Path) -> dict[str, Any]:
    tokenizer = load_tokenizer(path)
    uncorrected = load_tokenizer(path, split_digits=False)

    def plain(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    texts = golden_texts.texts()
    strings = list(random_text.random_strings())
    rows = [plain(text) for text in strings]
    other_rows = (uncorrected(text, add_special_tokens=False)["input_ids"] for text in strings)
    differ = sum(ids != other for ids, other in zip(rows, other_rows, strict=True))
    chats = []
    for chat in (*golden_prompts.CHATS, *golden_texts.CHATS):
        messages = chat_messages(chat)
        options = {"continue_final_message": True} if chat[-1][0] == "assistant" else {"add_generation_prompt": True}
        chats.append({"messages": messages, **options, "ids": chat_ids(tokenizer, messages, **options)})
    return {
        "recipe": "ids by transformers' conversion of the GGUF vocabulary, digits split one by one first",
        "texts": [[text, plain(text)] for text in texts],
        "decoded": [[ids, tokenizer.decode(ids, skip_special_tokens=True)] for ids in golden_texts.ID_ROWS],
        "chats": chats,
        "random": {
            "seed": random_text.SEED,
            "count": len(rows),
            "num_ids": sum(map(len, rows)),
            "sha256": random_text.ids_digest(rows),
            "rows_that_differ_without_the_digit_split": differ,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("greedy", "tokenizer"))
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    record = record_greedy if arguments.what == "greedy" else record_tokenizer
    header = {
        "model": arguments.model.name,
        "model_sha256": hashlib.sha256(arguments.model.read_bytes()).hexdigest(),
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, tokenizers, np)},
        "python": sys.version.split()[0],
    }
    body = record(arguments.model.resolve())
    out = ROOT / "tests" / "golden" / f"smollm2_135m_{arguments.what}.json"
    lines = [f"{json.dumps(key)}: {compact(value)}" for key, value in (header | body).items()]
    out.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(out, out.stat().st_size, "bytes")


def compact(value: Any) -> str:
    """JSON with one line per element of a list of records, so that a change is visible in a diff."""
    if isinstance(value, list) and value and not isinstance(value[0], int | float | str):
        return "[\n" + ",\n".join(json.dumps(item, separators=(",", ":")) for item in value) + "\n]"
    return json.dumps(value)


if __name__ == "__main__":
    main()
