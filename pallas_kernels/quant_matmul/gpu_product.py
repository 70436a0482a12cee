"""The inner loop of the GPU's products with weights of small integers: one tile of a result, group by group.

A step multiplies rows that share their scales, so that scales meet the float32 sums and not the weights: 16 rows of a
sum are fewer than 32 of a weight, and nothing is rounded on the way.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from headrace.pallas_kernels.types import GroupQuant, UnsupportedCase

Array = jax.Array

SMALLEST_DOT = 16
"""Rows, columns and depth that Triton's dot needs at least."""


def power_of_two_in(number: int, most: int) -> int:
    """The largest power of two, up to most, that divides the number."""
    return min(number & -number, most)


def columns_block(columns: int, dtype: jnp.dtype, most: int) -> int:
    """Columns of a tile. 4-bit values are read two at a time, by a load that cannot be masked: tiles must fit.

    Raises: UnsupportedCase naming what 4-bit columns must be a multiple of.
    """
    if jnp.dtype(dtype) != jnp.int4:
        return most
    block = power_of_two_in(columns, most)
    if block < SMALLEST_DOT:
        raise UnsupportedCase(f"{columns} columns of 4-bit values: Triton's loads need a multiple of {SMALLEST_DOT}")
    return block


def depth_block(group: int, most: int) -> int:
    """Rows of the weight in one product: they share their scales.

    Raises: UnsupportedCase for groups that Triton's dot cannot cut.
    """
    block = power_of_two_in(group, most)
    if block < SMALLEST_DOT:
        raise UnsupportedCase(f"groups of {group} rows: Triton's dot needs a multiple of {SMALLEST_DOT}")
    return block


def check_size(values: Array) -> None:
    """Raises: UnsupportedCase for a weight whose offsets JAX's lowering keeps in 32 signed bits though they need 33."""
    if jnp.dtype(values.dtype).itemsize == 1 and 2**31 < values.size <= 2**32:
        raise UnsupportedCase(f"a weight of {values.size} small integers: Pallas Triton would wrap its 32-bit offsets")


def accumulate(
    x_rows: Callable[[Array, int], Array],
    weight: GroupQuant | Array,
    prefix: tuple[Array, ...],
    steps: tuple[Array, Array],
    shape: tuple[int, int],
    *,
    depth: int,
    unroll: int,
    is_real_N: Array | None,
) -> Array:
    """float32 [rows, columns]: the product over steps first .. last - 1, each of ``unroll`` times ``depth`` rows of K.

    x_rows: loads [rows, depth] from a row of K on. weight: of references, whose last axis is the tile's columns;
    prefix: indexes in front of the last two axes. is_real_N: columns that exist, None: all of them.
    """
    rows, columns = shape
    quant = weight if isinstance(weight, GroupQuant) else None
    values_ref = weight if quant is None else quant.values_KN
    # One scale for the whole of K waits for the end of the loop.
    is_whole = quant is not None and quant.scale_GN.shape[-2] == 1
    load = functools.partial(_load, prefix=prefix, columns=columns, is_real_N=is_real_N)

    def step(index: Array, acc_MN: Array) -> Array:
        for part in range(unroll):
            first = (index * unroll + part) * depth
            x_MX = x_rows(first, depth)
            product_MN = lax.dot_general(
                x_MX,
                load(values_ref, pl.ds(first, depth)).astype(x_MX.dtype),
                (((1,), (0,)), ((), ())),
                precision=lax.Precision.HIGHEST,
                preferred_element_type=jnp.float32,
            )
            if quant is None or is_whole:
                acc_MN += product_MN
            else:
                group = pl.ds(lax.div(first, quant.group), 1)
                acc_MN += product_MN * load(quant.scale_GN, group).astype(jnp.float32)
            if quant is not None and quant.offset_GN is not None:
                offset_1N = load(quant.offset_GN, pl.ds(lax.div(first, quant.group), 1)).astype(jnp.float32)
                acc_MN += x_MX.astype(jnp.float32).sum(axis=1)[:, None] * offset_1N
        return acc_MN

    acc_MN = lax.fori_loop(*steps, step, jnp.zeros((rows, columns), jnp.float32))
    if is_whole:
        return acc_MN * load(quant.scale_GN, pl.ds(0, 1)).astype(jnp.float32)
    return acc_MN


def _load(ref: Array, rows: pl.Slice, *, prefix: tuple[Array, ...], columns: int, is_real_N: Array | None) -> Array:
    place = (*prefix, rows, pl.ds(0, columns))
    if is_real_N is None:
        return ref[place]
    mask = jnp.broadcast_to(is_real_N[None, :], (rows.size, columns))
    return plgpu.load(ref.at[place], mask=mask, other=0)
