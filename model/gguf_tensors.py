"""Tensors of a GGUF file, dequantized to float32 by the ``gguf`` package, or as the small integers that they are."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType

from headrace.model.errors import ModelFileError
from headrace.model.family import FileFormat
from headrace.model.gguf_groups import Groups, groups_of
from headrace.model.gguf_metadata import GGUFFile
from headrace.model.quant_form import GGUF_FORMS, QuantForm
from headrace.model.tensor_source import StoredTensor

SUPPORTED_TYPES = ("F32", "F16", "BF16", *GGUF_FORMS)
# The package walks its input 16 rows at a time; with rows of about this many bytes its temporaries stay in the cache
# and Python's overhead is small (measured on SmolLM2: 1 GB/s of values, against 0.4 GB/s row by row).
_ROW_BYTES = 1 << 12


class GGUFSource:
    format = FileFormat.GGUF

    def __init__(self, gguf_file: GGUFFile) -> None:
        self.path: Path = gguf_file.path
        self.tensors: Mapping[str, StoredTensor] = MappingProxyType(
            {
                info.name: StoredTensor(
                    name=info.name,
                    path=gguf_file.path,
                    shape=info.shape,
                    dtype=info.ggml_type.name,
                    offset=info.offset,
                    num_bytes=info.num_bytes,
                )
                for info in gguf_file.tensors.values()
            }
        )

    def form(self, tensor: StoredTensor) -> QuantForm | None:
        return GGUF_FORMS.get(tensor.dtype)

    def groups(self, tensor: StoredTensor, raw: np.ndarray) -> Groups:
        return groups_of(raw, tensor.dtype)

    def decode(self, tensor: StoredTensor, raw: np.ndarray) -> np.ndarray:
        if tensor.dtype not in SUPPORTED_TYPES:
            raise ModelFileError(
                self.path,
                f"tensor {tensor.name!r} has type {tensor.dtype}, which is not supported; "
                f"supported: {', '.join(SUPPORTED_TYPES)}",
            )
        ggml_type = GGMLQuantizationType[tensor.dtype]
        _, group_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
        num_groups = raw.size // group_bytes
        # NaN and infinite scales are legal bits here; the finished values are checked by the caller.
        with np.errstate(invalid="ignore", over="ignore"):
            return _dequantize(raw.reshape(num_groups, group_bytes), ggml_type).reshape(tensor.shape)


def _dequantize(groups: np.ndarray, ggml_type: GGMLQuantizationType) -> np.ndarray:
    num_groups, group_bytes = groups.shape
    per_row = max(1, _ROW_BYTES // group_bytes)
    whole = num_groups // per_row * per_row
    parts = [groups[:whole].reshape(-1, per_row * group_bytes), groups[whole:].reshape(-1, group_bytes)]
    values = [gguf.dequantize(part, ggml_type).reshape(-1) for part in parts if part.size]
    return values[0] if len(values) == 1 else np.concatenate(values)
