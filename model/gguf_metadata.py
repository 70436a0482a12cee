"""Read the header of a GGUF file: fields and the table of tensors, nothing of their data.

The file is untrusted. Every count and length is checked against the bytes that are left in the file and against a
bound before anything of that size is made, so time and memory stay within a small multiple of the header's size.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from headrace.model.errors import ModelFileError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_HEADER_BYTES = 1 << 28
MAX_FIELDS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_KEY_BYTES = (1 << 16) - 1
MAX_STRING_BYTES = 1 << 26
# The largest vocabularies (262,144 tokens with scores, types and merges) need about 1.3 million.
MAX_ARRAY_ELEMENTS = 1 << 22
MAX_TENSOR_NAME_BYTES = 64
MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 20

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: Mapping[int, struct.Struct] = MappingProxyType(
    {i: struct.Struct("<" + code) for i, code in zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIifBQqd", strict=True)}
)
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_TENSOR_COUNT = len(MAGIC) + _U32.size
"""Where it stands in a file, as a u64."""
# The least that a field (key length, key byte, type, value byte) or a tensor entry can take.
_MIN_FIELD_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Where one tensor lies.

    shape: rows first (the reverse of the file's order), so that the last axis is contiguous and holds the quantized
    groups. offset: from the start of the file, in bytes.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFile:
    """A header whose every tensor lies inside the file, aligned and apart from the others.

    fields: values are int, float, bool, str, or a list of one of these. fields_end: where they end in the file.
    """

    path: Path
    version: int
    fields: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    data_offset: int
    file_bytes: int
    fields_end: int = 0


def read_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Read and check the header of a GGUF file.

    Raises: ModelFileError, for anything that is not a whole, well-formed GGUF file of version 2 or 3.
    """
    file_path = Path(path)
    try:
        # A pipe or device would block or never end.
        if not stat.S_ISREG(os.stat(file_path).st_mode):
            raise ModelFileError(path, "not a regular file")
        with open(file_path, "rb") as file:
            return _Parser(file_path, file).parse()
    except OSError as error:
        raise ModelFileError(path, f"cannot be read: {error.strerror or error}") from error


def write_fields(gguf: GGUFFile, path: Path) -> None:
    """A GGUF file with the fields of another, byte by byte, and no tensors. Raises: ModelFileError."""
    try:
        with open(gguf.path, "rb") as file:
            data = file.read(gguf.fields_end)
        if len(data) < gguf.fields_end:
            raise ModelFileError(gguf.path, "shrank while its fields were copied")
        path.write_bytes(data[:_TENSOR_COUNT] + bytes(_U64.size) + data[_TENSOR_COUNT + _U64.size :])
    except OSError as error:
        raise ModelFileError(gguf.path, f"its fields cannot be copied: {error.strerror or error}") from error


class _Parser:
    def __init__(self, path: Path, file: BufferedReader) -> None:
        self.path = path
        self.file = file
        self.size = os.fstat(file.fileno()).st_size
        self.position = 0
        self.array_elements = 0

    def fail(self, reason: str) -> NoReturn:
        raise ModelFileError(self.path, reason)

    def take(self, count: int, what: str) -> bytes:
        left = self.size - self.position
        if count > left:
            self.fail(f"truncated: {what} needs {count} bytes at offset {self.position}, {left} are left")
        if self.position + count > MAX_HEADER_BYTES:
            self.fail(f"the header is longer than {MAX_HEADER_BYTES} bytes (at {what})")
        data = self.file.read(count)
        if len(data) != count:
            self.fail(f"truncated: the file shrank while {what} was read at offset {self.position}")
        self.position += count
        return data

    def scalar(self, kind: struct.Struct, what: str) -> Any:
        return kind.unpack(self.take(kind.size, what))[0]

    def string(self, what: str, max_bytes: int) -> str:
        length = self.scalar(_U64, f"the length of {what}")
        left = self.size - self.position
        if length > left:
            self.fail(f"truncated: {what} claims {length} bytes at offset {self.position}, {left} are left")
        if length > max_bytes:
            self.fail(f"{what} has {length} bytes; the limit is {max_bytes}")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8 at byte {error.start}")

    def parse(self) -> GGUFFile:
        if self.take(4, "the magic number") != MAGIC:
            self.fail("not a GGUF file: it does not start with 'GGUF'")
        version = self.scalar(_U32, "the version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            order = " (a big-endian file)" if swapped in VERSIONS else ""
            self.fail(f"GGUF version {version}{order} is not supported; versions 2 and 3, little-endian, are")
        num_tensors = self.count("tensor count", MAX_TENSORS, _MIN_TENSOR_BYTES)
        num_fields = self.count("field count", MAX_FIELDS, _MIN_FIELD_BYTES)
        fields: dict[str, Any] = {}
        for index in range(num_fields):
            key = self.string(f"the key of field {index}", MAX_KEY_BYTES)
            if not key:
                self.fail(f"the key of field {index} is empty")
            if key in fields:
                self.fail(f"field {key!r:.100} appears twice")
            fields[key] = self.value(f"field {key!r:.100}")
        alignment, fields_end = self.alignment(fields), self.position
        entries = [self.tensor_entry(index) for index in range(num_tensors)]
        data_offset = -(-self.position // alignment) * alignment
        tensors = self.placed(entries, data_offset, alignment)
        return GGUFFile(
            path=self.path,
            version=version,
            fields=MappingProxyType(fields),
            tensors=MappingProxyType(tensors),
            data_offset=data_offset,
            file_bytes=self.size,
            fields_end=fields_end,
        )

    def count(self, what: str, limit: int, min_bytes: int) -> int:
        value = self.scalar(_U64, f"the {what}")
        left = self.size - self.position
        if value > limit:
            self.fail(f"the {what} is {value}; the limit is {limit}")
        if value * min_bytes > left:
            self.fail(f"truncated: the {what} is {value}, which needs {value * min_bytes} bytes; {left} are left")
        return int(value)

    def value(self, what: str) -> Any:
        kind = self.scalar(_U32, f"the type of {what}")
        if kind == _ARRAY:
            return self.array(what)
        if kind == _STRING:
            return self.string(what, MAX_STRING_BYTES)
        if kind not in _SCALARS:
            self.fail(f"{what} has unknown type {kind}")
        value = self.scalar(_SCALARS[kind], what)
        return self.boolean(value, what) if kind == _BOOL else value

    def boolean(self, value: int, what: str) -> bool:
        if value not in (0, 1):
            self.fail(f"{what} is a boolean with value {value}")
        return value == 1

    def array(self, what: str) -> list[Any]:
        kind = self.scalar(_U32, f"the element type of {what}")
        if kind == _ARRAY:
            self.fail(f"{what} is an array of arrays, which is not supported")
        if kind != _STRING and kind not in _SCALARS:
            self.fail(f"{what} has unknown element type {kind}")
        element_bytes = 8 if kind == _STRING else _SCALARS[kind].size
        limit = MAX_ARRAY_ELEMENTS - self.array_elements
        length = self.count(f"element count of {what}", limit, element_bytes)
        self.array_elements += length
        if kind == _STRING:
            return [self.string(f"element {i} of {what}", MAX_STRING_BYTES) for i in range(length)]
        code = _SCALARS[kind].format[1:]
        values = list(struct.unpack(f"<{length}{code}", self.take(length * element_bytes, what)))
        return [self.boolean(value, what) for value in values] if kind == _BOOL else values

    def alignment(self, fields: Mapping[str, Any]) -> int:
        value = fields.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(value) is not int or not 1 <= value <= _MAX_ALIGNMENT or value & (value - 1):
            self.fail(f"field 'general.alignment' is {value!r:.60}; it must be a power of two up to {_MAX_ALIGNMENT}")
        return value

    def tensor_entry(self, index: int) -> TensorInfo:
        """One entry of the table; its offset is still relative to the data."""
        name = self.string(f"the name of tensor {index}", MAX_TENSOR_NAME_BYTES)
        if not name:
            self.fail(f"the name of tensor {index} is empty")
        what = f"tensor {name!r}"
        num_dims = self.scalar(_U32, f"the dimension count of {what}")
        if not 1 <= num_dims <= MAX_DIMS:
            self.fail(f"{what} has {num_dims} dimensions; it must have 1 to {MAX_DIMS}")
        shape = tuple(int(self.scalar(_U64, f"a dimension of {what}")) for _ in range(num_dims))[::-1]
        kind = self.scalar(_U32, f"the type of {what}")
        offset = self.scalar(_U64, f"the offset of {what}")
        num_elements = 1
        for dim in shape:
            num_elements *= dim
        if num_elements == 0:
            self.fail(f"{what} of shape {list(shape)} is empty")
        try:
            ggml_type = GGMLQuantizationType(kind)
            group, group_bytes = GGML_QUANT_SIZES[ggml_type]
        except (ValueError, KeyError):
            self.fail(f"{what} has unknown type {kind}")
        if shape[-1] % group:
            self.fail(f"{what} of type {ggml_type.name} has rows of {shape[-1]}; they must be a multiple of {group}")
        num_bytes = num_elements // group * group_bytes
        return TensorInfo(name=name, shape=shape, ggml_type=ggml_type, offset=offset, num_bytes=num_bytes)

    def placed(self, entries: list[TensorInfo], data_offset: int, alignment: int) -> dict[str, TensorInfo]:
        """Tensors with absolute offsets, after checking that they lie in the file and apart."""
        tensors: dict[str, TensorInfo] = {}
        for entry in entries:
            if entry.name in tensors:
                self.fail(f"tensor {entry.name!r} appears twice")
            if entry.offset % alignment:
                self.fail(f"tensor {entry.name!r} has offset {entry.offset}, not a multiple of {alignment}")
            start = data_offset + entry.offset
            if start + entry.num_bytes > self.size:
                self.fail(
                    f"tensor {entry.name!r} is outside the file: bytes {start} to {start + entry.num_bytes} of "
                    f"{self.size}; the file is truncated or its header damaged"
                )
            tensors[entry.name] = TensorInfo(
                name=entry.name,
                shape=entry.shape,
                ggml_type=entry.ggml_type,
                offset=start,
                num_bytes=entry.num_bytes,
            )
        end, last = data_offset, "the header"
        for tensor in sorted(tensors.values(), key=lambda t: t.offset):
            if tensor.offset < end:
                self.fail(f"tensor {tensor.name!r} overlaps {last} at offset {tensor.offset}")
            end, last = tensor.offset + tensor.num_bytes, f"tensor {tensor.name!r}"
        # Writers pad the last tensor to the alignment; more than that is data that nobody declared.
        if tensors and self.size - end >= alignment:
            self.fail(f"{self.size - end} bytes follow the last tensor; no tensor claims them")
        return tensors
