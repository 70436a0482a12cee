"""In what form of small integers a weight lies in memory, and which form holds each quantized type of GGUF exactly."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import ml_dtypes
import numpy as np

VALUES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "int4": np.dtype(ml_dtypes.int4),
        "uint4": np.dtype(ml_dtypes.uint4),
        "int8": np.dtype(np.int8),
    }
)
"""NumPy keeps values of 4 bits in a byte each; devices and tiles pack them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantForm:
    """values: a key of VALUES. group: values along the contraction that share a scale; None = all of them, one scale
    per output channel. is_affine: with an offset beside each scale. scale: name of the type of scales and offsets."""

    values: str
    group: int | None
    is_affine: bool = False
    scale: str = "float32"

    @property
    def bits(self) -> int:
        """Of a value."""
        return 8 if self.values == "int8" else 4

    @property
    def values_dtype(self) -> np.dtype:
        return VALUES[self.values]

    @property
    def scale_dtype(self) -> np.dtype:
        return np.dtype(self.scale)

    def divides(self, contraction: int) -> bool:
        return self.group is None or contraction % self.group == 0

    def num_groups(self, contraction: int) -> int:
        """Raises: ValueError where groups do not divide the contraction."""
        if not self.divides(contraction):
            raise ValueError(f"groups of {self.group} do not divide {contraction} inputs")
        return 1 if self.group is None else contraction // self.group

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Of a weight [..., K, N], packed."""
        *lead, contraction, columns = shape
        scales = math.prod(lead) * self.num_groups(contraction) * columns
        return math.prod(shape) * self.bits // 8 + scales * self.scale_dtype.itemsize * (1 + self.is_affine)

    def __str__(self) -> str:
        """Such as "uint4 in groups of 32, affine, float16 scales"."""
        group = "one group per output channel" if self.group is None else f"in groups of {self.group}"
        return f"{self.values} {group}, {'affine' if self.is_affine else 'symmetric'}, {self.scale} scales"


INT8_CHANNELS = QuantForm(values="int8", group=None)
INT4_GROUPS = QuantForm(values="int4", group=32, scale="float16")
"""4.5 bits for each value. Symmetric: -8 is left out."""


def _k_quant(values: str, group: int, *, is_affine: bool) -> QuantForm:
    """The product of a float16 and an integer of 4 to 8 bits is exact in float32."""
    return QuantForm(values=values, group=group, is_affine=is_affine)


GGUF_FORMS: Mapping[str, QuantForm] = MappingProxyType(
    {
        "Q4_0": QuantForm(values="int4", group=32, scale="float16"),
        "Q4_1": QuantForm(values="uint4", group=32, is_affine=True, scale="float16"),
        "Q5_0": QuantForm(values="int8", group=32, scale="float16"),
        "Q5_1": QuantForm(values="int8", group=32, is_affine=True, scale="float16"),
        "Q8_0": QuantForm(values="int8", group=32, scale="float16"),
        "Q2_K": _k_quant("uint4", 16, is_affine=True),
        "Q3_K": _k_quant("int4", 16, is_affine=False),
        "Q4_K": _k_quant("uint4", 32, is_affine=True),
        "Q5_K": _k_quant("int8", 32, is_affine=True),
        "Q6_K": _k_quant("int8", 16, is_affine=False),
        "MXFP4": _k_quant("int8", 32, is_affine=False),
    }
)
"""By ggml's name of the type. MXFP4's values are doubled, so that they are integers."""


def common_form(forms: Iterable[QuantForm]) -> QuantForm:
    """The smallest form that holds weights of all of these exactly. They have groups of a size, not one per channel."""
    found = list(forms)
    values = {form.values for form in found}
    return QuantForm(
        values=values.pop() if len(values) == 1 else "int8",
        group=math.gcd(*(form.group for form in found if form.group is not None)),
        is_affine=any(form.is_affine for form in found),
        scale="float16" if all(form.scale == "float16" for form in found) else "float32",
    )
