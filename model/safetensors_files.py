"""Weights in Hugging Face safetensors: one file, or shards with an index that is checked both ways.

The header is checked here, byte range by byte range, and tensors are read with plain reads at the checked offsets.
Source: https://github.com/huggingface/safetensors#format
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from headrace.model import mxfp4
from headrace.model.directory import PICKLE_REFUSAL, PICKLE_SUFFIXES, ModelDirectory, parse_json_object
from headrace.model.errors import ModelFileError
from headrace.model.family import FileFormat
from headrace.model.gguf_groups import Groups
from headrace.model.quant_form import QuantForm
from headrace.model.tensor_source import StoredTensor

# A shard of the largest published models has a header below 1 MB.
MAX_HEADER_BYTES = 1 << 24
_MAX_DIMS = 8
_DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "F32": np.dtype(np.float32),
        "F16": np.dtype(np.float16),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "U8": np.dtype(np.uint8),
    }
)
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# Weights in another naming, which some publishers put beside the shards.
_OTHER_NAMING = "consolidated"


class SafetensorsSource:
    """All tensors of a model directory. Raises: ModelFileError."""

    format = FileFormat.HF

    def __init__(self, directory: ModelDirectory) -> None:
        self.path: Path = directory.path
        files = [name for name in directory.names((".safetensors",)) if not name.startswith(_OTHER_NAMING)]
        if directory.has(_INDEX):
            tensors = _sharded(directory, files)
        elif files == [_SINGLE]:
            tensors = read_header(directory.file(_SINGLE))
        elif files:
            raise ModelFileError(
                directory.path, f"holds {files[0]!r} but no {_INDEX}; weights are {_SINGLE}, or shards with an index"
            )
        elif pickles := directory.names(PICKLE_SUFFIXES):
            raise ModelFileError(directory.path / pickles[0], PICKLE_REFUSAL)
        else:
            raise ModelFileError(directory.path, f"no weights: neither {_SINGLE} nor {_INDEX}")
        self.tensors: Mapping[str, StoredTensor] = MappingProxyType(mxfp4.paired(tensors))

    def decode(self, tensor: StoredTensor, raw: np.ndarray) -> np.ndarray:
        if tensor.dtype == mxfp4.DTYPE:
            return mxfp4.decode(raw, tensor.shape)
        return raw.view(_DTYPES[tensor.dtype]).reshape(tensor.shape)

    def form(self, tensor: StoredTensor) -> QuantForm | None:
        """Experts in MXFP4 are dequantized: every one of their values is exact in bfloat16."""
        return None

    def groups(self, tensor: StoredTensor, raw: np.ndarray) -> Groups:
        raise ValueError(f"{tensor.name} has no form")


def _sharded(directory: ModelDirectory, files: list[str]) -> dict[str, StoredTensor]:
    index_path = directory.path / _INDEX
    weight_map = directory.read_json(_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ModelFileError(index_path, "weight_map must be an object from tensor name to file name")
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if not shard.endswith(".safetensors"):
            raise ModelFileError(index_path, f"names {shard!r:.200}, which is not a .safetensors file")
    paths = {shard: directory.file(shard, named_by=index_path) for shard in shards}
    for name in files:
        if name not in paths:
            raise ModelFileError(directory.path / name, f"not named by {_INDEX}; remove one of the two")
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        for name, tensor in read_header(paths[shard]).items():
            if name in tensors:
                raise ModelFileError(paths[shard], f"tensor {name!r} is also in {tensors[name].path.name}")
            if weight_map.get(name) != shard:
                raise ModelFileError(paths[shard], f"holds tensor {name!r}, which {_INDEX} does not place there")
            tensors[name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors:
            raise ModelFileError(paths[shard], f"lacks tensor {name!r:.200}, which {_INDEX} places there")
    return tensors


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The table of tensors of one safetensors file, each inside the file and all of it covered once.

    Raises: ModelFileError.
    """
    try:
        size = os.stat(path).st_size
        with open(path, "rb") as file:
            head = file.read(8)
            if len(head) < 8:
                raise ModelFileError(path, f"truncated: {size} bytes, fewer than the length of the header takes")
            length = int.from_bytes(head, "little")
            if length > size - 8:
                raise ModelFileError(path, f"truncated: the header claims {length} bytes, {size - 8} are left")
            if length > MAX_HEADER_BYTES:
                raise ModelFileError(path, f"the header has {length} bytes; the limit is {MAX_HEADER_BYTES}")
            header = file.read(length)
    except OSError as error:
        raise ModelFileError(path, f"cannot be read: {error.strerror or error}") from error
    if len(header) < length or not header.startswith(b"{"):
        raise ModelFileError(path, "the header is not a JSON object")
    entries = parse_json_object(header, path)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ModelFileError(path, "__metadata__ must be an object of strings")
    tensors = {name: _entry(path, name, entry, 8 + length) for name, entry in entries.items()}
    _check_cover(path, tensors, 8 + length, size)
    return tensors


def _entry(path: Path, name: str, entry: Any, data_offset: int) -> StoredTensor:
    what = f"tensor {name!r:.200}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ModelFileError(path, f"{what} must have dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ModelFileError(path, f"{what} has type {dtype!r:.60}, not supported; supported: {', '.join(_DTYPES)}")
    if not _naturals(shape) or len(shape) > _MAX_DIMS:
        raise ModelFileError(path, f"{what} has shape {shape!r:.100}; it must be at most {_MAX_DIMS} integers from 0")
    if not _naturals(offsets) or len(offsets) != 2:
        raise ModelFileError(path, f"{what} has data_offsets {offsets!r:.100}; they must be two integers from 0")
    num_bytes = math.prod(shape) * _DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != num_bytes:
        raise ModelFileError(path, f"{what} has data_offsets {offsets}, but {dtype} {shape} takes {num_bytes} bytes")
    return StoredTensor(
        name=name,
        path=path,
        shape=tuple(shape),
        dtype=dtype,
        offset=data_offset + offsets[0],
        num_bytes=num_bytes,
    )


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_cover(path: Path, tensors: Mapping[str, StoredTensor], data_offset: int, size: int) -> None:
    """Each byte of the data belongs to exactly one tensor, as the format demands."""
    end = data_offset
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.num_bytes)):
        if tensor.offset != end:
            kind = "overlaps the one before" if tensor.offset < end else "leaves a gap after the one before"
            raise ModelFileError(path, f"tensor {tensor.name!r:.200} {kind}: it starts at {tensor.offset}, not {end}")
        end += tensor.num_bytes
        if end > size:
            raise ModelFileError(
                path, f"truncated: tensor {tensor.name!r:.200} ends at byte {end}, the file has {size}"
            )
    if end != size:
        raise ModelFileError(path, f"{size - end} bytes follow the last tensor; no tensor claims them")
