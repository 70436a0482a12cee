"""Weights to small integers with one factor per group and column, rounded to nearest."""

import jax
import jax.numpy as jnp
import numpy as np

from headrace.pallas_kernels.types import GroupQuant, UnsupportedCase

VALUES = {4: jnp.int4, 8: jnp.int8}
"""Stored type by bits."""


def quantize_groups(
    w_KN: jax.Array, bits: int, group: int, *, affine: bool = False, scale_dtype: jnp.dtype = jnp.bfloat16
) -> GroupQuant:
    """The nearest weight of this form, given its scales.

    Args:
      w_KN: float, [..., K, N]. bits: 4 or 8. group: values along K that share a scale, a divisor of K.
      affine: with offsets, so that the levels span a group's smallest to its largest value; else they are symmetric
        around 0 and leave out the lowest integer.
      scale_dtype: of scales and offsets. Values are chosen after these were rounded to it.
    Raises: UnsupportedCase: other bits, or a group that does not divide K.
    """
    if bits not in VALUES:
        raise UnsupportedCase(f"weights of {bits} bits; it can be {', '.join(map(str, VALUES))}")
    *lead, contraction, columns = w_KN.shape
    if group < 1 or contraction % group:
        raise UnsupportedCase(f"groups of {group} do not divide {contraction} rows")
    w_GXN = w_KN.astype(jnp.float32).reshape(*lead, contraction // group, group, columns)
    half = 1 << (bits - 1)
    if affine:
        low_GN, high_GN = w_GXN.min(axis=-2), w_GXN.max(axis=-2)
        step_GN = (high_GN - low_GN) / (2 * half - 1)
        offset_GN = (low_GN + half * step_GN).astype(scale_dtype)
        centered_GXN, lowest = w_GXN - offset_GN.astype(jnp.float32)[..., None, :], -half
    else:
        # A product, here and below: XLA makes one of such a division, and NumPy on the host does not.
        step_GN = jnp.abs(w_GXN).max(axis=-2) * np.float32(1 / (half - 1))
        offset_GN, centered_GXN, lowest = None, w_GXN, 1 - half
    scale_GN = step_GN.astype(scale_dtype)
    # A group of equal values has scale 0 and is divided by 1.
    inverse_GN = 1 / jnp.where(scale_GN > 0, scale_GN.astype(jnp.float32), 1)
    level_GXN = jnp.clip(jnp.round(centered_GXN * inverse_GN[..., None, :]), lowest, half - 1)
    return GroupQuant(level_GXN.reshape(w_KN.shape).astype(VALUES[bits]), scale_GN, offset_GN)
