"""Grouped matmul on TPU: the grid runs over columns and, within them, over visits of (tile of rows, expert).

Which visits there are is computed by XLA beforehand and their number is the grid's, so that experts without rows cost
nothing: neither a copy of their weight nor a grid step. A small batch is one tile, visited once by each busy expert. Of
an expert whose rows span several tiles the weight stays in VMEM from one tile to the next.

Weights of 64 columns must lie row-major (``jax.experimental.layout.Layout((0, 1, 2))``): by default v5p and TPU7x put
their rows along lanes, and XLA then copies all experts before the kernel. No model that is served calls this yet.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from headrace.pallas_kernels.block_sizes import pick
from headrace.pallas_kernels.chips import MIB
from headrace.pallas_kernels.grouped_matmul.visits import Visits, experts_in_place, make_visits
from headrace.pallas_kernels.quant_matmul.tpu import LANES, precision_of, vmem_limit, wide_columns
from headrace.pallas_kernels.types import GroupQuant, Kernels, UnsupportedCase

SMALL_ROWS = 128
"""Up to here the batch is one tile: multiplying 128 rows where an expert has one is hidden by its weight's copy (2 MiB
take 1.3 us on v6e, 128 x 1 Mi products 0.3 us)."""
LARGE_TILE_BYTES = 8 * MIB
"""Of a weight in larger batches: every tile of columns reads all rows again, 17 MB for 2,048 rows of Mixtral, so that
tiles of 2 MiB would read as much of x as of the weights."""

LOOP_VALUES = {jnp.dtype(jnp.bfloat16): 1 << 17, jnp.dtype(jnp.float32): 1 << 15}
"""Values of the weight that one iteration multiplies, by type of x: with more, 128 rows of partial sums spill registers
(v6e, 128 rows x 256 columns: 17 spills at 1,024 rows of the weight, none at 512)."""
LOOP_ROWS = 512
"""At most, however few the columns (v6e, 128 columns: 16 spills at 1,024)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedBlocks:
    """rows: of x in one grid step, a multiple of 16 (8 in float32). columns: of the weight, a multiple of 128 or all.
    loop_rows: of the weight in one iteration: the contraction, or a multiple of 128 that divides it."""

    rows: int
    columns: int
    loop_rows: int


def grouped_matmul(
    x_MK: jax.Array,
    weight: jax.Array | GroupQuant,
    group_sizes_G: jax.Array,
    group_offset: jax.Array | int,
    kernels: Kernels,
    layer: jax.Array | int | None = None,
) -> jax.Array:
    """See ``headrace.pallas_kernels.api.grouped_matmul``.

    Raises: UnsupportedCase: a quantized weight other than int8 with one scale per column, or blocks beyond VMEM.
    """
    scale_E1N = _scale(weight, layer)
    weight, experts, first_index = experts_in_place(weight, layer)
    w_EKN = weight.values_KN if isinstance(weight, GroupQuant) else weight
    rows, contraction = x_MK.shape
    columns = w_EKN.shape[2]
    blocks = block_sizes(rows, w_EKN, group_sizes_G.shape[0], x_MK.dtype, kernels)
    padding = -rows % blocks.rows if rows < blocks.rows else 0
    x_MK = jnp.pad(x_MK, ((0, padding), (0, 0)))
    visits = make_visits(group_sizes_G, group_offset, experts, x_MK.shape[0], blocks.rows, first_index)
    by_expert = functools.partial(pl.BlockSpec, index_map=lambda n, v, of: (of.expert_V[v], 0, n))
    in_specs = [
        pl.BlockSpec((blocks.rows, contraction), lambda n, v, of: (of.tile_V[v], 0)),
        by_expert((1, contraction, blocks.columns)),
    ]
    arguments = [x_MK, w_EKN]
    if scale_E1N is not None:
        # expert_V counts from the first layer on.
        in_specs.append(
            pl.BlockSpec((1, 1, blocks.columns), lambda n, v, of: (lax.rem(of.expert_V[v], jnp.int32(experts)), 0, n))
        )
        arguments.append(scale_E1N)
    out_MN = pl.pallas_call(
        functools.partial(_visit, loop_rows=blocks.loop_rows),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(columns, blocks.columns), visits.count[0]),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((blocks.rows, blocks.columns), lambda n, v, of: (of.tile_V[v], n)),
            scratch_shapes=[pltpu.VMEM((blocks.rows, blocks.columns), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((x_MK.shape[0], columns), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit(kernels, _vmem_bytes(blocks, x_MK, w_EKN)),
        ),
        interpret=kernels.interpret,
        name="grouped_matmul",
    )(visits, *arguments)
    return out_MN[:rows]


def _scale(weight: jax.Array | GroupQuant, layer: jax.Array | int | None) -> jax.Array | None:
    """Factors [E, 1, N] of one layer. They are small: in place, XLA brings those of all layers into VMEM for each."""
    if not isinstance(weight, GroupQuant):
        return None
    values = weight.values_KN
    if values.dtype != jnp.int8 or weight.group != values.shape[-2] or weight.offset_GN is not None:
        affine = "" if weight.offset_GN is None else " with offsets"
        raise UnsupportedCase(
            f"experts of {values.dtype} in groups of {weight.group}{affine}; int8 with one scale per column is there"
        )
    scale = weight.scale_GN
    return scale if layer is None else lax.dynamic_index_in_dim(scale, layer, 0, keepdims=False)


def _visit(visits: Visits, x_ref: jax.Ref, w_ref: jax.Ref, *refs: jax.Ref, loop_rows: int) -> None:
    *scale_refs, out_ref, sum_ref = refs
    visit = pl.program_id(1)
    first, last, is_new = visits.first_V[visit], visits.last_V[visit], visits.is_new_V[visit] == 1

    @pl.when(is_new)
    def _() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)

    def add(start: jax.Array | int) -> None:
        sum_ref[...] += jnp.dot(
            x_ref[:, pl.ds(start, loop_rows)],
            w_ref[0, pl.ds(start, loop_rows), :].astype(x_ref.dtype),
            precision=precision_of(x_ref.dtype),
            preferred_element_type=jnp.float32,
        )

    @pl.when(last > first)
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)
        if loop_rows == w_ref.shape[1]:
            add(0)
        else:
            pl.loop(0, w_ref.shape[1] // loop_rows)(lambda step: add(pl.multiple_of(step * loop_rows, loop_rows)))
        product = sum_ref[...]
        for scale_ref in scale_refs:
            product *= scale_ref[0].astype(jnp.float32)
        row = visits.tile_V[visit] * out_ref.shape[0] + lax.broadcasted_iota(jnp.int32, out_ref.shape, 0)
        out_ref[...] = jnp.where((row >= first) & (row < last), product, out_ref[...])


def _vmem_bytes(blocks: GroupedBlocks, x_MK: jax.Array, w_EKN: jax.Array) -> int:
    """Every block twice, since the next one is copied while this one is used; the sum, and one iteration's values."""
    contraction = x_MK.shape[1]
    weight_bytes = blocks.columns * contraction * w_EKN.dtype.itemsize
    blocks_bytes = blocks.rows * contraction * x_MK.dtype.itemsize + 4 * blocks.rows * blocks.columns + weight_bytes
    return 2 * blocks_bytes + 4 * blocks.columns * (blocks.rows + blocks.loop_rows)


def block_sizes(rows: int, w_EKN: jax.Array, num_experts: int, x_dtype: jnp.dtype, kernels: Kernels) -> GroupedBlocks:
    """Explicit, tuned, or the heuristic's. num_experts: of the model."""
    _, contraction, columns = w_EKN.shape
    shape = rows, num_experts, contraction, columns, w_EKN.dtype, x_dtype
    return pick(kernels, GroupedBlocks, "grouped_matmul", tuned_key(*shape), lambda: heuristic(*shape))


def tuned_key(
    rows: int, num_experts: int, contraction: int, columns: int, weight_dtype: jnp.dtype, x_dtype: jnp.dtype
) -> str:
    """Of the tuned file; the rows are those of the next power of 2, 16 at least."""
    bucket = max(16, 1 << (rows - 1).bit_length())
    types = f"weight={jnp.dtype(weight_dtype)} x={jnp.dtype(x_dtype)}"
    return f"rows={bucket} experts={num_experts} contraction={contraction} columns={columns} {types}"


def heuristic(
    rows: int, num_experts: int, contraction: int, columns: int, weight_dtype: jnp.dtype, x_dtype: jnp.dtype
) -> GroupedBlocks:
    """The whole contraction in one tile, so that a weight passes through VMEM once whatever tiles its rows span. Small
    batches: SMALL_ROWS. Others: 256 rows where experts have as many on average (the matrix unit then spends as long on
    rows as on loading weights), else 128, since what a tile has of other experts' rows is multiplied for nothing."""
    row_tile = 32 // jnp.dtype(x_dtype).itemsize
    is_small = rows <= SMALL_ROWS
    if is_small:
        tile_rows = -(-rows // row_tile) * row_tile
    else:
        tile_rows = 256 if rows >= 256 * num_experts else 128
    column_bytes = contraction * jnp.dtype(weight_dtype).itemsize
    tile_columns = wide_columns(column_bytes, columns, *(() if is_small else (LARGE_TILE_BYTES,)))
    wanted = min(LOOP_ROWS, max(1, LOOP_VALUES[jnp.dtype(x_dtype)] // tile_columns))
    loops = [size for size in range(LANES, contraction, LANES) if contraction % size == 0]
    loop_rows = contraction
    if contraction > wanted and loops:
        loop_rows = min(loops, key=lambda size: abs(size - wanted))
    return GroupedBlocks(rows=tile_rows, columns=tile_columns, loop_rows=loop_rows)
