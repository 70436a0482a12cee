"""Attention of query blocks on TPU: an online softmax over keys and values that all come from the pool's pages.

The block's own tokens were written to the pool before.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from headrace.pallas_kernels import block_sizes
from headrace.pallas_kernels.chips import CHIPS, MIB, Chip
from headrace.pallas_kernels.kv_quantization import is_quantized
from headrace.pallas_kernels.paged_attention.online_softmax import LOG2_E
from headrace.pallas_kernels.paged_attention.tpu_prefill_kernel import kernel
from headrace.pallas_kernels.paged_attention.tpu_prefill_shape import LANES, PrefillBlocks, PrefillShape
from headrace.pallas_kernels.paged_attention.tpu_prefill_steps import flat, scratch_shapes
from headrace.pallas_kernels.types import AttentionSpec, AttnMeta, Kernels, KVPool, UnsupportedCase
from headrace.pallas_kernels.write_pages.tpu import tile_rows

OPERATION = "paged_attention.prefill"
"""Name in tuned files."""
TILE_SUBLANES = 8
TABLE_BYTES = MIB * 3 // 4
"""Largest page table: it lies in SMEM (1 MiB), beside the compiler's own scalars."""


def prefill(
    q_XNH: jax.Array,
    pool: KVPool,
    first_row: jax.Array | int,
    meta: AttnMeta,
    spec: AttentionSpec,
    sinks_N: jax.Array | None,
    kernels: Kernels,
) -> jax.Array:
    """Attention of the query blocks to what the pool holds of their sequences, their own tokens included.

    Args:
      q_XNH: queries of the query blocks alone, X = J * block tokens.
      Others: as ``headrace.pallas_kernels.api.paged_attention``.
    Returns: [X, N, H] in the type of q; zeros in padding blocks, finite in a block's padding.
    Raises: UnsupportedCase: see ``_shape``.
    """
    tokens, num_heads, head_dim = q_XNH.shape
    shape = _shape(q_XNH, pool, meta, spec, sinks_N is not None, kernels)
    num_blocks, num_kv_heads = meta.num_blocks, pool.num_kv_heads
    q = q_XNH.astype(shape.compute_dtype).reshape(num_blocks, shape.block_tokens, num_kv_heads, shape.group, head_dim)
    # All query heads of a key head are rows of one product, so that the matrix unit is full with 64 tokens already.
    q_JKXH = q.transpose(0, 2, 3, 1, 4).reshape(num_blocks, num_kv_heads, shape.rows, head_dim)
    q_JKXH = jnp.pad(q_JKXH, ((0, 0), (0, 0), (0, 0), (0, shape.width - head_dim)))
    operands = [q_JKXH]
    if sinks_N is not None:
        # In units of the running maximum.
        sink_KG1 = sinks_N.astype(jnp.float32).reshape(num_kv_heads, shape.group, 1) * (LOG2_E / shape.exponent_factor)
        operands.append(jnp.broadcast_to(sink_KG1, (num_kv_heads, shape.group, LANES)))
    out_JKXH = _call(shape, operands, jax.tree.leaves(pool), _scalars(first_row, meta), q_XNH.dtype, kernels)
    out = out_JKXH[..., shape.width - head_dim :]
    out = out.reshape(num_blocks, num_kv_heads, shape.group, shape.block_tokens, head_dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(tokens, num_heads, head_dim)


def _scalars(first_row: jax.Array | int, meta: AttnMeta) -> list[jax.Array]:
    """Only the table rows of prefill segments: SMEM is small."""
    rows = meta.num_decode_rows
    return [
        meta.page_table_ZM[rows:].reshape(-1),
        jnp.asarray(first_row, jnp.int32).reshape(1),
        meta.blk_seq_J - rows,
        meta.blk_pos_J,
        meta.blk_len_J,
    ]


def _shape(
    q_XNH: jax.Array, pool: KVPool, meta: AttnMeta, spec: AttentionSpec, has_sinks: bool, kernels: Kernels
) -> PrefillShape:
    """Raises: UnsupportedCase."""
    tokens, num_heads, head_dim = q_XNH.shape
    dtype = pool.pages_RKWC.dtype
    block_tokens = meta.block_tokens(tokens + meta.num_decode_rows)
    chip = _checked_chip(pool, meta, block_tokens, kernels)
    make = functools.partial(
        PrefillShape,
        spec=spec,
        page_tokens=pool.page_tokens,
        block_tokens=block_tokens,
        group=num_heads // pool.num_kv_heads,
        max_pages=meta.page_table_ZM.shape[1],
        head_dim=head_dim,
        has_scales=is_quantized(dtype),
        has_sinks=has_sinks,
        compute_dtype=jnp.dtype(jnp.float32 if dtype == jnp.float32 else jnp.bfloat16),
    )
    key = f"{dtype} N{num_heads} K{pool.num_kv_heads} H{head_dim} W{pool.page_tokens} block{block_tokens}"
    blocks = block_sizes.pick(kernels, PrefillBlocks, OPERATION, key, lambda: _heuristic(make, pool, q_XNH.dtype, chip))
    shape = make(blocks=blocks)
    _check_blocks(shape, pool, q_XNH.dtype, chip)
    return shape


def _checked_chip(pool: KVPool, meta: AttnMeta, block_tokens: int, kernels: Kernels) -> Chip:
    if kernels.chip is None:
        raise UnsupportedCase("TPU kernels need the name of a chip: block sizes follow from its VMEM")
    chip = CHIPS[kernels.chip]
    dtype, page_tokens, head_dim = pool.pages_RKWC.dtype, pool.page_tokens, pool.head_dim
    if dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2) and chip.fp8 != dtype:
        raise UnsupportedCase(f"pages of {dtype} on {chip.name}, whose 8-bit float type is {chip.fp8}")
    if head_dim != LANES // 2 and head_dim % LANES:
        raise UnsupportedCase(f"heads of {head_dim}: keys and values are cut at {LANES} lanes; 64, 128, 256 can be")
    if page_tokens not in (16, 32, 64, 128):
        raise UnsupportedCase(f"pages of {page_tokens} tokens; TPU kernels have pages of 16, 32, 64 or 128")
    if block_tokens % page_tokens:
        raise UnsupportedCase(f"query blocks of {block_tokens} tokens are no whole pages of {page_tokens}")
    segments, max_pages = meta.page_table_ZM.shape[0] - meta.num_decode_rows, meta.page_table_ZM.shape[1]
    if 4 * segments * max_pages > TABLE_BYTES:
        raise UnsupportedCase(
            f"a page table of {segments} segments of {max_pages} pages is larger than {TABLE_BYTES} bytes of SMEM"
        )
    return chip


def _heuristic(make: Callable[..., PrefillShape], pool: KVPool, q_dtype: jnp.dtype, chip: Chip) -> PrefillBlocks:
    """512 keys, up to 256 rows, all heads that fit half of VMEM.

    More rows share a product's loads of keys. On v6e with 128 lanes a head, bundles for 256 rows x 512 keys in steps of
    256 rows: 429, but 50 spills and fills with the compiler of JAX 0.12; of 128: 522 with both; of 64, in an experiment
    with one buffer for both steps' scores: 796. 512 keys of 8 heads are 1 us of HBM there, about a copy's latency. One
    page of all heads is one copy, so that heads are only split for VMEM, and on v5p, whose two cores share them.
    """
    table_tokens = make(blocks=None).max_pages * pool.page_tokens
    # 8-bit pages of two tiles of lanes are widened in registers, which takes too many for 512 keys: v5e had 431 spills
    # and fills of int8. v6e spilled with fp8, not with int8.
    is_narrow = is_quantized(pool.pages_RKWC.dtype) and pool.head_dim > LANES
    widens = is_narrow and (not chip.has_bfloat16_vectors or pool.pages_RKWC.dtype != jnp.int8)
    most = 256 if widens else 512
    kv_tokens = table_tokens if table_tokens <= LANES else min(most, pl.cdiv(table_tokens, LANES) * LANES)
    rows = make(blocks=None).rows
    limit = min(_most_rows(make(blocks=None), pool, chip), rows)
    query_rows = max(n for n in range(16, limit + 1, 16) if rows % n == 0)
    at_most = max(pool.num_kv_heads // (2 if chip.name == "v5p" else 1), 1)
    sizes = [
        PrefillBlocks(kv_tokens=kv_tokens, kv_heads=heads, query_rows=query_rows)
        for heads in range(1, at_most + 1)
        if pool.num_kv_heads % heads == 0
    ]
    fitting = [size for size in sizes if _vmem_bytes(make(blocks=size), pool, q_dtype) <= chip.on_chip_bytes // 2]
    return fitting[-1] if fitting else sizes[0]


def _most_rows(shape: PrefillShape, pool: KVPool, chip: Chip) -> int:
    """Rows of one step for which the compiler spills no register (libtpu 0.0.42.1 and 0.0.50.1; 8-bit pages on v6e: 34
    spills and fills with 256 rows). One key head has few steps, and 256 rows would leave it none for the overlap."""
    if not chip.has_bfloat16_vectors and shape.head_dim > LANES:
        return 64
    if not is_quantized(pool.pages_RKWC.dtype):
        return 256 if not chip.has_bfloat16_vectors and pool.num_kv_heads > 1 else 128
    has_more = shape.spec.window is not None or shape.spec.soft_cap is not None or shape.has_sinks
    return 64 if has_more or (chip.name == "tpu7x" and shape.head_dim <= LANES) else 128


def _vmem_bytes(shape: PrefillShape, pool: KVPool, q_dtype: jnp.dtype) -> int:
    """Scratch and pipelined blocks as laid out, tiles filled up; and the scores' way through the softmax once more."""
    blocks, pages = shape.blocks, pool.pages_RKWC
    per_row = 2 * shape.width * (shape.compute_dtype.itemsize + q_dtype.itemsize) + 4 * (2 * LANES + shape.width)
    page_rows = max(shape.page_tokens, tile_rows(pages.dtype))
    keys = 2 * shape.kv_pages * page_rows * pages.shape[3] * pages.dtype.itemsize
    scales = 4 * TILE_SUBLANES * (2 * shape.kv_pages * LANES + max(blocks.kv_tokens, LANES)) if shape.has_scales else 0
    scores = 4 * 4 * blocks.query_rows * max(blocks.kv_tokens, LANES) + 4 * 4 * blocks.query_rows * LANES
    ends = 4 * shape.rows * LANES
    return blocks.kv_heads * (shape.rows * per_row + keys + scales) + scores + ends


def _check_blocks(shape: PrefillShape, pool: KVPool, q_dtype: jnp.dtype, chip: Chip) -> None:
    blocks = shape.blocks
    if blocks.kv_tokens % shape.page_tokens or (blocks.kv_tokens > LANES and blocks.kv_tokens % LANES):
        raise UnsupportedCase(f"{blocks} for pages of {shape.page_tokens}: kv_tokens are whole pages, and n * {LANES}")
    if pool.num_kv_heads % blocks.kv_heads or shape.rows % blocks.query_rows or blocks.query_rows % 16:
        raise UnsupportedCase(f"{blocks} does not divide {pool.num_kv_heads} heads of {shape.rows} rows")
    need, limit = _vmem_bytes(shape, pool, q_dtype), chip.on_chip_bytes * 3 // 4
    if need > limit:
        raise UnsupportedCase(f"{blocks} with {shape.rows} rows needs {need} of {limit} bytes of VMEM")


def _call(
    shape: PrefillShape,
    operands: list[jax.Array],
    pool: list[jax.Array],
    scalars: list[jax.Array],
    out_dtype: jnp.dtype,
    kernels: Kernels,
) -> jax.Array:
    num_blocks, num_kv_heads, rows, width = operands[0].shape
    heads = shape.blocks.kv_heads

    def query_index(head: jax.Array, block: jax.Array, *scalars: jax.Ref) -> tuple[jax.Array | int, ...]:
        # The queries of padding blocks are not fetched: they all name the same block.
        return jnp.where(scalars[-1][block] > 0, block, 0), head, 0, 0

    in_specs = [pl.BlockSpec((1, heads, rows, width), query_index)]
    if shape.has_sinks:
        in_specs.append(pl.BlockSpec((heads, shape.group, LANES), lambda head, *_: (head, 0, 0)))
    call = pl.pallas_call(
        functools.partial(kernel, shape=shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(num_kv_heads // heads, num_blocks),
            in_specs=[*in_specs, *[pl.BlockSpec(memory_space=pltpu.HBM)] * len(pool)],
            out_specs=pl.BlockSpec((1, heads, rows, width), lambda head, block, *_: (block, head, 0, 0)),
            scratch_shapes=flat(scratch_shapes(shape, pool)),
        ),
        out_shape=jax.ShapeDtypeStruct((num_blocks, num_kv_heads, rows, width), out_dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=CHIPS[kernels.chip].on_chip_bytes * 3 // 4,
            disable_bounds_checks=True,
        ),
        interpret=kernels.interpret,
        name="prefill",
    )

    if kernels.interpret is True:  # The plain interpreter would update arrays whose type has no memory with those.
        return call(*scalars, *operands, *pool)

    def with_pool_in_hbm(pool: list[jax.Array]) -> jax.Array:
        # Else XLA moves a pool's scales to VMEM where they fit, all of them for the few pages that are read.
        return call(*scalars, *operands, *(pltpu.with_memory_space_constraint(leaf, pltpu.HBM) for leaf in pool))

    return jax.jit(with_pool_in_hbm, inline=True)(pool)
