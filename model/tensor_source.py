"""What loading needs from a file format: a table of stored tensors, their bytes, and how to decode them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, Protocol

import ml_dtypes
import numpy as np

from headrace.model.errors import ModelFileError
from headrace.model.family import FileFormat
from headrace.model.gguf_groups import Groups
from headrace.model.quant_form import QuantForm


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor in a file. shape: rows first. dtype: the format's own name. offset, num_bytes: in the file.

    scales: a second tensor without which the first cannot be read; its bytes follow where the first's are read.
    """

    name: str
    path: Path
    shape: tuple[int, ...]
    dtype: str
    offset: int
    num_bytes: int
    scales: "StoredTensor | None" = None

    def row(self, index: int) -> "StoredTensor":
        """One entry of the first axis, as a tensor; for formats that store values side by side."""
        num_bytes = self.num_bytes // self.shape[0]
        return replace(
            self,
            name=f"{self.name}[{index}]",
            shape=self.shape[1:],
            offset=self.offset + index * num_bytes,
            num_bytes=num_bytes,
            scales=None if self.scales is None else self.scales.row(index),
        )

    def rows(self, first: int, last: int) -> "StoredTensor":
        """Entries of the first axis, [first, last), as a tensor of the same name; as ``row``, and without scales."""
        row_bytes = self.num_bytes // self.shape[0]
        return replace(
            self,
            shape=(last - first, *self.shape[1:]),
            offset=self.offset + first * row_bytes,
            num_bytes=(last - first) * row_bytes,
        )


class TensorSource(Protocol):
    """path: the file or directory, for errors."""

    format: FileFormat

    @property
    def path(self) -> Path: ...

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...

    def decode(self, tensor: StoredTensor, raw: np.ndarray) -> np.ndarray:
        """The values of ``raw`` (uint8, num_bytes) as float32 or a type that float32 holds exactly, in its shape."""
        ...

    def form(self, tensor: StoredTensor) -> QuantForm | None:
        """What holds the tensor exactly, in groups along its last axis; None where the format has no such form."""
        ...

    def groups(self, tensor: StoredTensor, raw: np.ndarray) -> Groups:
        """Of a tensor that has a form, in the order of its values."""
        ...


def read_bytes(tensor: StoredTensor) -> np.ndarray:
    """The stored bytes of one tensor, uint8.

    Plain reads, not a memory map: a file that shrinks meanwhile gives an error instead of killing the process.
    Raises: ModelFileError.
    """
    if tensor.scales is not None:
        return np.concatenate([read_bytes(replace(tensor, scales=None)), read_bytes(tensor.scales)])
    raw = np.empty(tensor.num_bytes, np.uint8)
    view = raw.data
    try:
        with open(tensor.path, "rb", buffering=0) as file:
            file.seek(tensor.offset)
            while view:
                count = file.readinto(view)
                if not count:
                    raise ModelFileError(tensor.path, f"shrank while tensor {tensor.name!r} was read")
                view = view[count:]
    except OSError as error:
        raise ModelFileError(tensor.path, f"cannot be read: {error.strerror or error}") from error
    return raw


def count_not_finite(values: np.ndarray) -> int:
    """NaN and infinite values."""
    if values.dtype == ml_dtypes.bfloat16:
        # All bits of the exponent; four times as fast as isfinite for this type, which widens every value.
        bits = values.view(np.uint16)
        return int(np.count_nonzero(bits & 0x7F80 == 0x7F80))
    return values.size - int(np.count_nonzero(np.isfinite(values)))


def refuse_not_finite(tensor: StoredTensor, count: int) -> NoReturn:
    """NaN and infinity would spread to every token. Raises: ModelFileError."""
    raise ModelFileError(
        tensor.path, f"tensor {tensor.name!r} holds {count} NaN or infinite values of {math.prod(tensor.shape)}"
    )
