"""Body of the TPU kernel that attends from query blocks to pages.

Blocks of pages are copied to VMEM while the block before is worked on, also across query blocks: the last block of keys
of a query block starts the first one of the next. Scores of the next rows are computed while the softmax of these rows
runs, in two buffers of their own, since the compiler overlaps only what cannot be the same memory.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from headrace.pallas_kernels.paged_attention.online_softmax import LOWEST
from headrace.pallas_kernels.paged_attention.tpu_prefill_shape import LANES, PrefillShape

Refs = Sequence[jax.Ref]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Blocks of keys of each query block, and their way to VMEM.

    scalars: page table (flat), first row, and of each query block: table row, position, length. pool, buffers: pages,
    and scales where there are any.
    """

    shape: PrefillShape
    scalars: Refs
    pool: Refs
    buffers: Refs
    sems: jax.Ref
    first_head: jax.Array

    def tokens(self, block: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First and end position of what the query block sees; equal for a padding block."""
        pos, length = self.scalars[3][block], self.scalars[4][block]
        window = self.shape.spec.window
        first = 0 if window is None else jnp.maximum(pos + 1 - window, 0)
        return jnp.where(length > 0, first, 0), jnp.where(length > 0, pos + length, 0)

    def span(self, block: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First and end block of keys."""
        first, end = self.tokens(block)
        return first // self.shape.blocks.kv_tokens, pl.cdiv(end, self.shape.blocks.kv_tokens)

    def each_copy(self, block: jax.Array, index: jax.Array, slot: jax.Array, action: Callable[..., None]) -> None:
        """Do something with the copy of each page that holds a key in sight."""
        page_tokens, count = self.shape.page_tokens, self.shape.kv_pages
        table, first_row, seq_J = self.scalars[:3]
        first, end = self.tokens(block)
        base = index * count
        heads = pl.ds(self.first_head, self.shape.blocks.kv_heads)

        @pl.loop(jnp.maximum(base, first // page_tokens), jnp.minimum(base + count, pl.cdiv(end, page_tokens)))
        def _(page: jax.Array) -> None:
            row = first_row[0] + table[seq_J[block] * self.shape.max_pages + page]
            for i, (pool, buffer) in enumerate(zip(self.pool, self.buffers, strict=True)):
                action(
                    pltpu.make_async_copy(
                        pool.at[row, heads], buffer.at[buffer_of(slot), page - base], self.sems.at[slot, i]
                    )
                )


def start_block(keys: Keys, block: jax.Array, index: jax.Array, slot: jax.Array) -> None:
    """Start to copy one block of keys."""
    keys.each_copy(block, index, slot, lambda copy: copy.start())


def start_first_block(keys: Keys, block: jax.Array, slot: jax.Array) -> None:
    """Start the first block of keys of a query block, if there is one."""
    clamped = jnp.minimum(block, pl.num_programs(1) - 1)
    index, end = keys.span(clamped)
    pl.when((block < pl.num_programs(1)) & (index < end))(lambda: start_block(keys, clamped, index, slot))


def wait_for_block(keys: Keys, block: jax.Array, index: jax.Array, slot: jax.Array) -> None:
    """Wait until one block of keys is in its buffer."""
    keys.each_copy(block, index, slot, lambda copy: copy.wait())


def buffer_of(slot: jax.Array) -> jax.Array:
    """Which of the two buffers belongs to a pair of semaphores."""
    return slot


def take_block(keys: Keys, block: jax.Array, index: jax.Array, end: jax.Array, slot_ref: jax.Ref) -> jax.Array:
    """Start the next block of keys, of this or of the next query block, and wait for this one. Returns its
    buffer."""
    slot = slot_ref[0]
    following = 1 - slot
    is_last = index + 1 == end
    pl.when(is_last)(lambda: start_first_block(keys, block + 1, following))
    pl.when(jnp.logical_not(is_last))(lambda: start_block(keys, block, index + 1, following))
    slot_ref[0] = following
    wait_for_block(keys, block, index, slot)
    return buffer_of(slot)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """buffers: two blocks of pages, and of scales. state: running maximum, sums per lane, weighted values of each row.
    scales: of the block of keys at work, tokens along lanes; empty without scales. scores: of two groups of rows.
    slot: buffer of the block of keys that comes next."""

    buffers: Refs
    state: Refs
    scales: Refs
    scores: Refs
    slot: jax.Ref
    sems: jax.Ref


def scratch_shapes(shape: PrefillShape, pool: Sequence[jax.Array]) -> Scratch:
    """In the order of Scratch's fields; flatten with ``flat``."""
    blocks = shape.blocks
    rows = (blocks.kv_heads, shape.rows)
    return Scratch(
        buffers=[pltpu.VMEM((2, shape.kv_pages, blocks.kv_heads, *leaf.shape[2:]), leaf.dtype) for leaf in pool],
        state=[pltpu.VMEM((*rows, lanes), jnp.float32) for lanes in (LANES, shape.total_lanes, shape.width)],
        scales=[pltpu.VMEM((blocks.kv_heads, 2, blocks.kv_tokens), jnp.float32)] * shape.has_scales,
        scores=[pltpu.VMEM((blocks.query_rows, blocks.kv_tokens), jnp.float32)] * 2,
        slot=pltpu.SMEM((1,), jnp.int32),
        sems=pltpu.SemaphoreType.DMA((2, len(pool))),
    )


def flat(scratch: Scratch) -> list[object]:
    """What ``pallas_call`` wants."""
    return [*scratch.buffers, *scratch.state, *scratch.scales, *scratch.scores, scratch.slot, scratch.sems]


def _named(refs: Refs, shape: PrefillShape) -> Scratch:
    pools = 1 + shape.has_scales
    return Scratch(
        buffers=refs[:pools],
        state=refs[pools : pools + 3],
        scales=refs[pools + 3 : -4],
        scores=refs[-4:-2],
        slot=refs[-2],
        sems=refs[-1],
    )


def kernel(*refs: jax.Ref, shape: PrefillShape) -> None:
    """One query block of some key heads."""
    scalars, q, refs = refs[:5], refs[5], refs[6:]
    sinks, refs = (refs[0], refs[1:]) if shape.has_sinks else (None, refs)
    pools = 1 + shape.has_scales
    pool, out, scratch = refs[:pools], refs[pools], _named(refs[pools + 1 :], shape)
    block = pl.program_id(1)
    keys = Keys(
        shape=shape,
        scalars=scalars,
        pool=pool,
        buffers=scratch.buffers,
        sems=scratch.sems,
        first_head=pl.program_id(0) * shape.blocks.kv_heads,
    )
    begin, end = keys.span(block)

    @pl.when(block == 0)
    def _() -> None:
        # For every group of heads: on v5p the two cores share the groups, and each has a scratch of its own.
        scratch.slot[0] = 0
        start_first_block(keys, block, 0)

    @pl.when(begin == end)
    def _() -> None:
        start_first_block(keys, block + 1, scratch.slot[0])
        out[...] = jnp.zeros_like(out)

    @pl.when(begin < end)
    def _() -> None:
        _reset(shape, sinks, scratch.state)
        pos, length = scalars[3][block], scalars[4][block]

        def attend(index: jax.Array, _: None, is_masked: bool) -> None:
            slot = take_block(keys, block, index, end, scratch.slot)
            base = index * shape.blocks.kv_tokens
            first_token, end_token = (bound - base for bound in keys.tokens(block))
            mask = Mask(pos - base, length, first_token, end_token) if is_masked else None
            _attend(shape, q, scratch, slot, mask)

        # Every row of the query block sees all keys of the blocks in the middle.
        kv_tokens, window = shape.blocks.kv_tokens, shape.spec.window
        seen_by_all = 0 if window is None else jnp.maximum(pos + length - window, 0)
        middle = jnp.clip(pl.cdiv(seen_by_all, kv_tokens), begin, end)
        tail = jnp.clip((pos + 1) // kv_tokens, middle, end)
        if window is not None:
            lax.fori_loop(begin, middle, functools.partial(attend, is_masked=True), None)
        lax.fori_loop(middle, tail, functools.partial(attend, is_masked=False), None)
        lax.fori_loop(tail, end, functools.partial(attend, is_masked=True), None)

        _, total, acc = scratch.state

        @pl.loop(0, shape.blocks.kv_heads)
        def _(head: jax.Array) -> None:
            out[0, head] = (acc[head] / total[head].sum(axis=1, keepdims=True)).astype(out.dtype)


def _reset(shape: PrefillShape, sinks: jax.Ref | None, state: Refs) -> None:
    top, total, acc = state
    acc[...] = jnp.zeros_like(acc)
    if sinks is None:
        top[...] = jnp.full_like(top, LOWEST)
        total[...] = jnp.zeros_like(total)
        return
    is_first_lane = lax.broadcasted_iota(jnp.int32, total.shape, 2) == 0
    total[...] = jnp.where(is_first_lane, 1.0, 0.0)
    for head in range(shape.blocks.kv_heads):
        for member in range(shape.group):
            rows = pl.ds(member * shape.block_tokens, shape.block_tokens)
            top[head, rows] = jnp.broadcast_to(sinks[head, member : member + 1], (shape.block_tokens, LANES))


@dataclass(frozen=True, slots=True)
class Mask:
    """Position of the query block, its real tokens, and the first and end key that any row sees; positions count from
    the first key at work."""

    pos: jax.Array
    length: jax.Array
    first: jax.Array
    end: jax.Array

    def is_live(self, shape: tuple[int, ...], axis: int) -> jax.Array:
        """Whether any row sees the key."""
        key = lax.broadcasted_iota(jnp.int32, shape, axis)
        return (key >= self.first) & (key < self.end)

    def is_seen(self, shape: PrefillShape, chunk: jax.Array) -> jax.Array:
        """Whether the row sees the key, [rows, keys] of one group of rows."""
        rows, keys = shape.blocks.query_rows, shape.blocks.kv_tokens
        row = chunk * rows + lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
        # Padding tokens see what the last real token sees.
        end = self.pos + jnp.minimum(lax.rem(row, shape.block_tokens) + 1, self.length)
        key = lax.broadcasted_iota(jnp.int32, (rows, keys), 1)
        if shape.spec.window is None:
            return key < end
        return (key < end) & (key >= end - shape.spec.window)


def _attend(shape: PrefillShape, q: jax.Ref, scratch: Scratch, slot: jax.Array, mask: Mask | None) -> None:
    """One block of keys joins the softmax of every row."""
    if shape.has_scales:
        _lay_out_scales(shape, scratch, slot, mask)

    def place(step: jax.Array | int) -> tuple[jax.Array | int, jax.Array | int, jax.Ref]:
        head, chunk = step // shape.chunks, step % shape.chunks
        return head, chunk, pl.ds(pl.multiple_of(chunk * shape.blocks.query_rows, 16), shape.blocks.query_rows)

    def halves(head: jax.Array | int, lanes: slice) -> jax.Array:
        kept = slice(None) if shape.shares_lanes else lanes
        kv = scratch.buffers[0][slot, :, head, :, kept].astype(shape.compute_dtype)
        return kv.reshape(shape.blocks.kv_tokens, shape.width)

    def score(step: jax.Array | int, scores: jax.Ref) -> None:
        head, _, rows = place(step)
        scores[...] = _dot(shape, q[0, head, rows], halves(head, slice(0, shape.head_dim)), contracted=1)

    def update(step: jax.Array | int, scores: jax.Ref) -> None:
        head, chunk, rows = place(step)
        v_YH = halves(head, slice(shape.head_dim, 2 * shape.head_dim))
        if mask is not None and scratch.buffers[0].dtype != jnp.int8:
            # Values outside may be NaN (a page's last tenant), and 0 * NaN is not 0. Integers cannot.
            v_YH = jnp.where(mask.is_live(v_YH.shape, 0), v_YH, 0)
        is_seen = None if mask is None else mask.is_seen(shape, chunk)
        scales = [scratch.scales[0][head, half : half + 1] for half in range(2)] if shape.has_scales else None
        _update(shape, scores[...], v_YH, scales, is_seen, tuple(ref.at[head, rows] for ref in scratch.state))

    even, odd = scratch.scores
    steps = shape.blocks.kv_heads * shape.chunks
    pairs = (steps - 1) // 2
    score(0, even)

    @pl.loop(0, pairs)
    def _(pair: jax.Array) -> None:
        score(2 * pair + 1, odd)
        update(2 * pair, even)
        score(2 * pair + 2, even)
        update(2 * pair + 1, odd)

    if steps % 2 == 0:
        score(steps - 1, odd)
    update(2 * pairs, even)
    if steps % 2 == 0:
        update(steps - 1, odd)


def _lay_out_scales(shape: PrefillShape, scratch: Scratch, slot: jax.Array, mask: Mask | None) -> None:
    """Scales of all pages side by side, with the factors of all scores on the keys'; 0 for keys that nobody sees."""
    source, target = scratch.buffers[1], scratch.scales[0]

    @pl.loop(0, shape.blocks.kv_heads)
    def _(head: jax.Array) -> None:
        scale_2Y = jnp.concatenate([source[slot, page, head] for page in range(shape.kv_pages)], axis=1)
        if mask is not None:
            scale_2Y = jnp.where(mask.is_live(scale_2Y.shape, 1), scale_2Y, 0)
        is_key = lax.broadcasted_iota(jnp.int32, scale_2Y.shape, 0) == 0
        target[head] = scale_2Y * jnp.where(is_key, shape.score_factor, 1.0)


def _dot(shape: PrefillShape, left: jax.Array, right: jax.Array, contracted: int) -> jax.Array:
    return lax.dot_general(
        left,
        right,
        (((1,), (contracted,)), ((), ())),
        precision=lax.Precision.HIGHEST if shape.compute_dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _lanes(value_XL: jax.Array, width: int) -> jax.Array:
    """A value that is the same in all 128 lanes, in as many as asked for."""
    return value_XL[:, :width] if width <= LANES else jnp.tile(value_XL, (1, width // LANES))


def _update(
    shape: PrefillShape,
    score: jax.Array,
    v_YH: jax.Array,
    scales: Sequence[jax.Array] | None,
    is_seen: jax.Array | None,
    state: Refs,
) -> None:
    """A block of scores of some rows joins their softmax."""
    top, total, acc = state
    if scales is not None:
        score = score * scales[0]
    elif shape.score_factor != 1:
        score = score * shape.score_factor
    if shape.spec.soft_cap is not None:
        score = jnp.tanh(score)
    if is_seen is not None:
        score = jnp.where(is_seen, score, -jnp.inf)
    old_top = top[...]
    new_top = jnp.maximum(old_top, score.max(axis=1, keepdims=True))
    weight = jnp.exp2((score - _lanes(new_top, score.shape[1])) * shape.exponent_factor)
    factor = jnp.exp2((old_top - new_top) * shape.exponent_factor)
    top[...] = new_top
    lanes = shape.total_lanes
    parts = [weight[:, first : first + lanes] for first in range(0, weight.shape[1], lanes)]
    total[...] = functools.reduce(jnp.add, parts, total[...] * _lanes(factor, lanes))
    if scales is not None:
        weight = weight * scales[1]
    value = _dot(shape, weight.astype(shape.compute_dtype), v_YH, contracted=0)
    acc[...] = acc[...] * _lanes(factor, shape.width) + value
