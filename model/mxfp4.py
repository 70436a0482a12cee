"""MXFP4 as gpt-oss publishes its experts: 32 values of 4 bits, two to a byte, share a power of two.

Every value is exact in bfloat16 and float32. Source: the OCP Microscaling Formats specification 1.0, E2M1 and E8M0;
transformers' integrations/mxfp4.py for the order of halves and axes.
"""

from collections.abc import Mapping
from dataclasses import replace

import ml_dtypes
import numpy as np

from headrace.model.errors import ModelFileError
from headrace.model.tensor_source import StoredTensor

DTYPE = "MXFP4"
GROUP = 32
_BLOCKS, _SCALES = "_blocks", "_scales"
_VALUES = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def paired(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The table of tensors with each pair of bytes, NAME_blocks [E, outputs, G, 16] and NAME_scales [E, outputs, G], as
    one tensor NAME [E, inputs, outputs], which is how the same weight lies where it is not quantized.

    Raises: ModelFileError for bytes that are no such pair.
    """
    found = {name: tensor for name, tensor in tensors.items() if tensor.dtype != "U8"}
    for name, blocks in tensors.items():
        if blocks.dtype != "U8":
            continue
        stem = name.removesuffix(_BLOCKS).removesuffix(_SCALES)
        pair = [tensors.get(stem + suffix) for suffix in (_BLOCKS, _SCALES)]
        if None in pair or not all(tensor.dtype == "U8" for tensor in pair):
            raise ModelFileError(
                blocks.path,
                f"tensor {name!r:.200} has type 'U8'; bytes are supported as {_BLOCKS} and {_SCALES} of {DTYPE} only",
            )
        if name.endswith(_SCALES):
            continue
        scales = pair[1]
        if len(scales.shape) != 3 or blocks.shape != (*scales.shape, GROUP // 2) or stem in found:
            raise ModelFileError(
                blocks.path,
                f"tensor {name!r:.200} has shape {list(blocks.shape)}; with scales of {list(scales.shape)} it must be "
                f"[experts, outputs, groups, {GROUP // 2}], and its only form in the files",
            )
        experts, outputs, groups = scales.shape
        found[stem] = replace(blocks, name=stem, dtype=DTYPE, shape=(experts, groups * GROUP, outputs), scales=scales)
    return found


def decode(raw: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """float32 [inputs, outputs] of one expert, from its blocks followed by its scales; a scale of 255 gives NaN.

    raw: uint8.
    """
    inputs, outputs = shape
    groups = outputs * inputs // GROUP
    blocks, scales = raw[: groups * GROUP // 2].reshape(groups, -1), raw[groups * GROUP // 2 :]
    values = np.empty((groups, GROUP), np.float32)
    values[:, 0::2] = _VALUES[blocks & 15]
    values[:, 1::2] = _VALUES[blocks >> 4]
    # A product that leaves float32 is infinite, and is found by whoever checks the values.
    with np.errstate(over="ignore", invalid="ignore"):
        values *= scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)[:, None]
    return values.reshape(outputs, inputs).T
