"""Host memory while a model of 4 GiB comes onto a mesh of 8 CPU devices, whose memory is the host's too.

Random bfloat16 weights in four safetensors files, and the Orbax checkpoint of the same, each onto ``tensor=8`` with
layers as they come and stacked. A process per case: the peak of its resident memory above what JAX itself takes must
stay below the weights and 1 GiB. Files are read, not mapped, so their pages do not count.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from scripts import evidence

LIMIT_BEYOND_WEIGHTS = 1 << 30
NUM_DEVICES = 8
FILES = 4
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "num_hidden_layers": 10,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""4.1 GiB: ten layers of Llama-3.1-8B, with a small vocabulary."""


def write_model(folder: Path) -> None:
    """Values of either sign between 2**-7 and 2**-5: finite, and quick to draw."""
    from headrace.model.config_files import config_from_directory
    from headrace.model.directory import ModelDirectory
    from headrace.model.specs import param_specs

    (folder / "config.json").write_text(json.dumps(CONFIG))
    specs = jax.tree.leaves(param_specs(config_from_directory(ModelDirectory(folder)), ml_dtypes.bfloat16))
    generator = np.random.Generator(np.random.PCG64(4))
    weight_map: dict[str, str] = {}
    for number in range(FILES):
        mine, offset = specs[number::FILES], 0
        name = f"model-{number + 1:05}-of-{FILES:05}.safetensors"
        entries = {}
        for spec in mine:
            size = 2 * int(np.prod(spec.stored_shape))
            entries[spec.source.hf] = {
                "dtype": "BF16", "shape": list(spec.stored_shape), "data_offsets": [offset, offset + size],
            }  # fmt: skip
            offset += size
        header = json.dumps(entries).encode()
        with open(folder / name, "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for spec in mine:
                bits = generator.integers(0, 1 << 16, int(np.prod(spec.stored_shape)), np.uint16)
                file.write(((bits & 0x80FF) | 0x3C00).tobytes())
        weight_map |= {spec.source.hf: name for spec in mine}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def load(folder: Path, *, stacked: bool) -> dict[str, object]:
    """In this process: what loading takes. Resident memory is read from /proc, its peak set back before."""
    from headrace.serving.runner.backend import Backend, find_device, find_mesh
    from headrace.serving.runner.load import load_placed
    from headrace.sharding.mesh_shape import MeshShape

    shape = MeshShape(tensor=NUM_DEVICES)
    device = find_device("cpu", min_cpus=NUM_DEVICES)
    backend = Backend(
        device=device, mesh=find_mesh(device, shape), dtype=np.dtype(ml_dtypes.bfloat16), scan_layers=stacked
    )
    jax.block_until_ready(jax.device_put(np.zeros(1024, np.float32), backend.sharding()))
    calls: list[tuple[int, int]] = []
    Path("/proc/self/clear_refs").write_text("5")
    before, started_s = _memory("VmRSS"), time.monotonic()
    model = load_placed(folder, backend, lambda done, total: calls.append((done, total)))
    jax.block_until_ready(model.weights)
    seconds, peak = time.monotonic() - started_s, _memory("VmHWM") - before
    leaves = jax.tree.leaves(model.weights)
    weights = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    kept = _memory("VmRSS") - before
    return {
        "weights_bytes": weights,
        "peak_bytes": peak,
        "beyond_weights_bytes": peak - weights,
        "kept_bytes": kept,
        "largest_leaf_bytes": max(leaf.nbytes for leaf in leaves),
        "before_bytes": before,
        "seconds": round(seconds, 1),
        "progress_calls": len(calls),
        "progress_ends_at": list(calls[-1]),
        "model_hash": model.model_hash,
        "checksum": sum(_checksum(leaf) for leaf in leaves),
    }


def _checksum(leaf: jax.Array) -> int:
    """The sum of all bits, as 16- or 32-bit words: layers as they come and stacked have the same."""
    parts = {str(shard.index): np.asarray(shard.data) for shard in leaf.addressable_shards}
    return sum(int(part.view(f"u{part.itemsize}").sum(dtype=np.uint64)) for part in parts.values())


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def in_child(folder: Path, *, stacked: bool) -> dict[str, object]:
    command = [sys.executable, "-m", "scripts.check_load_memory", "--out", "-", "--child", str(folder)]
    done = subprocess.run(command + ["--stacked"] * stacked, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def write_checkpoint(folder: Path, target: Path) -> None:
    command = [sys.executable, "-m", "headrace", "checkpoint", str(folder), str(target), "--device", "cpu"]
    command += ["--mesh", f"tensor={NUM_DEVICES}", "--dtype", "bfloat16"]
    subprocess.run(command, check=True)


def main() -> int:
    parser = evidence.arguments(__doc__)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stacked", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(load(args.child, stacked=args.stacked)))
        return 0
    with tempfile.TemporaryDirectory() as name:
        source, checkpoint = Path(name) / "model", Path(name) / "checkpoint"
        source.mkdir()
        write_model(source)
        write_checkpoint(source, checkpoint)
        cases = {
            f"{what}, {'stacked' if stacked else 'layers as they come'}": in_child(folder, stacked=stacked)
            for what, folder in (("safetensors", source), ("orbax", checkpoint))
            for stacked in (False, True)
        }
    passed = all(case["beyond_weights_bytes"] < LIMIT_BEYOND_WEIGHTS for case in cases.values())
    return evidence.write(args.out, passed, limit_beyond_weights_bytes=LIMIT_BEYOND_WEIGHTS, cases=cases)


if __name__ == "__main__":
    raise SystemExit(main())
