"""The TPU prefill kernel's arithmetic on one block of keys: scores, softmax weights and weighted values.

They overlap across groups of rows.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from headrace.pallas_kernels.paged_attention.tpu_prefill_shape import LANES, PrefillShape

Refs = Sequence[jax.Ref]
EDGE_ROWS = 64
"""Rows at once where fewer than three stages run: without the others' work between, the scheduler holds all of a
stage's scores in registers (v6e, 128 rows x 512 keys: 16 spills)."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """buffers: two blocks of pages, and of scales. state: running maximum, sums per lane, weighted values of each row.
    scales: of the block of keys at work, tokens along lanes; empty without scales. ends: of each row of a key head, the
    position behind the last key that it sees. scores, highest (of them, per lane), weights, factors (of what was summed
    up before): of two groups of rows, in buffers of their own, since the compiler overlaps only what cannot be the same
    memory. slot: buffer of the block of keys that comes next."""

    buffers: Refs
    state: Refs
    scales: Refs
    ends: jax.Ref
    scores: Refs
    highest: Refs
    weights: Refs
    factors: Refs
    slot: jax.Ref
    sems: jax.Ref


def scratch_shapes(shape: PrefillShape, pool: Sequence[jax.Array]) -> Scratch:
    """In the order of Scratch's fields; flatten with ``flat``."""
    blocks = shape.blocks
    rows, tile = (blocks.kv_heads, shape.rows), (blocks.query_rows, blocks.kv_tokens)
    return Scratch(
        buffers=[pltpu.VMEM((2, shape.kv_pages, blocks.kv_heads, *leaf.shape[2:]), leaf.dtype) for leaf in pool],
        state=[pltpu.VMEM((*rows, lanes), jnp.float32) for lanes in (LANES, shape.total_lanes, shape.width)],
        scales=[pltpu.VMEM((blocks.kv_heads, 2, blocks.kv_tokens), jnp.float32)] * shape.has_scales,
        ends=pltpu.VMEM((shape.rows, LANES), jnp.int32),
        scores=[pltpu.VMEM(tile, jnp.float32)] * 2,
        highest=[pltpu.VMEM((blocks.query_rows, shape.total_lanes), jnp.float32)] * 2,
        weights=[pltpu.VMEM(tile, shape.compute_dtype)] * 2,
        factors=[pltpu.VMEM((blocks.query_rows, LANES), jnp.float32)] * 2,
        slot=pltpu.SMEM((1,), jnp.int32),
        sems=pltpu.SemaphoreType.DMA((2, len(pool))),
    )


def flat(scratch: Scratch) -> list[object]:
    """What ``pallas_call`` wants."""
    return jax.tree.leaves([getattr(scratch, field.name) for field in fields(scratch)])


def named(refs: Refs, shape: PrefillShape) -> Scratch:
    """What ``flat`` made, as it was."""
    pools = 1 + shape.has_scales
    lengths = (pools, 3, int(shape.has_scales), 1, 2, 2, 2, 2, 1, 1)
    ends = list(accumulate(lengths))
    groups = [refs[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    buffers, state, scales, (row_ends,), scores, highest, weights, factors, (slot,), (sems,) = groups
    return Scratch(buffers, state, scales, row_ends, scores, highest, weights, factors, slot, sems)


def place(shape: PrefillShape, step: jax.Array | int) -> tuple[jax.Array | int, jax.Array | int]:
    """Key head, and the first of the group of rows, of one step."""
    chunks = shape.chunks
    if chunks & (chunks - 1):
        return lax.div(step, chunks), lax.rem(step, chunks) * shape.blocks.query_rows
    # Scalar divisions come before everything else of an iteration: 20 bundles of v6e's 350.
    return step >> (chunks.bit_length() - 1), (step & (chunks - 1)) * shape.blocks.query_rows


def rows(first: jax.Array | int, count: int) -> slice | pl.Slice:
    """Some rows of a key head, from a multiple of 16."""
    return pl.ds(first if isinstance(first, int) else pl.multiple_of(first, 16), count)


@dataclass(frozen=True, slots=True)
class Mask:
    """Position of the first key at work; and the first and end key that any row sees, counted from there."""

    base: jax.Array
    first: jax.Array
    end: jax.Array

    def is_live(self, shape: tuple[int, ...], axis: int, base: jax.Array | int = 0) -> jax.Array:
        """Whether any row sees the key."""
        key = base + lax.broadcasted_iota(jnp.int32, shape, axis)
        return (key >= self.first) & (key < self.end)

    def is_seen(self, shape: PrefillShape, ends: jax.Array) -> jax.Array:
        """Whether the row sees the key, [rows, keys] of the rows whose ends are given."""
        keys = shape.blocks.kv_tokens
        key = self.base + lax.broadcasted_iota(jnp.int32, (ends.shape[0], keys), 1)
        if shape.spec.window is None:
            return key < _lanes(ends, keys)
        return (key < _lanes(ends, keys)) & (key >= _lanes(ends - shape.spec.window, keys))


def attend(shape: PrefillShape, q: jax.Ref, scratch: Scratch, slot: jax.Array, mask: Mask | None) -> None:
    """One block of keys joins the softmax of every row, a group of rows of one head in each step.

    A step has three stages, and one iteration does the scores of a step, the weights of the step before and the values
    of the one before that: they are independent, and while one waits for the matrix unit or for a row's maximum the
    others run. Between stages everything lies in VMEM, so that few registers are held.
    """
    if shape.has_scales:
        _lay_out_scales(shape, scratch, slot, mask)
    if mask is not None and scratch.buffers[0].dtype != jnp.int8:
        _clear_values(shape, scratch.buffers[0], slot, mask)
    stages = (
        functools.partial(_score, shape, q, scratch, slot, mask),
        functools.partial(_weigh, shape, scratch),
        functools.partial(_add_values, shape, scratch, slot),
    )
    steps, last = shape.blocks.kv_heads * shape.chunks, len(stages) - 1
    # Two rounds where there are 32 rows: a loop of one would be merged with what is around it.
    edge_rows = max(math.gcd(shape.blocks.query_rows // 2, EDGE_ROWS), 16)

    def run(step: jax.Array | int, parity: int, lags: range, first: jax.Array | int, count: int) -> None:
        # The last stage first: what it reads is written over by the others.
        for lag in reversed(lags):
            stages[lag](step - lag, (parity - lag) % 2, first, count)

    def run_some(step: int) -> None:
        lags = range(max(0, step - steps + 1), min(last, step) + 1)

        @pl.loop(0, shape.blocks.query_rows // edge_rows)
        def _(piece: jax.Array) -> None:
            run(step, step % 2, lags, piece * edge_rows, edge_rows)

    def run_all(step: jax.Array, parity: int) -> None:
        run(step, parity, range(last + 1), 0, shape.blocks.query_rows)

    for step in range(last):
        run_some(step)

    if steps > last:
        # A number that the compiler does not know, and a branch also where it is even: else the scheduler mixes the two
        # steps of an iteration, or a single iteration with what is around it, and spills.
        unknown_steps = steps + jnp.minimum(slot, 0)

        @pl.loop(0, lax.div(unknown_steps - last + 1, 2))
        def _(pair: jax.Array) -> None:
            step = last + 2 * pair
            run_all(step, last % 2)
            pl.when(step + 1 < unknown_steps)(lambda: run_all(step + 1, (last + 1) % 2))

    for step in range(max(last, steps), steps + last):
        run_some(step)


def _clear_values(shape: PrefillShape, pages: jax.Ref, slot: jax.Array, mask: Mask) -> None:
    """Zeros instead of values that nobody sees: they may be NaN (a page's last tenant), and 0 * NaN is not 0."""
    lanes = slice(None) if shape.shares_lanes else slice(shape.head_dim, 2 * shape.head_dim)
    # Whole tiles of every type, and few registers of masks.
    tokens = min(shape.page_tokens, 32)

    @pl.loop(0, shape.blocks.kv_tokens // tokens)
    def _(part: jax.Array) -> None:
        base = part * tokens
        page, first = lax.div(base, shape.page_tokens), pl.multiple_of(lax.rem(base, shape.page_tokens), tokens)

        @pl.when((base < mask.first) | (base + tokens > mask.end))
        def _() -> None:
            @pl.loop(0, shape.blocks.kv_heads)
            def _(head: jax.Array) -> None:
                tile = pages.at[slot, page, head, pl.ds(first, tokens), lanes]
                value = tile[...]
                tile[...] = jnp.where(mask.is_live(value.shape, 0, base), value, jnp.zeros_like(value))


def _half(shape: PrefillShape, scratch: Scratch, slot: jax.Array, head: jax.Array | int, half: int) -> jax.Array:
    """Keys (0) or values (1) at work; where they share lanes, both."""
    lanes = slice(None) if shape.shares_lanes else slice(half * shape.head_dim, (half + 1) * shape.head_dim)
    pages = scratch.buffers[0][slot, :, head, :, lanes].astype(shape.compute_dtype)
    return pages.reshape(shape.blocks.kv_tokens, shape.width)


def _score(
    shape: PrefillShape,
    q: jax.Ref,
    scratch: Scratch,
    slot: jax.Array,
    mask: Mask | None,
    step: jax.Array | int,
    parity: int,
    first: jax.Array | int,
    count: int,
) -> None:
    """Scores of some rows of a step, and the highest in each lane. first: from the step's first row."""
    head, start = place(shape, step)
    at, here, lanes = rows(start + first, count), rows(first, count), shape.total_lanes
    score = _dot(shape, q[0, head, at], _half(shape, scratch, slot, head, 0), contracted=1)
    if shape.has_scales:
        score = score * scratch.scales[0][head, :1]
    elif shape.score_factor != 1:
        score = score * shape.score_factor
    if shape.spec.soft_cap is not None:
        score = jnp.tanh(score)
    if mask is not None:
        score = jnp.where(mask.is_seen(shape, scratch.ends[at]), score, -jnp.inf)
    scratch.scores[parity][here] = score
    scratch.highest[parity][here] = functools.reduce(jnp.maximum, _by_lane(score, lanes))


def _weigh(
    shape: PrefillShape, scratch: Scratch, step: jax.Array | int, parity: int, first: jax.Array | int, count: int
) -> None:
    """From scores to weights, relative to the running maximum."""
    head, start = place(shape, step)
    at, here, lanes = rows(start + first, count), rows(first, count), shape.total_lanes
    top, total = (ref.at[head, at] for ref in scratch.state[:2])
    old_top = top[...]
    new_top = jnp.maximum(old_top, scratch.highest[parity][here].max(axis=1, keepdims=True))
    factor = jnp.exp2((old_top - new_top) * shape.exponent_factor)
    top[...] = new_top
    scratch.factors[parity][here] = factor
    weight = jnp.exp2((scratch.scores[parity][here] - _lanes(new_top, shape.blocks.kv_tokens)) * shape.exponent_factor)
    total[...] = functools.reduce(jnp.add, _by_lane(weight, lanes), total[...] * _lanes(factor, lanes))
    if shape.has_scales:
        weight = weight * scratch.scales[0][head, 1:]
    scratch.weights[parity][here] = weight.astype(shape.compute_dtype)


def _add_values(
    shape: PrefillShape,
    scratch: Scratch,
    slot: jax.Array,
    step: jax.Array | int,
    parity: int,
    first: jax.Array | int,
    count: int,
) -> None:
    """Weighted values join those of the blocks of keys before."""
    head, start = place(shape, step)
    here, acc = rows(first, count), scratch.state[2].at[head, rows(start + first, count)]
    value = _dot(shape, scratch.weights[parity][here], _half(shape, scratch, slot, head, 1), contracted=0)
    acc[...] = acc[...] * _lanes(scratch.factors[parity][here], shape.width) + value


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


def _by_lane(value_XY: jax.Array, lanes: int) -> list[jax.Array]:
    return [value_XY[:, first : first + lanes] for first in range(0, value_XY.shape[1], lanes)]
