"""O35: a damaged, truncated or hostile model ends the command soon, with file and reason and without a traceback.

What is wrong in which way is tried by the hundreds in tests/model; here is how a user meets it.
"""

import json
import os
import pickle
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.cases.tiny_model import write_tiny
from tests.model.gguf_bytes import ARRAY, UINT8, UINT32, array, field, head, u32

LIMIT_S = 30.0
MEMORY_LIMIT_KB = 1 << 20
"""The engine process with JAX and no model takes about 400 MB."""
HUGE = 1 << 63


@dataclass(frozen=True)
class Run:
    exit_code: int
    stdout: str
    stderr: str
    seconds: float
    peak_kb: int
    marker: Path


@dataclass(frozen=True)
class Damage:
    """make: writes the model under a directory and returns what is given to the command. says: parts of the message."""

    make: Callable[[Path], Path]
    says: tuple[str, ...]
    command: str = "serve"


def gguf(data: bytes) -> Callable[[Path], Path]:
    def make(directory: Path) -> Path:
        path = directory / "broken.gguf"
        path.write_bytes(data)
        return path

    return make


def tiny(change: Callable[[Path], object], *, num_shards: int = 1) -> Callable[[Path], Path]:
    def make(directory: Path) -> Path:
        model = write_tiny(directory / "model", num_shards=num_shards)
        change(model)
        return model

    return make


def cut_gguf(directory: Path) -> Path:
    from headrace.model.pull import DEFAULT_MODEL, resolve_model

    path = directory / "broken.gguf"
    with resolve_model(DEFAULT_MODEL).path.open("rb") as whole:
        path.write_bytes(whole.read(20 << 20))
    return path


def header_length(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(struct.pack("<Q", HUGE) + path.read_bytes()[8:])


def cut(model: Path) -> None:
    path = model / "model.safetensors"
    os.truncate(path, path.stat().st_size - 5)


def append(model: Path) -> None:
    with (model / "model.safetensors").open("ab") as file:
        file.write(b"12345")


def nan(model: Path) -> None:
    path = model / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    save_file(tensors, path)


def lose_shard(model: Path) -> None:
    (model / "model-00002-of-00003.safetensors").unlink()


def shard_elsewhere(model: Path) -> None:
    path = model / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    secret = model.parent / "outside.safetensors"
    (model / "model-00002-of-00003.safetensors").rename(secret)
    moved = {k: "../outside.safetensors" if "00002" in v else v for k, v in index["weight_map"].items()}
    path.write_text(json.dumps(index | {"weight_map": moved}))


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.marker,)


def only_pickle(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(model.parent / "marker")))


def pickle_as_safetensors(model: Path) -> None:
    (model / "model.safetensors").write_bytes(pickle.dumps(Bomb(model.parent / "marker")))


def other_vocabulary(model: Path) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 512}))


DAMAGES = {
    "cut in the weights": Damage(cut_gguf, ("broken.gguf", "outside the file")),
    "huge array": Damage(
        gguf(head(fields=1) + field("a", ARRAY, array(UINT8, HUGE))), ("broken.gguf", "'a'", str(HUGE))
    ),
    "empty key": Damage(gguf(head(fields=1) + field("", UINT32, u32(1))), ("broken.gguf", "key", "empty")),
    "unknown type": Damage(gguf(head(fields=1) + field("a", 13, u32(1))), ("broken.gguf", "type 13"), "generate"),
    "empty file": Damage(gguf(b""), ("broken.gguf", "not a GGUF file"), "generate"),
    "header length": Damage(tiny(header_length), ("model.safetensors", str(HUGE))),
    "cut": Damage(tiny(cut), ("model.safetensors", "truncated")),
    "trailing bytes": Damage(tiny(append), ("model.safetensors", "5 bytes follow")),
    "not a number": Damage(tiny(nan), ("model.safetensors", "model.layers.1.mlp.up_proj.weight"), "generate"),
    "a shard is missing": Damage(tiny(lose_shard, num_shards=3), ("model-00002-of-00003.safetensors",)),
    "a shard outside": Damage(tiny(shard_elsewhere, num_shards=3), ("index.json", "../outside.safetensors")),
    "config is no JSON": Damage(tiny(lambda m: (m / "config.json").write_text("{,")), ("config.json", "not JSON")),
    "no tokenizer": Damage(tiny(lambda m: (m / "tokenizer.json").unlink()), ("tokenizer.json", "missing")),
    "another vocabulary": Damage(tiny(other_vocabulary), ("model",)),
    "only a pickle": Damage(tiny(only_pickle), ("model", "safetensors")),
    "a pickle by another name": Damage(tiny(pickle_as_safetensors), ("model.safetensors",)),
}


MEASURE = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[2:], stdin=subprocess.DEVNULL)
open(sys.argv[1], "w").write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
sys.exit(code if code >= 0 else 128 - code)
"""
"""A small process between, because a child starts its count with the memory of the process that it is forked from."""


def run(damage: Damage, directory: Path) -> Run:
    path = damage.make(directory)
    options = ["--port", "0", str(path)] if damage.command == "serve" else ["prompt", "--model", str(path)]
    command = [sys.executable, "-m", "headrace", damage.command, *options, "--no-compile-cache"]
    peak = directory / "peak"
    started_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(peak), *command], capture_output=True, text=True, timeout=4 * LIMIT_S
    )
    seconds = time.monotonic() - started_s
    return Run(done.returncode, done.stdout, done.stderr, seconds, int(peak.read_text()), directory / "marker")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """All of them, two at a time."""
    folder = tmp_path_factory.mktemp("o35")
    with ThreadPoolExecutor(2) as pool:
        futures = {}
        for number, (name, damage) in enumerate(DAMAGES.items()):
            directory = folder / str(number)
            directory.mkdir()
            futures[name] = pool.submit(run, damage, directory)
        yield {name: future.result() for name, future in futures.items()}


@pytest.mark.parametrize("name", DAMAGES)
def test_the_command_ends_with_file_and_reason(runs: dict[str, Run], name: str) -> None:
    found = runs[name]
    assert found.exit_code in (1, 2), (found.exit_code, found.stderr)
    assert found.stdout == ""
    assert found.seconds < LIMIT_S
    assert found.peak_kb < MEMORY_LIMIT_KB
    assert "Traceback" not in found.stderr, found.stderr
    message = " ".join(found.stderr.split())
    for part in DAMAGES[name].says:
        assert part in message, found.stderr
    assert not found.marker.exists(), "a pickle was loaded"
