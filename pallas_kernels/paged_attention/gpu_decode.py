"""Decode rows on GPU: keys of a row are split over programs, whose partial softmaxes XLA combines (Flash-Decoding)."""

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
class GpuDecodeBlocks:
    """keys: tokens of one loop step. splits: programs that share the keys of one row and head. stages: depth of the
    load pipeline."""

    keys: int
    splits: int
    num_warps: int
    stages: int


def heuristic(rows: int, context: int, pool: KVPool, spec: AttentionSpec, compute: jnp.dtype) -> GpuDecodeBlocks:
    """No GPU has measured this; it follows from what the compiler reports for sm_90a.

    keys: 8192 / H, so that 4 warps stay at 128 registers or less with 8-bit and bfloat16 pages (twice as many keys
    take 150 to 255), and three or four programs share a multiprocessor. stages: 5, because a load of keys waits for the
    load of its table entries and each takes its place in the pipeline: 3 keep one step of keys in flight, 5 keep two,
    64 KiB of bfloat16 a program, where the bandwidth of an H200 times a microsecond is 36 KiB a multiprocessor.
    splits: four programs for each multiprocessor, so that rows of unequal length even out; but two steps or more for
    each, since every split writes a partial result. float32 products run on the ordinary cores, whose operands are
    whole rows in registers: a quarter of the keys, over more warps (even so, 350 bytes of a thread spill where float32
    queries meet narrower pages at H 256).
    """
    keys, num_warps = min(max(8192 // pool.head_dim, 32), 128), 4
    if compute == jnp.float32:
        keys, num_warps = max(keys // 4, gpu_pages.SMALLEST_DOT), min(max(pool.head_dim // 16, 4), 8)
    longest = context if spec.window is None else min(context, spec.window + keys)
    wanted = pl.cdiv(4 * gpu_pages.MULTIPROCESSORS, rows * pool.num_kv_heads)
    return GpuDecodeBlocks(keys=keys, splits=max(1, min(wanted, longest // (2 * keys))), num_warps=num_warps, stages=5)


def decode(
    q_BNH: Array,
    pool: KVPool,
    first_row_1: Array,
    meta: AttnMeta,
    spec: AttentionSpec,
    sinks_N: Array | None,
    kernels: Kernels,
) -> Array:
    """Attention of B rows to the stored tokens of their sequences, [B, N, H] in the type of q."""
    rows, num_heads, width = q_BNH.shape
    kv_heads, group = pool.num_kv_heads, num_heads // pool.num_kv_heads
    padded = gpu_pages.padded_rows(group)
    context = meta.page_table_ZM.shape[1] * pool.page_tokens
    compute = gpu_pages.compute_dtype(q_BNH.dtype, pool)
    blocks = block_sizes.pick(
        kernels,
        GpuDecodeBlocks,
        "paged_attention_decode",
        f"{pool.pages_RKWC.dtype} {compute} B{rows} K{kv_heads} G{group} H{width} W{pool.page_tokens} context{context}",
        lambda: heuristic(rows, context, pool, spec, compute),
    )
    partial = (rows, kv_heads, blocks.splits, padded)
    acc, top, total = pl.pallas_call(
        functools.partial(_kernel, spec=spec, blocks=blocks, group=group, compute=compute),
        grid=partial[:3],
        out_shape=[
            jax.ShapeDtypeStruct((*partial, width), jnp.float32),
            jax.ShapeDtypeStruct(partial, jnp.float32),
            jax.ShapeDtypeStruct(partial, jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.stages),
        interpret=kernels.interpret,
        name="paged_decode",
    )(q_BNH, pool, meta.page_table_ZM, meta.kv_len_Z, first_row_1)
    out = _combine(acc[:, :, :, :group], top[..., :group], total[..., :group], sinks_N)
    return out.reshape(rows, num_heads, width).astype(q_BNH.dtype)


def _kernel(
    q_ref: Array,
    pool: KVPool,
    table_ref: Array,
    len_ref: Array,
    row_ref: Array,
    acc_ref: Array,
    top_ref: Array,
    total_ref: Array,
    *,
    spec: AttentionSpec,
    blocks: GpuDecodeBlocks,
    group: int,
    compute: jnp.dtype,
) -> None:
    row, head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    width, padded, keys = pool.head_dim, acc_ref.shape[3], blocks.keys
    end = len_ref[row]
    start = jnp.int32(0) if spec.window is None else jnp.maximum(end - spec.window, 0)
    # An even share of the blocks that hold live keys: they depend on this row's length alone, so its bits do too.
    first = lax.div(start, keys)
    count = lax.div(end + keys - 1, keys) - first
    share = lax.div(count + blocks.splits - 1, blocks.splits)
    lower = first + split * share
    upper = jnp.minimum(lower + share, first + count)

    place = (row_ref[0], row, head)
    # Rows behind the last query head repeat it: a dot has 16 rows at least.
    query = jnp.minimum(jnp.arange(padded), group - 1)
    q_XH = q_ref[row, head * group + query, pl.ds(0, width)].astype(compute)

    def step(block: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        position_Y = block * keys + jnp.arange(keys)
        is_seen_1Y = ((position_Y >= start) & (position_Y < end))[None, :]
        live = (start, end - 1)
        return gpu_pages.attend_block(state, q_XH, pool, table_ref, place, position_Y, live, is_seen_1Y, spec)

    state = (
        jnp.full((padded,), LOWEST, jnp.float32),
        jnp.zeros((padded,), jnp.float32),
        jnp.zeros((padded, width), jnp.float32),
    )
    top_X, total_X, acc_XH = lax.fori_loop(lower, upper, step, state)
    is_real = jnp.arange(padded) < group
    plgpu.store(acc_ref.at[row, head, split], acc_XH, mask=jnp.broadcast_to(is_real[:, None], acc_XH.shape))
    plgpu.store(top_ref.at[row, head, split], top_X, mask=is_real)
    plgpu.store(total_ref.at[row, head, split], total_X, mask=is_real)


def _combine(acc_BKSGH: Array, top_BKSG: Array, total_BKSG: Array, sinks_N: Array | None) -> Array:
    """Softmax over the splits; a sink is one more split that carries no value."""
    top_BKG = top_BKSG.max(axis=2)
    sink_KG = None
    if sinks_N is not None:
        sink_KG = sinks_N.astype(jnp.float32).reshape(top_BKG.shape[1:]) * LOG2_E
        top_BKG = jnp.maximum(top_BKG, sink_KG)
    factor_BKSG = jnp.exp2(top_BKSG - top_BKG[:, :, None])
    total_BKG = (total_BKSG * factor_BKSG).sum(axis=2)
    if sink_KG is not None:
        total_BKG += jnp.exp2(sink_KG - top_BKG)
    acc_BKGH = (acc_BKSGH * factor_BKSG[..., None]).sum(axis=2)
    # Every split of a row without tokens is empty: 0 / 1.
    return acc_BKGH / jnp.where(total_BKG > 0, total_BKG, 1)[..., None]
