"""Matmul with a group-quantized weight in plain jnp: defines the semantics, and serves where no kernel runs."""

import jax
import jax.numpy as jnp
from jax import lax

from headrace.pallas_kernels.types import GroupQuant, Kernels

BLOCK_ROWS = 512
"""Rows of the weight that are dequantized at a time: 29 MB of float32 in 14,336 columns."""


def quant_matmul(x_MK: jax.Array, weight: GroupQuant, kernels: Kernels) -> jax.Array:
    """See ``headrace.pallas_kernels.api.quant_matmul``."""
    rows, contraction = x_MK.shape
    block = _block_rows(contraction, weight.group)
    x_MK = x_MK.astype(jnp.float32)

    def add_block(index: jax.Array, out_MN: jax.Array) -> jax.Array:
        x_MX = lax.dynamic_slice_in_dim(x_MK, index * block, block, axis=1)
        w_XN = dequantized_rows(weight, index * block, block)
        return out_MN + jnp.dot(x_MX, w_XN, precision=lax.Precision.HIGHEST)

    start_MN = jnp.zeros((rows, weight.values_KN.shape[1]))
    return lax.fori_loop(0, contraction // block, add_block, start_MN)


def _block_rows(contraction: int, group: int) -> int:
    """Whole groups, or a whole share of one group; a group above the limit without such a share stays whole."""
    sizes = [size for size in range(1, BLOCK_ROWS + 1) if contraction % size == 0]
    return max((size for size in sizes if size % group == 0 or group % size == 0), default=group)


def dequantized_rows(weight: GroupQuant, first: jax.Array | int, count: int) -> jax.Array:
    """float32 rows first .. first + count of a weight [K, N]; they are whole groups or lie in one."""
    groups = max(1, count // weight.group)
    values_XN = lax.dynamic_slice_in_dim(weight.values_KN, first, count).astype(jnp.float32)
    values_GXN = values_XN.reshape(groups, -1, values_XN.shape[-1])

    def factor(factor_GN: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(factor_GN, first // weight.group, groups).astype(jnp.float32)[:, None]

    w_GXN = values_GXN * factor(weight.scale_GN)
    if weight.offset_GN is not None:
        w_GXN += factor(weight.offset_GN)
    return w_GXN.reshape(values_XN.shape)
