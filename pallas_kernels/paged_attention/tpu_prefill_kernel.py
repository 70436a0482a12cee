"""Body of the TPU kernel that attends from query blocks to pages.

Blocks of pages are copied to VMEM while the block before is worked on, also across query blocks: the last block of keys
of a query block starts the first one of the next.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from headrace.pallas_kernels.paged_attention.online_softmax import LOWEST
from headrace.pallas_kernels.paged_attention.tpu_prefill_shape import LANES, PrefillShape
from headrace.pallas_kernels.paged_attention.tpu_prefill_steps import Mask, Refs, Scratch, attend, named, place, rows


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


def kernel(*refs: jax.Ref, shape: PrefillShape) -> None:
    """One query block of some key heads."""
    scalars, q, refs = refs[:5], refs[5], refs[6:]
    sinks, refs = (refs[0], refs[1:]) if shape.has_sinks else (None, refs)
    pools = 1 + shape.has_scales
    pool, out, scratch = refs[:pools], refs[pools], named(refs[pools + 1 :], shape)
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
        pos, length = scalars[3][block], scalars[4][block]
        _reset(shape, sinks, scratch, pos, length)

        def step_on(index: jax.Array, _: None, is_masked: bool) -> None:
            slot = take_block(keys, block, index, end, scratch.slot)
            base = index * shape.blocks.kv_tokens
            first_token, end_token = (bound - base for bound in keys.tokens(block))
            mask = Mask(base, first_token, end_token) if is_masked else None
            attend(shape, q, scratch, slot, mask)

        # Every row of the query block sees all keys of the blocks in the middle.
        kv_tokens, window = shape.blocks.kv_tokens, shape.spec.window
        seen_by_all = 0 if window is None else jnp.maximum(pos + length - window, 0)
        middle = jnp.clip(pl.cdiv(seen_by_all, kv_tokens), begin, end)
        tail = jnp.clip((pos + 1) // kv_tokens, middle, end)
        if window is not None:
            lax.fori_loop(begin, middle, functools.partial(step_on, is_masked=True), None)
        lax.fori_loop(middle, tail, functools.partial(step_on, is_masked=False), None)
        lax.fori_loop(tail, end, functools.partial(step_on, is_masked=True), None)

        _, total, acc = scratch.state

        @pl.loop(0, shape.blocks.kv_heads * shape.chunks)
        def _(step: jax.Array) -> None:
            head, first = place(shape, step)
            here = rows(first, shape.blocks.query_rows)
            total_X1 = total[head, here].sum(axis=1, keepdims=True)
            out[0, head, here] = (acc[head, here] / total_X1).astype(out.dtype)


def _reset(shape: PrefillShape, sinks: jax.Ref | None, scratch: Scratch, pos: jax.Array, length: jax.Array) -> None:
    """Start a query block."""
    top, total, acc = scratch.state
    tokens = shape.block_tokens

    @pl.loop(0, shape.group)
    def _(member: jax.Array) -> None:
        # Padding tokens see what the last real token sees.
        token = lax.broadcasted_iota(jnp.int32, (tokens, LANES), 0)
        scratch.ends[rows(member * tokens, tokens)] = pos + jnp.minimum(token + 1, length)

    @pl.loop(0, shape.blocks.kv_heads * shape.chunks)
    def _(step: jax.Array) -> None:
        head, first = place(shape, step)
        here = rows(first, shape.blocks.query_rows)
        acc[head, here] = jnp.zeros((shape.blocks.query_rows, shape.width), jnp.float32)
        is_sink = lax.broadcasted_iota(jnp.int32, (shape.blocks.query_rows, shape.total_lanes), 1) == 0
        total[head, here] = jnp.where(is_sink & (sinks is not None), 1.0, 0.0)
        if sinks is None:
            top[head, here] = jnp.full((shape.blocks.query_rows, LANES), LOWEST)

    if sinks is not None:

        @pl.loop(0, shape.blocks.kv_heads)
        def _(head: jax.Array) -> None:
            for member in range(shape.group):
                top[head, rows(member * tokens, tokens)] = jnp.broadcast_to(
                    sinks[head, member : member + 1], (tokens, LANES)
                )
