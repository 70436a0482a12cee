"""Grouped matmul on GPU: one Triton program for a tile of rows, an expert with rows in it, and a tile of columns.

Experts without rows have no programs that load anything, so that a decode step of few tokens reads the weights of its
active experts alone.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from headrace.pallas_kernels import block_sizes
from headrace.pallas_kernels.grouped_matmul.visits import Visits, experts_in_place, make_visits
from headrace.pallas_kernels.quant_matmul import gpu_product
from headrace.pallas_kernels.types import GroupQuant, Kernels

Array = jax.Array


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuGroupedBlocks:
    """rows, columns: of a tile of the result. depth: rows of the weight in one product, at most."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    stages: int


def heuristic(rows: int, experts: int, columns: int) -> GpuGroupedBlocks:
    """No GPU has measured this; it follows from what the compiler reports for sm_90a.

    rows: those of a mean expert, 16 to 128: more are masked away, fewer read its weight once more for each tile.
    columns: 128, but 64 where few rows leave the multiprocessors to the columns alone. stages: 4 keep three steps of a
    weight in flight, 48 KiB of bfloat16.
    """
    mean = max(1, rows // experts)
    tile_rows = min(max(1 << (mean - 1).bit_length(), gpu_product.SMALLEST_DOT), 128)
    return GpuGroupedBlocks(
        rows=tile_rows,
        columns=64 if tile_rows == gpu_product.SMALLEST_DOT else 128,
        depth=64,
        num_warps=8 if tile_rows == 128 else 4,
        stages=4,
    )


def grouped_matmul(
    x_MK: Array,
    weight: Array | GroupQuant,
    group_sizes_G: Array,
    group_offset: Array | int,
    kernels: Kernels,
    layer: Array | int | None = None,
) -> Array:
    """See ``headrace.pallas_kernels.api.grouped_matmul``."""
    weight, experts, first_index = experts_in_place(weight, layer)
    rows, contraction = x_MK.shape
    quant = weight if isinstance(weight, GroupQuant) else None
    values = weight if quant is None else quant.values_KN
    columns = values.shape[2]
    gpu_product.check_size(values)
    group = contraction if quant is None else quant.group
    blocks = block_sizes.pick(
        kernels,
        GpuGroupedBlocks,
        "grouped_matmul",
        f"{values.dtype} {x_MK.dtype} M{rows} E{experts} K{contraction} N{columns} group{group}",
        lambda: heuristic(rows, experts, columns),
    )
    tile = blocks.rows, gpu_product.columns_block(columns, values.dtype, blocks.columns)
    depth = gpu_product.depth_block(group, blocks.depth)
    visits = make_visits(group_sizes_G, group_offset, experts, rows, tile[0], first_index)
    padded = pl.cdiv(rows, tile[0]) * tile[0]
    of_columns = jax.tree.map(lambda leaf: pl.BlockSpec((*leaf.shape[:2], tile[1]), lambda j, v: (0, 0, j)), weight)
    whole = jax.tree.map(lambda leaf: pl.BlockSpec(leaf.shape, lambda j, v, rank=leaf.ndim: (0,) * rank), visits)
    out_MN = pl.pallas_call(
        functools.partial(_kernel, depth=depth, columns=columns, tile=tile),
        grid=(pl.cdiv(columns, tile[1]), visits.tile_V.shape[0]),
        in_specs=[pl.BlockSpec((padded, contraction), lambda j, v: (0, 0)), of_columns, whole],
        out_specs=pl.BlockSpec((padded, tile[1]), lambda j, v: (0, j)),
        out_shape=jax.ShapeDtypeStruct((padded, columns), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.stages),
        interpret=kernels.interpret,
        name="grouped_matmul",
    )(jnp.pad(x_MK, ((0, padded - rows), (0, 0))), weight, visits)
    # Programs run in any order and store the rows of their expert alone; nobody stores the others, whatever is there.
    end_G = jnp.cumsum(group_sizes_G, dtype=jnp.int32)
    end_E = lax.dynamic_slice_in_dim(end_G, group_offset, experts)
    first = end_E[0] - lax.dynamic_index_in_dim(group_sizes_G, group_offset, keepdims=False)
    row_M1 = jnp.arange(rows, dtype=jnp.int32)[:, None]
    return jnp.where((row_M1 >= first) & (row_M1 < end_E[-1]), out_MN[:rows], 0)


def _kernel(
    x_ref: Array,
    weight: Array | GroupQuant,
    visits: Visits,
    out_ref: Array,
    *,
    depth: int,
    columns: int,
    tile: tuple[int, int],
) -> None:
    column_tile, visit = pl.program_id(0), pl.program_id(1)
    first, last = visits.first_V[visit], visits.last_V[visit]

    @pl.when(last > first)
    def _() -> None:
        start = visits.tile_V[visit] * tile[0]
        is_real_N = None
        if columns % tile[1]:
            is_real_N = column_tile * tile[1] + jnp.arange(tile[1]) < columns
        acc_XN = gpu_product.accumulate(
            lambda k, size: x_ref[pl.ds(start, tile[0]), pl.ds(k, size)],
            weight,
            (visits.expert_V[visit],),
            (jnp.int32(0), jnp.int32(x_ref.shape[1] // depth)),
            tile,
            depth=depth,
            unroll=1,
            is_real_N=is_real_N,
        )
        row_X1 = start + jnp.arange(tile[0])[:, None]
        is_own = jnp.broadcast_to((row_X1 >= first) & (row_X1 < last), tile)
        if is_real_N is not None:
            is_own &= is_real_N[None, :]
        plgpu.store(out_ref.at[pl.ds(start, tile[0]), pl.ds(0, tile[1])], acc_XN, mask=is_own)
