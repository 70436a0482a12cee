"""Record what Hugging Face transformers makes of small random models of each family: logits of every position.

    python scripts/make_golden_families.py [NAME ...]

Writes tests/golden/families/NAME.json and tests/golden/mxfp4.json. Needs an environment of its own with torch and
transformers; the records change only on request. Models run in float32 on the CPU with eager attention. Their weights
come from a seed and the names in their files (tests/golden/random_weights.py), and pass through a file like anybody's.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.golden import random_weights  # noqa: E402

SEED, NUM_TOKENS, DIGITS = 20260, 48, 8
BASE = {
    "vocab_size": 96, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 8}
YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "original_max_position_embeddings": 32,
    "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
QWEN3_MOE = BASE | EXPERTS | {"model_type": "qwen3_moe", "intermediate_size": 96, "moe_intermediate_size": 48}
MODELS: dict[str, dict[str, Any]] = {
    "llama3_rope": BASE | {"model_type": "llama", "intermediate_size": 96, "rope_parameters": LLAMA3},
    "mixtral": BASE | EXPERTS | {"model_type": "mixtral", "intermediate_size": 48},
    "mixtral_window": BASE | EXPERTS | {"model_type": "mixtral", "intermediate_size": 48, "sliding_window": 11},
    "qwen2_moe": BASE
    | {
        "model_type": "qwen2_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        "norm_topk_prob": False,
    },
    "qwen3": BASE | {"model_type": "qwen3", "intermediate_size": 96, "tie_word_embeddings": True},
    "qwen3_moe": QWEN3_MOE | {"norm_topk_prob": True},
    "qwen3_moe_plain": QWEN3_MOE | {"norm_topk_prob": False},
    "gpt_oss": BASE
    | EXPERTS
    | {
        "model_type": "gpt_oss",
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "rope_parameters": YARN,
    },
}


def stored_shapes(directory: Path) -> dict[str, list[int]]:
    """Of all tensors in the files that transformers wrote."""
    shapes: dict[str, list[int]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return dict(sorted(shapes.items()))


@torch.no_grad()
def record(values: dict[str, Any], directory: Path) -> dict[str, Any]:
    config = AutoConfig.for_model(**values)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    shapes = stored_shapes(directory)
    tensors = random_weights.draw(SEED, shapes)
    for path in directory.glob("*.safetensors"):
        path.unlink()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    model, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if any(info.get(kind) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise SystemExit(f"{values['model_type']}: the weights were not all taken: {info}")
    ids = np.random.Generator(np.random.PCG64(SEED)).integers(0, config.vocab_size, NUM_TOKENS).tolist()
    logits = model.eval()(torch.tensor([ids]), use_cache=False).logits[0]
    return {
        "config": json.loads((directory / "config.json").read_text()),
        "seed": SEED,
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, np)},
        "shapes": shapes,
        "weights_sha256": random_weights.digest(tensors),
        "ids": ids,
        "logits": [[float(f"{x:.{DIGITS}g}") for x in row] for row in logits.tolist()],
    }


def record_mxfp4() -> dict[str, Any]:
    """Two experts of 6 outputs by 64 inputs in MXFP4, and the values that transformers makes of them."""
    rng = np.random.Generator(np.random.PCG64(SEED))
    blocks = rng.integers(0, 256, (2, 6, 2, 16), np.uint8)
    scales = rng.integers(120, 134, (2, 6, 2), np.uint8)
    values = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
    return {
        "versions": {m.__name__: m.__version__ for m in (torch, transformers)},
        "blocks": blocks.tolist(),
        "scales": scales.tolist(),
        "values": values.tolist(),
    }


def write(path: Path, found: dict[str, Any]) -> None:
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main() -> None:
    folder = ROOT / "tests" / "golden" / "families"
    folder.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    write(folder.parent / "mxfp4.json", record_mxfp4())
    for name in sys.argv[1:] or MODELS:
        with tempfile.TemporaryDirectory() as directory:
            found = record(MODELS[name], Path(directory))
        write(folder / f"{name}.json", found)
        print(name, max(abs(x) for row in found["logits"] for x in row))


if __name__ == "__main__":
    main()
