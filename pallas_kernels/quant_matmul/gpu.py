"""Matmul with a quantized weight on GPU: one scale per column through XLA, groups through Pallas' Triton back end."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from headrace.pallas_kernels import block_sizes
from headrace.pallas_kernels.quant_matmul import gpu_product
from headrace.pallas_kernels.types import GroupQuant, Kernels

Array = jax.Array

MULTIPROCESSORS = 132
"""Of an H100 SXM and of an H200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuQuantBlocks:
    """rows, columns: of a tile of the result. depth: rows of the weight in one product, at most. unroll: products of
    one loop step, at most. splits: programs that share the contraction of a tile."""

    rows: int
    columns: int
    depth: int
    unroll: int
    splits: int
    num_warps: int
    stages: int


def heuristic(rows: int, contraction: int, columns: int) -> GpuQuantBlocks:
    """No GPU has measured this; it follows from what the compiler reports for sm_90a.

    rows: 16 to 64; a tile reads its weight once, and 64 x 128 sums over 8 warps take 140 registers. columns:
    64 for 16 rows, 54 registers and six programs on a multiprocessor (128 over 4 warps spill in some shapes). depth,
    unroll: one step reads 128 rows of the weight, so that scales are a small part of the loads in flight. splits: four
    programs for each multiprocessor, since a weight of few columns would leave most idle; but every split writes a
    float32 tile: at most one for each 512 rows of the weight, and no more bytes than an 8-bit weight has.
    """
    tile_rows = min(max(1 << (rows - 1).bit_length(), gpu_product.SMALLEST_DOT), 64)
    is_thin = tile_rows == gpu_product.SMALLEST_DOT
    tile_columns = 64 if is_thin else 128
    tiles = pl.cdiv(rows, tile_rows) * pl.cdiv(columns, tile_columns)
    return GpuQuantBlocks(
        rows=tile_rows,
        columns=tile_columns,
        depth=64,
        unroll=2,
        splits=max(1, min(pl.cdiv(4 * MULTIPROCESSORS, tiles), contraction // max(512, 4 * rows))),
        num_warps=4 if is_thin else 8,
        stages=4 if is_thin else 3,
    )


def quant_matmul(x_MK: Array, weight: GroupQuant, kernels: Kernels) -> Array:
    """See ``headrace.pallas_kernels.api.quant_matmul``."""
    if weight.group == x_MK.shape[1]:
        return _per_column(x_MK, weight)
    return _in_groups(x_MK, weight, kernels)


def _per_column(x_MK: Array, weight: GroupQuant) -> Array:
    """XLA converts the values inside the product, and the scales meet its float32 sums."""
    out_MN = jnp.dot(
        x_MK,
        weight.values_KN.astype(x_MK.dtype),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    out_MN = out_MN * weight.scale_GN.astype(jnp.float32)
    if weight.offset_GN is None:
        return out_MN
    return out_MN + x_MK.astype(jnp.float32).sum(axis=1, keepdims=True) * weight.offset_GN.astype(jnp.float32)


def _in_groups(x_MK: Array, weight: GroupQuant, kernels: Kernels) -> Array:
    gpu_product.check_size(weight.values_KN)
    rows, contraction = x_MK.shape
    values, columns = weight.values_KN.dtype, weight.values_KN.shape[1]
    blocks = block_sizes.pick(
        kernels,
        GpuQuantBlocks,
        "quant_matmul",
        f"{values} {x_MK.dtype} M{rows} K{contraction} N{columns} group{weight.group}",
        lambda: heuristic(rows, contraction, columns),
    )
    depth = gpu_product.depth_block(weight.group, blocks.depth)
    unroll = gpu_product.power_of_two_in(contraction // depth, max(1, blocks.unroll * blocks.depth // depth))
    tile = blocks.rows, gpu_product.columns_block(columns, values, blocks.columns)
    row_tiles = pl.cdiv(rows, tile[0])
    x_MK = jnp.pad(x_MK, ((0, row_tiles * tile[0] - rows), (0, 0)))
    of_columns = jax.tree.map(lambda leaf: pl.BlockSpec((leaf.shape[0], tile[1]), lambda i, j, s: (0, j)), weight)
    parts_SMN = pl.pallas_call(
        functools.partial(_kernel, blocks=blocks, depth=depth, unroll=unroll, columns=columns),
        grid=(row_tiles, pl.cdiv(columns, tile[1]), blocks.splits),
        in_specs=[pl.BlockSpec((tile[0], contraction), lambda i, j, s: (i, 0)), of_columns],
        out_specs=pl.BlockSpec((None, *tile), lambda i, j, s: (s, i, j)),
        out_shape=jax.ShapeDtypeStruct((blocks.splits, x_MK.shape[0], columns), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.stages),
        interpret=kernels.interpret,
        name="quant_matmul",
    )(x_MK, weight)
    return parts_SMN[:, :rows].sum(axis=0)


def _kernel(
    x_ref: Array, weight: GroupQuant, out_ref: Array, *, blocks: GpuQuantBlocks, depth: int, unroll: int, columns: int
) -> None:
    rows, contraction = x_ref.shape
    tile = out_ref.shape
    count = contraction // (depth * unroll)
    share = pl.cdiv(count, blocks.splits)
    first = pl.program_id(2) * share
    is_real_N = None
    if columns % tile[1]:
        is_real_N = pl.program_id(1) * tile[1] + jnp.arange(tile[1]) < columns
    acc_MN = gpu_product.accumulate(
        lambda first, size: x_ref[pl.ds(0, rows), pl.ds(first, size)],
        weight,
        (),
        (first, jnp.minimum(first + share, count)),
        tile,
        depth=depth,
        unroll=unroll,
        is_real_N=is_real_N,
    )
    if is_real_N is None:
        out_ref[...] = acc_MN
    else:
        plgpu.store(out_ref, acc_MN, mask=jnp.broadcast_to(is_real_N[None, :], tile))
