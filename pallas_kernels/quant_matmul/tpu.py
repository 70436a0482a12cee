"""Matmul with a group-quantized weight on TPU.

One scale per column needs no kernel: XLA converts the integers inside the product and scales its result. Of a weight in
groups XLA would write a dequantized copy to HBM, four times the bytes of int4; the kernel dequantizes tiles in VMEM.

A weight in groups with 64 columns must lie row-major (``jax.experimental.layout.Layout((0, 1))``): by default v5p and
TPU7x put its rows along lanes, and XLA then copies all of it before the kernel. No model that is served calls this yet.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from headrace.pallas_kernels.block_sizes import pick
from headrace.pallas_kernels.chips import CHIPS, MIB, has_bfloat16_vectors
from headrace.pallas_kernels.types import GroupQuant, Kernels, UnsupportedCase

LANES = 128
SCALE_ROWS = 8
"""Rows of a tile of scales: a loop over the weight steps by whole ones."""
WEIGHT_TILE_BYTES = 2 * MIB
"""Of the weight in one grid step: 1.3 us of HBM time on v6e, which hides the cost of a step; so small that the first
tile, which nothing hides, is a few percent of the call."""
LEAST_TILES = 4
"""Tiles that even a small weight is cut into, so that copies and products overlap."""
X_TILE_BYTES = 16 * MIB
LOOP_VALUES = {jnp.dtype(jnp.bfloat16): 1 << 19, jnp.dtype(jnp.float32): 1 << 16}
"""Values of the weight that one iteration dequantizes, by type of x. More spill registers (v6e, int4 in 32, 1,024
columns: 24 spills at 1,024 rows, none at 512); fewer pay the loop's entry more often (170 bundles for 256 rows, 323 for
512)."""
LOOP_ROWS = 512
"""At most in wide tiles, which spilled registers with 1,024 (v6e, 512 columns: 22) and 2,048 (v5e, 256 columns: 102).
It costs 8% and 14% more bundles; 1,024 rows of 256 columns on v5e still spilled 18."""
WIDE_COLUMNS, WIDE_COLUMNS_IN_FLOAT32 = 512, 256
"""What is wide: by whether a chip scales the values in bfloat16 or in float32."""
MAX_ROWS = 512
"""Rows of x that share one dequantization: as many as the model steps of a prefill chunk bring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantBlocks:
    """rows: of x in one grid step. columns: of the weight in one grid step, a multiple of 128 or all. loop_rows: of the
    weight in one iteration, whole groups, a divisor of the contraction."""

    rows: int
    columns: int
    loop_rows: int


def quant_matmul(x_MK: jax.Array, weight: GroupQuant, kernels: Kernels) -> jax.Array:
    """See ``headrace.pallas_kernels.api.quant_matmul``."""
    if weight.group == x_MK.shape[1]:
        return _per_column(x_MK, weight)
    return _in_groups(x_MK, weight, kernels)


def precision_of(dtype: jnp.dtype) -> lax.Precision:
    """float32 activations are multiplied as such, others in bfloat16."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def _per_column(x_MK: jax.Array, weight: GroupQuant) -> jax.Array:
    out_MN = jnp.dot(
        x_MK,
        weight.values_KN.astype(x_MK.dtype),
        precision=precision_of(x_MK.dtype),
        preferred_element_type=jnp.float32,
    )
    out_MN *= weight.scale_GN.astype(jnp.float32)
    if weight.offset_GN is not None:
        out_MN += x_MK.astype(jnp.float32).sum(axis=1, keepdims=True) * weight.offset_GN.astype(jnp.float32)
    return out_MN


def _in_groups(x_MK: jax.Array, weight: GroupQuant, kernels: Kernels) -> jax.Array:
    rows, contraction = x_MK.shape
    columns = weight.values_KN.shape[1]
    blocks = block_sizes(rows, weight, x_MK.dtype, kernels)
    tile = 32 // x_MK.dtype.itemsize
    x_MK = jnp.pad(x_MK, ((0, -rows % tile), (0, 0)))
    groups = contraction // weight.group
    block_rows = min(blocks.rows, x_MK.shape[0])
    grid = pl.cdiv(x_MK.shape[0], block_rows), pl.cdiv(columns, blocks.columns)
    of_columns = functools.partial(pl.BlockSpec, index_map=lambda m, n: (0, n))
    of_rows = functools.partial(pl.BlockSpec, index_map=lambda m, n: (m, 0))
    arguments = [x_MK, weight.values_KN, weight.scale_GN]
    in_specs = [
        of_rows((block_rows, contraction)),
        of_columns((contraction, blocks.columns)),
        of_columns((groups, blocks.columns)),
    ]
    if weight.offset_GN is not None:
        # The offsets of a group multiply the sum of its inputs: no zero point is needed beside the values.
        arguments += [x_MK.astype(jnp.float32).reshape(-1, groups, weight.group).sum(axis=-1), weight.offset_GN]
        in_specs += [of_rows((block_rows, groups)), of_columns((groups, blocks.columns))]
    out_MN = pl.pallas_call(
        functools.partial(
            _multiply_tile,
            group=weight.group,
            loop_rows=blocks.loop_rows,
            # Without bfloat16 vectors 1,024 x 1,024 values of int4 in 32 take 2,141 bundles in bfloat16 and 1,251 in
            # float32; v6e in bfloat16: 575.
            product_dtype=x_MK.dtype if has_bfloat16_vectors(kernels.chip) else jnp.float32,
        ),
        grid=grid,
        in_specs=in_specs,
        out_specs=pl.BlockSpec((block_rows, blocks.columns), lambda m, n: (m, n)),
        out_shape=jax.ShapeDtypeStruct((x_MK.shape[0], columns), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"),
            vmem_limit_bytes=vmem_limit(kernels, _vmem_bytes(block_rows, blocks, x_MK.dtype, weight)),
        ),
        interpret=kernels.interpret,
        name="quant_matmul",
    )(*arguments)
    return out_MN[:rows]


def vmem_limit(kernels: Kernels, needed_bytes: int) -> int | None:
    """What a kernel asks of the compiler. Raises: UnsupportedCase: more than the chip has; an eighth is left to XLA."""
    if kernels.chip is None:
        return None
    available = CHIPS[kernels.chip].on_chip_bytes * 7 // 8
    if needed_bytes > available:
        raise UnsupportedCase(f"blocks of {needed_bytes} bytes; {kernels.chip} has {available} bytes of VMEM for them")
    return available


def _vmem_bytes(rows: int, blocks: QuantBlocks, x_dtype: jnp.dtype, weight: GroupQuant) -> int:
    """Every block twice, since the next one is copied while this one is used; and one iteration's dequantized rows."""
    contraction = weight.values_KN.shape[0]
    factors = contraction // weight.group * weight.scale_GN.dtype.itemsize
    if weight.offset_GN is not None:
        factors += contraction // weight.group * weight.offset_GN.dtype.itemsize
    value_bits = jnp.iinfo(weight.values_KN.dtype).bits
    blocks_bytes = rows * contraction * x_dtype.itemsize + 4 * rows * blocks.columns
    blocks_bytes += blocks.columns * (contraction * value_bits // 8 + factors)
    return 2 * blocks_bytes + 4 * blocks.loop_rows * blocks.columns


def _multiply_tile(
    x_ref: jax.Ref,
    w_ref: jax.Ref,
    scale_ref: jax.Ref,
    *refs: jax.Ref,
    group: int,
    loop_rows: int,
    product_dtype: jnp.dtype,
) -> None:
    out_ref = refs[-1]
    dtype = x_ref.dtype
    contraction, columns = w_ref.shape
    groups = loop_rows // group
    precision = precision_of(dtype)
    if len(refs) == 3:
        xsum_ref, offset_ref = refs[:2]
        offset = offset_ref[...].astype(jnp.float32)
        out_ref[...] = jnp.dot(
            xsum_ref[...], offset, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
        )
    else:
        out_ref[...] = jnp.zeros_like(out_ref)

    def add(first: jax.Array | int, first_group: jax.Array | int) -> None:
        value = w_ref[pl.ds(first, loop_rows), :].astype(product_dtype)
        scale = scale_ref[pl.ds(first_group, groups), :].astype(product_dtype)
        w = (value.reshape(groups, group, columns) * scale[:, None, :]).reshape(loop_rows, columns).astype(dtype)
        x = x_ref[:, pl.ds(first, loop_rows)]
        out_ref[...] += jnp.dot(x, w, precision=precision, preferred_element_type=jnp.float32)

    steps = contraction // loop_rows
    if steps == 1:
        add(0, 0)
    elif is_aligned(loop_rows, group):

        @pl.loop(0, steps)
        def _(step: jax.Array) -> None:
            add(pl.multiple_of(step * loop_rows, loop_rows), pl.multiple_of(step * groups, groups))

    else:
        for step in range(steps):
            add(step * loop_rows, step * groups)


def is_aligned(loop_rows: int, group: int) -> bool:
    """Whether a loop may step by so many rows: its slices must start on whole tiles."""
    return loop_rows % LANES == 0 and loop_rows // group % SCALE_ROWS == 0


def block_sizes(rows: int, weight: GroupQuant, x_dtype: jnp.dtype, kernels: Kernels) -> QuantBlocks:
    """Explicit, tuned, or the heuristic's."""
    contraction, columns = weight.values_KN.shape
    shape = rows, contraction, columns, jnp.iinfo(weight.values_KN.dtype).bits, weight.group, x_dtype
    return pick(kernels, QuantBlocks, "quant_matmul", tuned_key(*shape), lambda: heuristic(*shape, kernels.chip))


def tuned_key(rows: int, contraction: int, columns: int, bits: int, group: int, x_dtype: jnp.dtype) -> str:
    """Of the tuned file. Calls of up to 16 rows cost the same; behind that the next power of 2 counts."""
    bucket = min(max(16, 1 << (rows - 1).bit_length()), MAX_ROWS)
    x = jnp.dtype(x_dtype)
    return f"rows={bucket} contraction={contraction} columns={columns} bits={bits} group={group} x={x}"


def heuristic(
    rows: int, contraction: int, columns: int, bits: int, group: int, x_dtype: jnp.dtype, chip: str | None
) -> QuantBlocks:
    """The whole contraction in one tile, so that no partial result leaves VMEM; as many columns as fill
    WEIGHT_TILE_BYTES, and of the sizes near that one which divides the columns."""
    itemsize = jnp.dtype(x_dtype).itemsize
    row_tile = 32 // itemsize
    most_rows = min(MAX_ROWS, X_TILE_BYTES // (itemsize * contraction) // row_tile * row_tile)
    tile_columns = wide_columns(contraction * bits / 8, columns)
    wanted_loop_rows = max(1, LOOP_VALUES[jnp.dtype(x_dtype)] // tile_columns)
    if tile_columns >= (WIDE_COLUMNS if has_bfloat16_vectors(chip) else WIDE_COLUMNS_IN_FLOAT32):
        wanted_loop_rows = min(LOOP_ROWS, wanted_loop_rows)
    return QuantBlocks(
        rows=min(max(most_rows, row_tile), -(-rows // row_tile) * row_tile),
        columns=tile_columns,
        loop_rows=_loop_rows(contraction, group, wanted_loop_rows),
    )


def wide_columns(column_bytes: float, columns: int, tile_bytes: int = WEIGHT_TILE_BYTES) -> int:
    """Columns of one tile of a weight whose tiles hold whole columns: a multiple of 128, or all."""
    wanted = int(min(tile_bytes / column_bytes, columns / LEAST_TILES)) // LANES * LANES
    if wanted >= columns or columns <= LANES:
        return columns
    wanted = max(wanted, LANES)
    return next((size for size in range(wanted, wanted // 2, -LANES) if columns % size == 0), wanted)


def _loop_rows(contraction: int, group: int, wanted: int) -> int:
    """Whole groups that divide the contraction, nearest to the wanted rows; the loop is unrolled where its steps would
    not start on whole tiles."""
    sizes = [size for size in range(group, contraction + 1, group) if contraction % size == 0]
    aligned = [size for size in sizes if is_aligned(size, group)]
    if not aligned or contraction <= 2 * wanted:
        aligned = sizes
    return min(aligned, key=lambda size: abs(size - wanted))
