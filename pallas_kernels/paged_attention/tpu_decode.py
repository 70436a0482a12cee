"""TPU decode: one query token per sequence against its pages, and the write of that token's key and value.

One grid step holds a group of sequences. Its softmax states start from the new tokens, which are not in the pool yet,
so every maximum is finite; then one loop runs over the group's key blocks, whose pages were copied to VMEM while
earlier blocks were computed, across sequences and groups. Meanwhile the tiles of the pool that the new tokens belong to
arrive, get their row, and go back: a copy cannot address one row of a page.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from headrace.pallas_kernels.chips import CHIPS, MIB
from headrace.pallas_kernels.paged_attention.decode_blocks import (
    LANES,
    SUBLANES,
    DecodeShape,
    decode_shape,
    heads_at_once,
    num_groups,
    pick_blocks,
    vmem_bytes,
)
from headrace.pallas_kernels.paged_attention.decode_copies import Items, Scratch, Static, Tiles
from headrace.pallas_kernels.paged_attention.decode_work import Fresh, Work, fresh_tokens, list_work
from headrace.pallas_kernels.paged_attention.online_softmax import LOG2_E, LOWEST
from headrace.pallas_kernels.types import AttentionSpec, AttnMeta, Kernels, KVPool, TokenKV

Array = jax.Array
Ref = Any


def decode(
    q_BNH: Array,
    new: TokenKV,
    pool: KVPool,
    first_row: Array | int,
    meta: AttnMeta,
    spec: AttentionSpec,
    sinks_N: Array | None,
    kernels: Kernels,
) -> tuple[Array, KVPool]:
    """Attention of the decode rows and their write, in place where the pool is donated.

    Args: as ``api.paged_attention``, of the decode rows alone; meta may hold query blocks, which are ignored.
    Returns: (output [B, N, H] in the type of q, pool).
    Raises: UnsupportedCase: shapes that this kernel, scalar memory or VMEM do not take.
    """
    shape = decode_shape(q_BNH.shape[0], meta.page_table_ZM.shape[1], q_BNH.shape[1], q_BNH.dtype, pool)
    static = Static(shape, pick_blocks(shape, kernels), spec)
    work = list_work(meta, first_row, shape, static.blocks, spec.window)
    q_BNC = jnp.pad(q_BNH.astype(shape.compute_dtype), ((0, 0), (0, 0), (0, shape.key_width - shape.head_dim)))
    sinks = None
    if sinks_N is not None:
        sinks = jnp.broadcast_to(sinks_N.astype(jnp.float32)[:, None] * LOG2_E, (shape.num_heads, LANES))
    out_BNC, pool = _call(static, kernels, work, q_BNC, fresh_tokens(new, shape), sinks, pool)
    return out_BNC[..., shape.key_width - shape.head_dim :], pool


def _call(
    static: Static,
    kernels: Kernels,
    work: Work,
    q: Array,
    fresh: Fresh,
    sinks: Array | None,
    pool: KVPool,
) -> tuple[Array, KVPool]:
    shape, group = static.shape, static.blocks.group

    def of_group(array: Array) -> pl.BlockSpec:
        return pl.BlockSpec((group, *array.shape[1:]), lambda g, *_: (g,) + (0,) * (array.ndim - 1))

    in_pool = [pl.BlockSpec(memory_space=pl.ANY)] * len(jax.tree.leaves(pool))
    whole = [] if sinks is None else [pl.BlockSpec(sinks.shape, lambda g, *_: (0, 0))]
    num_scalars, num_blocks = len(jax.tree.leaves(work)), len(jax.tree.leaves((q, fresh, sinks)))
    out, *stored = pl.pallas_call(
        functools.partial(_kernel, static, sinks is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=num_scalars,
            grid=(num_groups(shape, static.blocks),),
            in_specs=[of_group(array) for array in jax.tree.leaves((q, fresh))] + whole + in_pool,
            out_specs=[of_group(q), *in_pool],
            scratch_shapes=_scratch_shapes(static),
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, shape.q_dtype),
            *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in jax.tree.leaves(pool)),
        ],
        input_output_aliases={num_scalars + num_blocks + i: 1 + i for i in range(len(in_pool))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=_vmem_limit(static, kernels.chip),
            # Scalar work for every copy; plans are validated on the host, and the interpreter checks in tests.
            disable_bounds_checks=True,
        ),
        interpret=kernels.interpret,
        name="paged_attention_decode",
    )(*jax.tree.leaves((work, q, fresh, sinks, pool)))
    return out, KVPool(*stored)


def _vmem_limit(static: Static, chip: str) -> int:
    """Twice what is known to be needed and 32 MiB, for what the compiler spills, within the chip's."""
    return min(32 * MIB + 2 * vmem_bytes(static.shape, static.blocks), CHIPS[chip].on_chip_bytes)


def _scratch_shapes(static: Static) -> list[Any]:
    shape, blocks = static.shape, static.blocks
    heads, width, page_tokens = shape.num_kv_heads, shape.row_width, shape.page_tokens
    scales = [
        pltpu.VMEM((blocks.slots, blocks.block_pages, heads, 2, page_tokens), jnp.float32),
        pltpu.VMEM((2, blocks.group, heads, 2, page_tokens), jnp.float32),
    ]
    state = (blocks.group, shape.num_heads)
    return [
        pltpu.VMEM((blocks.slots, blocks.block_pages, heads, page_tokens, width), shape.kv_dtype),
        pltpu.VMEM((2, blocks.group, heads, shape.tile_tokens, width), shape.kv_dtype),
        pltpu.VMEM((*state, LANES), jnp.float32),
        pltpu.VMEM((*state, LANES), jnp.float32),
        pltpu.VMEM((*state, shape.key_width), jnp.float32),
        pltpu.SemaphoreType.DMA((2, blocks.slots)),
        pltpu.SemaphoreType.DMA((2, 2)),
    ] + scales * shape.is_quantized


def _kernel(static: Static, has_sinks: bool, *refs: Ref) -> None:
    work, q, fresh, sinks, out, pages, scale, scratch = _named(static, has_sinks, refs)
    group = pl.program_id(0)
    items = Items(static, work, pages, scale, scratch)
    tiles = Tiles(static, work, pages, scale, fresh, scratch)
    last_group = num_groups(static.shape, static.blocks) - 1
    begin, end, total = work.group_start[group], work.group_start[group + 1], work.group_start[last_group + 1]
    pl.when(group >= 2)(lambda: tiles.for_live(group - 2, tiles.writes, wait=True))
    tiles.for_live(group, tiles.reads)
    for u in range(static.blocks.group):
        _start_state(static, q[u], fresh.value_BKC.at[u], sinks, u, scratch)

    # The first trips of the call only start copies.
    lead = static.blocks.slots - 1

    @pl.loop(jnp.where(group == 0, -lead, begin), end)
    def _item(item: Array) -> None:
        pl.when(item + lead < total)(lambda: items.start(item + lead))

        @pl.when(item >= 0)
        def _attend_item() -> None:
            items.wait(item)
            if static.may_hold_nan:
                items.clean(item)
            u = work.item_seq[item] - group * static.blocks.group
            _attend(static, items, item, q[u], u, scratch)

    for u in range(static.blocks.group):
        is_live = work.kv_len[group * static.blocks.group + u] > 0
        result = scratch.acc[u] / scratch.total[u][:, :1]
        out[u] = jnp.where(is_live, result, 0).astype(out.dtype)
    tiles.for_live(group, tiles.reads, wait=True)
    for u in range(static.blocks.group):
        tiles.put_row(group, u)
    tiles.for_live(group, tiles.writes)

    @pl.when(group == last_group)
    def _drain() -> None:
        pl.when(group >= 1)(lambda: tiles.for_live(group - 1, tiles.writes, wait=True))
        tiles.for_live(group, tiles.writes, wait=True)


def _named(static: Static, has_sinks: bool, refs: Sequence[Ref]) -> tuple[Any, ...]:
    """References in the order of _call, by name. The pool's inputs are its outputs."""
    rest, has_scale = iter(refs), static.shape.is_quantized

    def optional(is_there: bool) -> Any:
        return next(rest) if is_there else None

    work = Work(*(next(rest) for _ in range(6)))
    q, fresh, sinks = next(rest), Fresh(next(rest), next(rest), optional(has_scale)), optional(has_sinks)
    _, _ = next(rest), optional(has_scale)
    out, pages, scale = next(rest), next(rest), optional(has_scale)
    kv, tile, top, total, acc, arrived, tile_moved = (next(rest) for _ in range(7))
    scratch = Scratch(kv, optional(has_scale), tile, optional(has_scale), top, total, acc, arrived, tile_moved)
    return work, q, fresh, sinks, out, pages, scale, scratch


def _of_heads(part: Callable[[int, int, int], Array], shape: DecodeShape) -> Array:
    """[N, lanes], of what each key head gives to its query heads. part(k, first, end): rows of query heads first..end,
    where those of key head k are right; a register holds 8 rows, so heads that share one are merged."""
    per_head, chunks = shape.num_heads // shape.num_kv_heads, []
    for first in range(0, shape.num_heads, SUBLANES):
        end = min(first + SUBLANES, shape.num_heads)
        chunk = part(first // per_head, first, end)
        head = lax.broadcasted_iota(jnp.int32, chunk.shape, 0) + first
        for k in range(first // per_head + 1, (end - 1) // per_head + 1):
            chunk = jnp.where(head >= k * per_head, part(k, first, end), chunk)
        chunks.append(chunk)
    return jnp.concatenate(chunks, axis=0)


def _rows(of_head: Callable[[int], Array], shape: DecodeShape) -> Array:
    """[N, lanes]: each query head gets the row [1, lanes] of its key head."""
    rows = [of_head(k) for k in range(shape.num_kv_heads)]
    return _of_heads(lambda k, first, end: jnp.broadcast_to(rows[k], (end - first, rows[k].shape[1])), shape)


def _products(left: Array, of_head: Callable[[int], Array], contract: tuple[int, int], shape: DecodeShape) -> Array:
    """[N, lanes]: the row of each query head times what its key head gives. Whole registers of 8 query heads go into
    the product, so that none is shifted."""
    per_head, dtype = shape.num_heads // shape.num_kv_heads, shape.compute_dtype
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    results, firsts = [], []
    for k in range(shape.num_kv_heads):
        first = k * per_head // SUBLANES * SUBLANES
        end = min(-(-(k + 1) * per_head // SUBLANES) * SUBLANES, shape.num_heads)
        results.append(
            lax.dot_general(
                left[first:end].astype(dtype),
                of_head(k),
                ((contract[:1], contract[1:]), ((), ())),
                precision=precision,
                preferred_element_type=jnp.float32,
            )
        )
        firsts.append(first)
    return _of_heads(lambda k, first, end: results[k][first - firsts[k] : end - firsts[k]], shape)


def _logits(static: Static, score: Array, scales: Array | None = None) -> Array:
    """Scores, times the scales of their keys, scaled and capped, in powers of two: exp2 takes them."""
    cap = static.spec.soft_cap
    constant = static.spec.scale * LOG2_E if cap is None else static.spec.scale / cap
    scaled = score * (constant if scales is None else scales * constant)
    return scaled if cap is None else jnp.tanh(scaled) * (cap * LOG2_E)


def _start_state(static: Static, q: Array, value: Ref, sinks: Ref, u: int, scratch: Scratch) -> None:
    """The softmax over the new token and the sink."""
    shape = static.shape
    lanes = shape.key_width
    key = _rows(lambda k: value[k : k + 1, :lanes], shape)
    acc = _rows(lambda k: value[k : k + 1, shape.row_width - lanes :], shape)
    score = jnp.sum(q.astype(jnp.float32) * key, axis=1, keepdims=True)
    top = jnp.broadcast_to(_logits(static, score), (shape.num_heads, LANES))
    total = jnp.ones_like(top)
    if sinks is not None:
        logit, top = top, jnp.maximum(top, sinks[...])
        weight = jnp.exp2(logit - top)
        total = weight + jnp.exp2(sinks[...] - top)
        acc = acc * weight[:, :1]
    scratch.top[u], scratch.total[u], scratch.acc[u] = top, total, acc


def _attend(static: Static, items: Items, item: Array, q: Array, u: Array, scratch: Scratch) -> None:
    """One key block into the state of its sequence, in pieces of as many heads as registers take."""
    heads = heads_at_once(static.shape, static.blocks)
    for head in range(0, static.shape.num_kv_heads, heads):
        _attend_heads(static, range(head, head + heads), items, item, q, u, scratch)


def _attend_heads(
    static: Static, heads: range, items: Items, item: Array, q: Array, u: Array, scratch: Scratch
) -> None:
    """Of some key heads and their query heads, all at once: rows of scores are query heads."""
    per_head = static.shape.num_heads // static.shape.num_kv_heads
    shape = replace(static.shape, num_heads=len(heads) * per_head, num_kv_heads=len(heads))
    slot, lanes = items.slot(item), shape.key_width
    state = (u, slice(heads.start * per_head, heads.stop * per_head))

    def rows(k: int, first: int, end: int) -> Array:
        stored = scratch.kv[slot, :, heads[k], :, first:end]
        return stored.reshape(static.block_tokens, end - first).astype(shape.compute_dtype)

    score = _products(q[state[1]].astype(jnp.float32), lambda k: rows(k, 0, lanes), (1, 1), shape)
    first, end = items.live_tokens(item)
    token = lax.broadcasted_iota(jnp.int32, score.shape, 1)
    is_seen = token < end
    if static.spec.window is not None:
        is_seen &= token >= first
    key_scales = _scales(static, shape, heads, scratch, slot, 0) if shape.is_quantized else None
    logit = jnp.where(is_seen, _logits(static, score, key_scales), LOWEST)
    old_top = scratch.top[state]
    top = jnp.maximum(old_top, jnp.max(logit, axis=1, keepdims=True))
    weight = jnp.exp2(logit - top[:, :1])
    keep = jnp.exp2(old_top - top)
    scratch.top[state] = top
    scratch.total[state] = scratch.total[state] * keep + jnp.sum(weight, axis=1, keepdims=True)
    if shape.is_quantized:
        # A stale scale may be NaN, and 0 * NaN is not 0.
        weight = jnp.where(is_seen, weight * _scales(static, shape, heads, scratch, slot, 1), 0)
    value = _products(weight, lambda k: rows(k, shape.row_width - lanes, shape.row_width), (1, 0), shape)
    scratch.acc[state] = scratch.acc[state] * keep[:, :1] + value


def _scales(static: Static, shape: DecodeShape, heads: range, scratch: Scratch, slot: Array, which: int) -> Array:
    """[N, tokens]: scales of a block's keys (0) or values (1) for the query heads of some key heads, of that shape."""
    pages = range(static.blocks.block_pages)

    def of_head(k: int) -> Array:
        return jnp.concatenate([scratch.scale[slot, page, heads[k], which : which + 1] for page in pages], axis=1)

    return _rows(of_head, shape)
