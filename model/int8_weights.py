"""Weights as 8-bit integers with a factor for each output channel, made on the host.

``pallas_kernels/quant_matmul/quantize.py`` rounds to the same integers and factors, bit for bit.
"""

import numpy as np

from headrace.model.specs import ParamSpec
from headrace.pallas_kernels.types import GroupQuant

LARGEST = 127
"""Symmetric: -128 is left out."""


def quantize_channels(spec: ParamSpec, values: np.ndarray) -> GroupQuant:
    """The nearest weight of this form.

    Args:
      spec: of a quantized weight. values: finite floats [..., K, N] of one layer, of one expert or of many; float32
        where the file has it so, since what is rounded to ``spec.dtype`` first is rounded twice.
    Returns: int8 values of the same shape, float32 factors [..., 1, N]: the largest of a column becomes 127. NumPy's.
    """
    level = np.array(values, np.float32)
    scale = np.abs(level).max(axis=-2, keepdims=True) * np.float32(1 / LARGEST)
    level *= 1 / np.where(scale > 0, scale, np.float32(1))  # a column of zeros has factor 0
    np.clip(np.rint(level, out=level), -LARGEST, LARGEST, out=level)
    return GroupQuant(level.astype(np.int8), scale, stands_for=spec.dtype.name)
