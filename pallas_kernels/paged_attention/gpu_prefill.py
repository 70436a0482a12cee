"""Query blocks on GPU: FlashAttention, one program for a tile of (token, query head) rows of a block and a key head."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from headrace.pallas_kernels import block_sizes
from headrace.pallas_kernels.paged_attention import gpu_pages
from headrace.pallas_kernels.paged_attention.online_softmax import LOG2_E, LOWEST
from headrace.pallas_kernels.types import AttentionSpec, AttnMeta, Kernels, KVPool

Array = jax.Array


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPrefillBlocks:
    """rows: (token, query head) pairs of one program. keys: tokens of one loop step. stages: depth of the load
    pipeline."""

    rows: int
    keys: int
    num_warps: int
    stages: int


def heuristic(block_rows: int, width: int, compute: jnp.dtype) -> GpuPrefillBlocks:
    """No GPU has measured this; it follows from what the compiler reports for sm_90a.

    rows: the accumulator lies in registers, 128 x 128 float32 over 8 warps are 64 of a thread's 255, and the kernel
    takes 140 to 180 in all. float32 products run on the ordinary cores, whose operands are whole rows in registers:
    tiles of 16 x 16 over more warps (even so, 560 bytes of a thread spill where float32 queries meet narrower pages at
    H 256). stages: as in decode, 5 keep two steps of keys in flight; 131 KiB of shared memory at most.
    """
    if compute == jnp.float32:
        small = gpu_pages.SMALLEST_DOT
        return GpuPrefillBlocks(rows=small, keys=small, num_warps=min(max(width // 16, 4), 8), stages=5)
    rows = min(gpu_pages.padded_rows(block_rows), max(16384 // width, 16), 128)
    keys = 32 if width == 256 else 64
    return GpuPrefillBlocks(rows=rows, keys=keys, num_warps=8 if rows * width >= 16384 else 4, stages=5)


def prefill(
    q_TNH: Array,
    pool: KVPool,
    first_row_1: Array,
    meta: AttnMeta,
    spec: AttentionSpec,
    sinks_N: Array | None,
    kernels: Kernels,
) -> Array:
    """Attention of the query blocks to the stored tokens of their sequences, [T, N, H] in the type of q."""
    tokens, num_heads, width = q_TNH.shape
    kv_heads, group = pool.num_kv_heads, num_heads // pool.num_kv_heads
    block_rows = tokens // meta.num_blocks * group
    compute = gpu_pages.compute_dtype(q_TNH.dtype, pool)
    blocks = block_sizes.pick(
        kernels,
        GpuPrefillBlocks,
        "paged_attention_prefill",
        f"{pool.pages_RKWC.dtype} {compute} X{block_rows} K{kv_heads} G{group} H{width} W{pool.page_tokens}",
        lambda: heuristic(block_rows, width, compute),
    )
    return pl.pallas_call(
        functools.partial(_kernel, spec=spec, blocks=blocks, block_rows=block_rows, group=group, compute=compute),
        grid=(pl.cdiv(block_rows, blocks.rows), kv_heads, meta.num_blocks),
        out_shape=jax.ShapeDtypeStruct(q_TNH.shape, q_TNH.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.stages),
        interpret=kernels.interpret,
        name="paged_prefill",
    )(q_TNH, pool, meta.page_table_ZM, (meta.blk_seq_J, meta.blk_pos_J, meta.blk_len_J), first_row_1, sinks_N)


def _kernel(
    q_ref: Array,
    pool: KVPool,
    table_ref: Array,
    blk_refs: tuple[Array, Array, Array],
    row_ref: Array,
    sinks_ref: Array | None,
    out_ref: Array,
    *,
    spec: AttentionSpec,
    blocks: GpuPrefillBlocks,
    block_rows: int,
    group: int,
    compute: jnp.dtype,
) -> None:
    tile, head, block = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    width, rows, keys = pool.head_dim, blocks.rows, blocks.keys
    # Rows behind the block's last repeat it, and store the same bits to the same place.
    row_X = jnp.minimum(tile * rows + jnp.arange(rows), block_rows - 1)
    token_X = lax.div(row_X, group)
    head_X = head * group + lax.rem(row_X, group)
    flat_X = block * (block_rows // group) + token_X
    q_XH = q_ref[flat_X, head_X, pl.ds(0, width)].astype(compute)

    sequence, position, length = (ref[block] for ref in blk_refs)
    last = jnp.where(length > 0, position + length, 0)
    # Padding tokens see what the last real token sees, never an unwritten key.
    end_X = jnp.minimum(position + token_X + 1, last)
    start_X = jnp.zeros_like(end_X) if spec.window is None else jnp.maximum(end_X - spec.window, 0)
    # The tile's own range: its first token's first key, its last token's last key.
    first_token = lax.div(tile * rows, group)
    last_token = lax.div(jnp.minimum(tile * rows + rows, block_rows) - 1, group)
    tile_end = jnp.minimum(position + last_token + 1, last)
    tile_start = jnp.int32(0)
    if spec.window is not None:
        tile_start = jnp.maximum(jnp.minimum(position + first_token + 1, last) - spec.window, 0)
    place = (row_ref[0], sequence, head)

    def step(index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        position_Y = index * keys + jnp.arange(keys)
        is_seen_XY = (position_Y[None, :] >= start_X[:, None]) & (position_Y[None, :] < end_X[:, None])
        live = (tile_start, tile_end - 1)
        return gpu_pages.attend_block(state, q_XH, pool, table_ref, place, position_Y, live, is_seen_XY, spec)

    if sinks_ref is None:
        top_X, total_X = jnp.full((rows,), LOWEST, jnp.float32), jnp.zeros((rows,), jnp.float32)
    else:
        top_X, total_X = sinks_ref[head_X].astype(jnp.float32) * LOG2_E, jnp.ones((rows,), jnp.float32)
    state = (top_X, total_X, jnp.zeros((rows, width), jnp.float32))
    lower, upper = lax.div(tile_start, keys), lax.div(tile_end + keys - 1, keys)
    _, total_X, acc_XH = lax.fori_loop(lower, upper, step, state)
    out_XH = acc_XH / jnp.where(total_X > 0, total_X, 1)[:, None]
    out_ref[flat_X, head_X, pl.ds(0, width)] = out_XH.astype(out_ref.dtype)
