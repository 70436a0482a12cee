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


def heuristic(rows: int, context: int, pool: KVPool, spec: AttentionSpec) -> GpuDecodeBlocks:
    """No GPU has measured this; the compiler's figures (registers, shared memory) bound it.

    keys: a step of 16 KiB of keys and as much of values keeps three stages near 96 KiB, so that two programs fit into
    the 227 KiB of a multiprocessor. splits: four programs for each multiprocessor, two resident and two behind them,
    so that rows of unequal length even out; but two steps or more for each, since every split writes a partial result.
    """
    keys = 16 * 1024 // (pool.head_dim * pool.pages_RKWC.dtype.itemsize)
    keys = min(max(keys, gpu_pages.SMALLEST_DOT), 128)
    longest = context if spec.window is None else min(context, spec.window + keys)
    wanted = pl.cdiv(4 * gpu_pages.MULTIPROCESSORS, rows * pool.num_kv_heads)
    return GpuDecodeBlocks(keys=keys, splits=max(1, min(wanted, longest // (2 * keys))), num_warps=4, stages=3)


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
    blocks = block_sizes.pick(
        kernels,
        GpuDecodeBlocks,
        "paged_attention_decode",
        f"{pool.pages_RKWC.dtype} B{rows} K{kv_heads} G{group} H{width} W{pool.page_tokens} context{context}",
        lambda: heuristic(rows, context, pool, spec),
    )
    partial = (rows, kv_heads, blocks.splits, padded)
    compute = gpu_pages.compute_dtype(q_BNH.dtype, pool)
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
        jnp.full((padded,), gpu_pages.LOWEST, jnp.float32),
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
        sink_KG = sinks_N.astype(jnp.float32).reshape(top_BKG.shape[1:]) * gpu_pages.LOG2_E
        top_BKG = jnp.maximum(top_BKG, sink_KG)
    factor_BKSG = jnp.exp2(top_BKSG - top_BKG[:, :, None])
    total_BKG = (total_BKSG * factor_BKSG).sum(axis=2)
    if sink_KG is not None:
        total_BKG += jnp.exp2(sink_KG - top_BKG)
    acc_BKGH = (acc_BKSGH * factor_BKSG[..., None]).sum(axis=2)
    # Every split of a row without tokens is empty: 0 / 1.
    return acc_BKGH / jnp.where(total_BKG > 0, total_BKG, 1)[..., None]
