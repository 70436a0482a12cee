"""Weights as a ``GroupQuant`` of NumPy arrays: rounded to a form, brought to a wider form, and dequantized.

``pallas_kernels/quant_matmul/quantize.py`` rounds to the same integers and factors, bit for bit.
"""

import numpy as np

from headrace.model.quant_form import QuantForm
from headrace.pallas_kernels.types import GroupQuant

BLOCK_VALUES = 1 << 22
"""Rounded at once: their float32 copies take 16 MiB each."""


def quantized(values: np.ndarray, form: QuantForm, dtype: np.dtype) -> GroupQuant:
    """The nearest weight of a symmetric form, given its scales: the largest of a group becomes the largest integer, and
    the lowest integer is left out.

    Args:
      values: finite floats [..., K, N] of one layer, of one expert or of many; float32 where the file has it so, since
        what is rounded to ``dtype`` first is rounded twice. dtype: what the weight stands for.
    Raises: ValueError: a form with offsets or of unsigned values, or groups that do not divide K.
    """
    if form.is_affine or form.values == "uint4":
        raise ValueError(f"weights are not rounded to {form}")
    *lead, contraction, columns = values.shape
    groups = form.num_groups(contraction)
    scale = np.empty((*lead, groups, columns), form.scale_dtype)
    level = np.empty(values.shape, np.int8)
    rows = contraction // groups
    step = max(1, BLOCK_VALUES * groups // max(values.size, 1))
    for first in range(0, groups, step):
        last = min(first + step, groups)
        part = values[..., first * rows : last * rows, :]
        found = _rounded(part.reshape(*lead, last - first, rows, columns), form)
        level[..., first * rows : last * rows, :] = found[0].reshape(part.shape)
        scale[..., first:last, :] = found[1]
    return GroupQuant(as_integers(level, form).view(form.values_dtype), scale, stands_for=dtype.name)


def _rounded(values: np.ndarray, form: QuantForm) -> tuple[np.ndarray, np.ndarray]:
    """(float32 integers [..., G, rows, N], factors [..., G, N])."""
    largest = (1 << (form.bits - 1)) - 1
    level = np.array(values, np.float32)
    with np.errstate(over="ignore"):  # a factor beyond float16 is refused below
        scale = (np.abs(level).max(axis=-2) * np.float32(1 / largest)).astype(form.scale_dtype)
    if not np.isfinite(scale).all():
        raise ValueError(f"values up to {np.abs(level).max()} need factors beyond {form.scale}")
    level *= 1 / np.where(scale > 0, scale.astype(np.float32), np.float32(1))[..., None, :]  # zeros have factor 0
    return np.clip(np.rint(level, out=level), -largest, largest, out=level), scale


def as_integers(values: np.ndarray, form: QuantForm) -> np.ndarray:
    """int8 in the form's range, as the bytes that NumPy has for them: 4 bits lie in the low half of one."""
    return values if form.values != "int4" else values & np.int8(15)


def form_of(weight: GroupQuant) -> QuantForm:
    return QuantForm(
        values=np.dtype(weight.values_KN.dtype).name,
        group=None if weight.scale_GN.shape[-2] == 1 else weight.group,
        is_affine=weight.offset_GN is not None,
        scale=np.dtype(weight.scale_GN.dtype).name,
    )


def widened(weight: GroupQuant, form: QuantForm) -> GroupQuant:
    """The same weight in a form that holds it exactly (see ``quant_form.common_form``), bit for bit.

    Raises: ValueError for any other form.
    """
    own = form_of(weight)
    if own == form:
        return weight
    scale, offset = weight.scale_GN, weight.offset_GN
    contraction = weight.shape[-2]
    repeats, rest = divmod(form.num_groups(contraction), own.num_groups(contraction))
    # Factors of a whole channel may be repeated for groups, and groups for shorter ones.
    narrows = own.bits > form.bits or (form.bits == 4 and own.values != form.values)
    if narrows or rest or (own.is_affine and not form.is_affine) or (own.scale, form.scale) == ("float32", "float16"):
        raise ValueError(f"a weight of {own} is not brought to {form}")
    if form.is_affine and offset is None:
        # x + -0.0 is x, for both zeros too.
        offset = np.full(scale.shape, -0.0, form.scale_dtype)
    scale, offset = (
        None if x is None else np.repeat(x.astype(form.scale_dtype), repeats, axis=-2) for x in (scale, offset)
    )
    return GroupQuant(weight.values_KN.astype(form.values_dtype), scale, offset, stands_for=weight.stands_for)


def dequantized(weight: GroupQuant) -> np.ndarray:
    """float32 [..., K, N]: the product and the sum each rounded."""
    *lead, contraction, columns = weight.shape
    values = np.asarray(weight.values_KN).astype(np.float32).reshape(*lead, -1, weight.group, columns)
    values *= np.asarray(weight.scale_GN, np.float32)[..., None, :]
    if weight.offset_GN is not None:
        values += np.asarray(weight.offset_GN, np.float32)[..., None, :]
    return values.reshape(*lead, contraction, columns)
