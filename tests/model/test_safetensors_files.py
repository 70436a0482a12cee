"""Safetensors: damaged and hostile headers, and shard maps checked both ways."""

import json
import random
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from headrace.model.directory import ModelDirectory
from headrace.model.errors import ModelFileError
from headrace.model.init import init_weights
from headrace.model.load import load_model
from headrace.model.safetensors_files import SafetensorsSource, read_header
from tests.model.tiny import TINY, write_hf, write_json

MEMORY_LIMIT = 16 << 20
INDEX = "model.safetensors.index.json"


def packed(header: object, data: bytes = b"", *, claimed: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if claimed is None else claimed) + text + data


def one(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8), **more: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


HOSTILE = {
    "empty": (b"", "truncated: 0 bytes"),
    "short": (b"\1\2\3", "truncated: 3 bytes"),
    "huge header": (packed({}, claimed=1 << 63), f"the header claims {1 << 63} bytes, 2 are left"),
    "long header": (packed(b"{" + b" " * (1 << 24) + b"}"), "the limit is 16777216"),
    "no header": (packed(b""), "the header is not a JSON object"),
    "not JSON": (packed(b"{nonsense}"), "not JSON"),
    "not UTF-8": (packed(b'{"\xff": 1}'), "not JSON"),
    "list": (packed([1]), "the header is not a JSON object"),
    "deep": (packed(b'{"a":' + b"[" * 100_000), "nested too deeply"),
    "name twice": (packed(b'{"a":{"dtype":"F32"},"a":{}}'), "key 'a' appears twice"),
    "metadata": (packed({"__metadata__": {"format": 1}}), "__metadata__ must be an object of strings"),
    "not an object": (packed({"a": 1}), "tensor 'a' must have dtype, shape and data_offsets"),
    "field missing": (packed({"a": {"dtype": "F32", "shape": [2]}}), "tensor 'a' must have dtype"),
    "field extra": (packed({"a": one(extra=1)}, bytes(8)), "and nothing else"),
    "integers": (packed({"a": one("I64", (1,))}, bytes(8)), "type 'I64', not supported; supported: F32, F16, BF16"),
    "type not text": (packed({"a": one(["F32"])}, bytes(8)), "has type ['F32'], not supported"),
    "negative shape": (packed({"a": one(shape=(-2, -1))}, bytes(8)), "it must be at most 8 integers from 0"),
    "fraction": (packed({"a": one(shape=(2.0,))}, bytes(8)), "it must be at most 8 integers from 0"),
    "many axes": (packed({"a": one(shape=(1,) * 9)}, bytes(8)), "it must be at most 8 integers from 0"),
    "boolean offsets": (packed({"a": one(offsets=(False, 8))}, bytes(8)), "they must be two integers from 0"),
    "three offsets": (packed({"a": one(offsets=(0, 4, 8))}, bytes(8)), "they must be two integers from 0"),
    "size": (packed({"a": one(shape=(3,))}, bytes(8)), "but F32 [3] takes 12 bytes"),
    "backwards": (packed({"a": one(offsets=(8, 0))}, bytes(8)), "takes 8 bytes"),
    "huge shape": (packed({"a": one(shape=(1 << 62, 1 << 62))}, bytes(8)), "takes"),
    "cut": (packed({"a": one()}, bytes(7)), "truncated: tensor 'a' ends at byte"),
    "huge offsets": (packed({"a": one(offsets=(1 << 63, (1 << 63) + 8))}, bytes(8)), "leaves a gap"),
    "gap": (packed({"a": one(), "b": one(offsets=(12, 20))}, bytes(20)), "tensor 'b' leaves a gap"),
    "overlap": (packed({"a": one(), "b": one(offsets=(4, 12))}, bytes(12)), "tensor 'b' overlaps the one before"),
    "same place": (packed({"a": one(), "b": one()}, bytes(8)), "tensor 'b' overlaps the one before"),
    "trailing": (packed({"a": one()}, bytes(9)), "1 bytes follow the last tensor"),
    "only data": (packed({}, bytes(3)), "3 bytes follow the last tensor"),
}


@pytest.mark.parametrize(("data", "expected"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_headers_are_refused_in_little_memory(tmp_path: Path, data: bytes, expected: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError) as caught:
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < MEMORY_LIMIT
    finally:
        tracemalloc.stop()
    assert caught.value.path == str(path) and expected in caught.value.reason


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 2), np.float16)}, path)
    data = path.read_bytes()
    assert set(read_header(path)) == {"a", "b"}
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        with pytest.raises(ModelFileError):
            read_header(path)


def test_what_is_accepted_is_what_the_safetensors_package_accepts(tmp_path: Path) -> None:
    """10,000 seeded mutations; where a header is accepted, the package reads the same table from it."""
    path = tmp_path / "model.safetensors"
    save_file({"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 2), np.float16)}, path, metadata={"format": "pt"})
    data = path.read_bytes()
    accepted = 0
    for seed in range(10_000):
        path.write_bytes(mutated(data, random.Random(seed)))
        try:
            table = read_header(path)
        except ModelFileError:
            continue
        accepted += 1
        try:
            with safe_open(path, framework="numpy") as file:
                assert set(file.keys()) == set(table)
                for name, tensor in table.items():
                    assert tuple(file.get_slice(name).get_shape()) == tensor.shape
                    assert file.get_slice(name).get_dtype() == tensor.dtype
        except SafetensorError as error:
            pytest.fail(f"seed {seed}: accepted, but the package says {error}")
    assert 100 < accepted < 9_000


def mutated(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 2)):
        at = rng.randrange(len(out) - 40)
        match rng.randrange(4):
            case 0:
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                out[at] = rng.choice(b'0123456789{}[],:"\\ -.eE')
            case 2:
                del out[at : at + rng.randint(1, 8)]
            case 3:
                out[at:at] = bytes(rng.choices(b'0123456789{}[],:" ', k=rng.randint(1, 4)))
    return bytes(out)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "model", TINY, init_weights(TINY, 1), num_shards=3)


def edit_map(directory: Path, **changes: object) -> None:
    index = json.loads((directory / INDEX).read_text())
    weight_map = {**index["weight_map"], **changes}
    index["weight_map"] = {name: shard for name, shard in weight_map.items() if shard is not None}
    write_json(directory / INDEX, index)


def refused(directory: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        load_model(directory)
    return str(caught.value)


@pytest.mark.parametrize("shard", ["../outside.safetensors", "{root}/outside.safetensors", "sub/x", "..", ""])
def test_a_shard_outside_the_directory_is_never_opened(sharded: Path, shard: str) -> None:
    save_file({"x": np.ones(1, np.float32)}, sharded.parent / "outside.safetensors")
    edit_map(sharded, x=shard.format(root=sharded.parent))
    text = refused(sharded)
    assert text.startswith(str(sharded / INDEX)) and "not a" in text


def test_a_shard_that_is_a_link_to_the_outside_is_never_opened(sharded: Path) -> None:
    shard = sharded / "model-00002-of-00003.safetensors"
    shard.rename(sharded.parent / "moved.safetensors")
    shard.symlink_to(sharded.parent / "moved.safetensors")
    assert refused(sharded).startswith(f"{shard}: a link that leads out of the model directory")


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    assert refused(sharded) == f"{sharded / 'model-00002-of-00003.safetensors'}: missing (named by {INDEX})"


def test_an_extra_shard_is_named(sharded: Path) -> None:
    save_file({"x": np.ones(1, np.float32)}, sharded / "model-00004-of-00003.safetensors")
    assert refused(sharded).startswith(f"{sharded / 'model-00004-of-00003.safetensors'}: not named by {INDEX}")


def test_a_file_in_another_naming_is_left_alone(sharded: Path) -> None:
    (sharded / "consolidated.safetensors").write_bytes(b"")
    assert load_model(sharded).config == TINY


def test_a_tensor_that_the_map_forgets_is_named(sharded: Path) -> None:
    edit_map(sharded, **{"model.norm.weight": None})
    assert f"holds tensor 'model.norm.weight', which {INDEX} does not place there" in refused(sharded)


def test_a_tensor_that_the_map_places_elsewhere_is_named(sharded: Path) -> None:
    places = json.loads((sharded / INDEX).read_text())["weight_map"]
    other = next(shard for shard in sorted(set(places.values())) if shard != places["model.norm.weight"])
    edit_map(sharded, **{"model.norm.weight": other})
    assert "tensor 'model.norm.weight'" in refused(sharded)


def test_a_tensor_that_no_shard_holds_is_named(sharded: Path) -> None:
    edit_map(sharded, **{"model.ghost": "model-00001-of-00003.safetensors"})
    assert f"lacks tensor 'model.ghost', which {INDEX} places there" in refused(sharded)


def test_a_tensor_in_two_shards_is_named(sharded: Path) -> None:
    twice = SafetensorsSource(ModelDirectory(sharded)).tensors["model.norm.weight"]
    save_file({twice.name: np.ones(64, np.float32), "x": np.ones(1, np.float32)}, sharded / "model-9.safetensors")
    edit_map(sharded, x="model-9.safetensors")
    assert "tensor 'model.norm.weight'" in refused(sharded)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"a": 1}}])
def test_an_index_without_a_map_is_refused(sharded: Path, index: object) -> None:
    write_json(sharded / INDEX, index)
    assert "weight_map must be an object" in refused(sharded)


def test_shards_without_an_index_are_refused(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    assert f"but no {INDEX}" in refused(sharded)


def test_pickles_are_refused_and_no_weights_too(tmp_path: Path) -> None:
    write_hf(tmp_path, TINY, init_weights(TINY, 1))
    (tmp_path / "model.safetensors").unlink()
    assert "no weights: neither" in refused(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02cos\nsystem\n")
    assert refused(tmp_path).startswith(f"{tmp_path / 'pytorch_model.bin'}: a pickle, which can run code")
