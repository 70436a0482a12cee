"""Weights one at a time: their hash, how far reading runs ahead, and what is kept of what was taken."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from headrace.model import weight_files
from headrace.model.errors import ModelFileError
from headrace.model.init import init_weights
from headrace.model.load import load_model, open_weights
from headrace.model.tensor_source import count_not_finite
from headrace.model.weight_files import config_hash
from tests.model.tiny import TINY, write_gguf, write_hf


def test_the_hash_is_of_the_configuration_and_of_every_stored_tensor(tmp_path: Path) -> None:
    """By another reader, from the definition."""
    model = load_model(write_hf(tmp_path, TINY, init_weights(TINY, 1), dtype=ml_dtypes.bfloat16))
    tensors = load_file(tmp_path / "model.safetensors")
    digests = {name: hashlib.sha256(x.tobytes()).hexdigest() for name, x in tensors.items()}
    leaves = sorted([name, "BF16", list(x.shape), digests[name]] for name, x in tensors.items())
    defaults = {field.name: field.default for field in fields(model.config)}
    stated = {
        name: value for name, value in asdict(model.config).items() if getattr(model.config, name) != defaults[name]
    }
    root = json.dumps({"config": stated, "tensors": leaves}, sort_keys=True)
    assert model.model_hash == hashlib.sha256(root.encode()).hexdigest()
    assert model.digests == digests
    files = open_weights(tmp_path)
    assert files.stored_types == {}
    list(files.stream(list(files.specs)))
    assert files.stored_types == {"BF16": len(tensors)}


def test_a_field_that_a_later_version_adds_changes_no_hash() -> None:
    @dataclass(frozen=True)
    class Later:
        family: str
        router: object = None
        added: int = 0

    @dataclass(frozen=True)
    class Router:
        scale: int = 1
        added: bool = False

    plain = config_hash(Later("x"))  # type: ignore[arg-type]
    assert plain == hashlib.sha256(b'{"family": "x"}').hexdigest()
    assert (
        config_hash(Later("x", Router(2)))
        == hashlib.sha256(  # type: ignore[arg-type]
            b'{"family": "x", "router": {"scale": 2}}'
        ).hexdigest()
    )
    assert config_hash(Later("x", added=1)) != plain  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_small_blocks_give_the_same_weights_and_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Blocks of a few rows, also where llama.cpp's order is put right within heads of 16 rows."""
    weights = init_weights(TINY, 1)
    if kind == "gguf":
        path = write_gguf(tmp_path / "m.gguf", TINY, weights, gguf.GGMLQuantizationType.Q8_0)
    else:
        path = write_hf(tmp_path, TINY, weights)
    whole = load_model(path)
    monkeypatch.setattr(weight_files, "BLOCK_BYTES", 700)
    parts = load_model(path)
    assert (parts.model_hash, parts.digests) == (whole.model_hash, whole.digests)
    for a, b in zip(whole.weights.layers, parts.weights.layers, strict=True):
        assert all(np.array_equal(x, getattr(b, name)) for name, x in vars(a).items() if x is not None)


def test_what_is_not_finite_is_counted_over_all_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = init_weights(TINY, 1)
    weights.embed_VD[3, 5] = weights.embed_VD[90, 1] = np.nan
    monkeypatch.setattr(weight_files, "BLOCK_BYTES", 700)
    with pytest.raises(ModelFileError, match=r"'model\.embed_tokens\.weight' holds 2 NaN or infinite values of 6144"):
        load_model(write_hf(tmp_path, TINY, weights))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_counting_what_is_not_finite(dtype: type) -> None:
    assert count_not_finite(np.array([[0, -1.5], [np.nan, np.inf], [-np.inf, 3e4]], dtype)) == 3


def test_weights_come_in_the_order_that_was_asked_for(tmp_path: Path) -> None:
    files = open_weights(write_hf(tmp_path, TINY, init_weights(TINY, 1)))
    names = list(files.specs)[::-1]
    assert [spec.name for spec, _ in files.stream(names)] == names
    with pytest.raises(RuntimeError, match="1 weights were not read, such as embed_VD"):
        other = open_weights(tmp_path)
        list(other.stream([name for name in names if name != "embed_VD"]))
        _ = other.model_hash


class Job:
    def __init__(self, size: int) -> None:
        self.size = size

    def result(self) -> int:
        return self.size


@pytest.mark.parametrize("sizes", [[3, 3, 3, 3, 3], [1, 9, 1, 1, 9, 9, 1], [12, 1, 1, 12], []])
def test_jobs_run_ahead_within_the_bound(monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> None:
    monkeypatch.setattr(weight_files, "AHEAD_BYTES", 10)
    started: list[int] = []

    def start(size: int) -> Callable[[], Job]:
        def begin() -> Job:
            started.append(size)
            return Job(size)

        return begin

    limit, most, taken = max(10, *sizes, 0), 0, []
    for size in weight_files.ahead([start(size) for size in sizes], sizes):
        held = sum(started) - sum(taken)
        most = max(most, held)
        taken.append(size)
        assert held <= limit
    assert taken == started == sizes
    assert most > max(sizes, default=0) or not sizes or sizes[0] == 12
