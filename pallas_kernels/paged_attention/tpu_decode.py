"""TPU decode: one query token per sequence against its pages, and the write of that token's key and value.

One grid step holds a group of sequences. Its softmax states start from the new tokens, which are not in the pool yet,
so every maximum is finite; then one loop runs over the group's key blocks, whose pages were copied to VMEM while
earlier blocks were computed, across sequences and groups. Meanwhile the tiles of the pool that the new tokens belong to
arrive, get their row, and go back: a copy cannot address one row of a page.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    DecodeBlocks,
    DecodeShape,
    decode_shape,
    num_groups,
    pick_blocks,
    vmem_bytes,
)
from headrace.pallas_kernels.paged_attention.decode_work import Fresh, Work, fresh_tokens, list_work
from headrace.pallas_kernels.types import AttentionSpec, AttnMeta, Kernels, KVPool, TokenKV

Array = jax.Array
Ref = Any
Copy = Any

LOWEST = -1e30
"""Score of a key that is not seen. Finite, and far enough below every real score that exp2 of it is 0."""
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class _Static:
    """What a kernel is specialized on."""

    shape: DecodeShape
    blocks: DecodeBlocks
    spec: AttentionSpec

    @property
    def block_tokens(self) -> int:
        return self.blocks.block_pages * self.shape.page_tokens

    @property
    def may_hold_nan(self) -> bool:
        """0 * NaN is NaN, so values of this type are cleaned where a page's last tenant left them."""
        return not jnp.issubdtype(self.shape.kv_dtype, jnp.integer)


@dataclass(frozen=True, slots=True)
class _Scratch:
    """kv: [slots, pages, K, W, C] and scale: [slots, pages, K, 2, W]; tile: [2, group, K, tile tokens, C] and
    tile_scale: [2, group, K, 2, W], by parity of the group; top, total: [group, N, 128]; acc: [group, N, key width]."""

    kv: Ref
    scale: Ref
    tile: Ref
    tile_scale: Ref
    top: Ref
    total: Ref
    acc: Ref
    arrived: Ref
    tile_moved: Ref


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
    static = _Static(shape, pick_blocks(shape, kernels), spec)
    work = list_work(meta, first_row, shape, static.blocks, spec.window)
    q_BNC = jnp.pad(q_BNH.astype(shape.compute_dtype), ((0, 0), (0, 0), (0, shape.key_width - shape.head_dim)))
    sinks = None
    if sinks_N is not None:
        sinks = jnp.broadcast_to(sinks_N.astype(jnp.float32)[:, None] * LOG2_E, (shape.num_heads, LANES))
    out_BNC, pages, scale = _call(static, kernels)(
        work, q_BNC, fresh_tokens(new, shape), sinks, pool.pages_RKWC, pool.scale_RK2W
    )
    return out_BNC[..., shape.key_width - shape.head_dim :], KVPool(pages, scale)


def _call(static: _Static, kernels: Kernels) -> Callable[..., tuple[Array, Array, Array | None]]:
    shape, blocks = static.shape, static.blocks
    group, heads, lanes = blocks.group, shape.num_kv_heads, shape.key_width
    of_group = lambda *block: pl.BlockSpec((group, *block), lambda g, *_: (g,) + (0,) * len(block))  # noqa: E731
    in_pool = pl.BlockSpec(memory_space=pl.ANY)

    def call(work: Work, q: Array, fresh: Fresh, sinks: Array | None, pages: Array, scale: Array | None) -> Any:
        quantized = scale is not None
        spec_if = lambda spec, present: spec if present else None  # noqa: E731
        scale_block = of_group(heads, 2, shape.page_tokens)
        in_specs = (
            of_group(shape.num_heads, lanes),
            Fresh(of_group(heads, shape.row_width), of_group(heads, shape.row_width), spec_if(scale_block, quantized)),
            spec_if(pl.BlockSpec((shape.num_heads, LANES), lambda g, *_: (0, 0)), sinks is not None),
            in_pool,
            spec_if(in_pool, quantized),
        )
        out_q = jax.ShapeDtypeStruct((shape.rows, shape.num_heads, lanes), shape.q_dtype)
        flat = len(jax.tree.leaves((work, q, fresh, sinks)))
        return pl.pallas_call(
            functools.partial(_kernel, static),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(jax.tree.leaves(work)),
                grid=(num_groups(shape, blocks),),
                in_specs=jax.tree.leaves(in_specs),
                out_specs=[of_group(shape.num_heads, lanes), in_pool] + [in_pool] * quantized,
                scratch_shapes=_scratch_shapes(static),
            ),
            out_shape=[out_q] + [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (pages, scale) if x is not None],
            input_output_aliases={flat: 1} | ({flat + 1: 2} if quantized else {}),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("arbitrary",),
                vmem_limit_bytes=_vmem_limit(static, kernels.chip),
                disable_bounds_checks=True,
            ),
            interpret=kernels.interpret,
            name="paged_attention_decode",
        )(*jax.tree.leaves((work, q, fresh, sinks, pages, scale)))

    def run(*args: Any) -> tuple[Array, Array, Array | None]:
        out, pages, *scale = call(*args)
        return out, pages, scale[0] if scale else None

    return run


def _vmem_limit(static: _Static, chip: str) -> int:
    """Twice what is known to be needed and 32 MiB, for what the compiler spills, within the chip's."""
    return min(32 * MIB + 2 * vmem_bytes(static.shape, static.blocks), CHIPS[chip].on_chip_bytes)


def _scratch_shapes(static: _Static) -> list[Any]:
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


def _kernel(static: _Static, *refs: Ref) -> None:
    work, q, fresh, sinks, out, pages, scale, scratch = _named(static, refs)
    group = pl.program_id(0)
    items = _Items(static, work, pages, scale, scratch)
    tiles = _Tiles(static, work, pages, scale, fresh, scratch)
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


def _named(static: _Static, refs: Sequence[Ref]) -> tuple[Any, ...]:
    """References in the order of _call, by name. The pool's inputs are its outputs."""
    quantized = static.shape.is_quantized
    rest = iter(refs)
    work = Work(*(next(rest) for _ in range(6)))
    q = next(rest)
    fresh = Fresh(next(rest), next(rest), next(rest) if quantized else None)
    in_pool = 1 + quantized
    rest = list(rest)
    has_sinks = len(rest) - 2 * in_pool - 1 - (7 + 2 * quantized)
    sinks = rest.pop(0) if has_sinks else None
    out, pages, *rest = rest[in_pool:]
    scale = rest.pop(0) if quantized else None
    kv, tile, top, total, acc, arrived, tile_moved, *scales = rest
    kv_scale, tile_scale = scales if quantized else (None, None)
    scratch = _Scratch(kv, kv_scale, tile, tile_scale, top, total, acc, arrived, tile_moved)
    return work, q, fresh, sinks, out, pages, scale, scratch


class _Items:
    """Key blocks in VMEM: item i lies in slot i % slots."""

    def __init__(self, static: _Static, work: Work, pages: Ref, scale: Ref, scratch: _Scratch) -> None:
        self.static, self.work, self.pages, self.scale, self.scratch = static, work, pages, scale, scratch

    def slot(self, item: Array) -> Array:
        slots = self.static.blocks.slots
        return lax.rem(item, slots) if slots & (slots - 1) else item & (slots - 1)

    def live_tokens(self, item: Array) -> tuple[Array, Array]:
        """(first, end) of what the sequence's new token sees in the pool, counted from the block's first token."""
        length = self.work.kv_len[self.work.item_seq[item]]
        start = self.work.item_block[item] * self.static.block_tokens
        window = self.static.spec.window
        first = 0 if window is None else jnp.maximum(length - window, 0)
        return first - start, length - 1 - start

    def live_pages(self, item: Array) -> tuple[Array, Array]:
        """(first, end) of the block's pages that hold what is seen; the others are not copied."""
        first, end = self.live_tokens(item)
        page_tokens = self.static.shape.page_tokens
        last = jnp.minimum(lax.div(end + page_tokens - 1, page_tokens), self.static.blocks.block_pages)
        return lax.div(jnp.maximum(first, 0), page_tokens), last

    def _copies(self, item: Array, page: Array) -> list[Copy]:
        work, slot = self.work, self.slot(item)
        column = work.item_seq[item] * self.static.shape.table_pages
        column += work.item_block[item] * self.static.blocks.block_pages
        row = work.first_row[0] + work.table[column + page]
        arrived = self.scratch.arrived
        copies = [pltpu.make_async_copy(self.pages.at[row], self.scratch.kv.at[slot, page], arrived.at[0, slot])]
        if self.scale is not None:
            to = self.scratch.scale.at[slot, page]
            copies.append(pltpu.make_async_copy(self.scale.at[row], to, arrived.at[1, slot]))
        return copies

    def _each_page(self, item: Array, act: Callable[[Copy], None]) -> None:
        first, end = self.live_pages(item)

        @pl.loop(first, end)
        def _page(page: Array) -> None:
            for copy in self._copies(item, page):
                act(copy)

    def start(self, item: Array) -> None:
        self._each_page(item, lambda copy: copy.start())

    def wait(self, item: Array) -> None:
        self._each_page(item, lambda copy: copy.wait())

    def clean(self, item: Array) -> None:
        """Zeros in the values that are not seen: what a page's last tenant left, and, in pages that were not copied,
        what another sequence had in this slot. (Keys may be NaN: their scores are replaced.)"""
        first, end = self.live_tokens(item)
        first_page, end_page = self.live_pages(item)

        @pl.when((first > 0) | (end < self.static.block_tokens))
        def _edge() -> None:
            self._zero_pages(item, 0, first_page)
            self._zero_pages(item, end_page, self.static.blocks.block_pages)
            self._clean_page(item, first_page, first, end)
            pl.when(end_page - 1 > first_page)(lambda: self._clean_page(item, end_page - 1, first, end))

    def _zero_pages(self, item: Array, first: Array | int, end: Array | int) -> None:
        shape, slot = self.static.shape, self.slot(item)
        values = slice(shape.row_width - shape.key_width, shape.row_width)
        zeros = jnp.zeros((shape.page_tokens, shape.key_width), shape.kv_dtype)

        @pl.loop(first, end)
        def _page(page: Array) -> None:
            @pl.loop(0, shape.num_kv_heads)
            def _head(k: Array) -> None:
                self.scratch.kv[slot, page, k, :, values] = zeros

    def _clean_page(self, item: Array, page: Array, first: Array, end: Array) -> None:
        shape, slot = self.static.shape, self.slot(item)
        tokens = shape.tile_tokens
        values = slice(shape.row_width - shape.key_width, shape.row_width)

        @pl.loop(0, shape.page_tokens // tokens)
        def _tile(tile: Array) -> None:
            start = pl.multiple_of(tile * tokens, tokens)
            at = (slot, page, slice(None), pl.ds(start, tokens), values)
            old = pltpu.bitcast(self.scratch.kv[at], jnp.int32)
            token = page * shape.page_tokens + start + shape.packing * lax.broadcasted_iota(jnp.int32, old.shape, 1)
            keep = jnp.zeros_like(old)
            for i in range(shape.packing):
                is_seen = (token + i >= first) & (token + i < end)
                keep |= jnp.where(is_seen, _mask_of_value(shape, i), 0)
            self.scratch.kv[at] = pltpu.bitcast(old & keep, shape.kv_dtype)


def _mask_of_value(shape: DecodeShape, index: int) -> Array:
    """Bits of one stored value in its word."""
    bits = 32 // shape.packing
    mask = ((1 << bits) - 1) << (bits * index)
    return jnp.int32(mask - (1 << 32) if mask >= 1 << 31 else mask)


class _Tiles:
    """The pool's tiles that this step's tokens go into, and those tokens' pages of scales."""

    def __init__(self, static: _Static, work: Work, pages: Ref, scale: Ref, fresh: Fresh, scratch: _Scratch) -> None:
        self.static, self.work, self.pages, self.scale = static, work, pages, scale
        self.fresh, self.scratch = fresh, scratch

    def for_live(self, group: Array, copies: Callable[[Array, int], list[Copy]], *, wait: bool = False) -> None:
        """Start the copies of a group's sequences, or wait for them; a padding row has none."""
        for u in range(self.static.blocks.group):

            @pl.when(self.work.kv_len[group * self.static.blocks.group + u] > 0)
            def _live(u: int = u) -> None:
                for copy in copies(group, u):
                    copy.wait() if wait else copy.start()

    def _places(self, group: Array, u: int) -> list[tuple[Ref, Ref]]:
        """(in the pool, in VMEM) of a sequence's tile and scales."""
        shape = self.static.shape
        sequence, parity = group * self.static.blocks.group + u, lax.rem(group, 2)
        position = self.work.kv_len[sequence] - 1
        page = lax.div(position, shape.page_tokens)
        row = self.work.first_row[0] + self.work.table[sequence * shape.table_pages + page]
        tile = lax.div(position - page * shape.page_tokens, shape.tile_tokens)
        start = pl.multiple_of(tile * shape.tile_tokens, shape.tile_tokens)
        places = [(self.pages.at[row, :, pl.ds(start, shape.tile_tokens)], self.scratch.tile.at[parity, u])]
        if self.scale is not None:
            places.append((self.scale.at[row], self.scratch.tile_scale.at[parity, u]))
        return places

    def reads(self, group: Array, u: int) -> list[Copy]:
        moved = self.scratch.tile_moved
        places = enumerate(self._places(group, u))
        return [pltpu.make_async_copy(there, here, moved.at[0, i]) for i, (there, here) in places]

    def writes(self, group: Array, u: int) -> list[Copy]:
        # By parity: a wait for one group's writes must not be satisfied by the next group's.
        moved = self.scratch.tile_moved.at[1, lax.rem(group, 2)]
        return [pltpu.make_async_copy(here, there, moved) for there, here in self._places(group, u)]

    def put_row(self, group: Array, u: int) -> None:
        """The new token into its row of the tile, and its scales into their lane."""
        shape, parity = self.static.shape, lax.rem(group, 2)
        position = jnp.maximum(self.work.kv_len[group * self.static.blocks.group + u] - 1, 0)
        offset = lax.rem(position, shape.page_tokens)
        row = lax.rem(offset, shape.tile_tokens)
        word_row = lax.broadcasted_iota(jnp.int32, (SUBLANES, shape.row_width), 0)
        mask = jnp.zeros_like(word_row)
        for i in range(shape.packing):
            is_row = word_row * shape.packing + i == row
            mask |= jnp.where(is_row, _mask_of_value(shape, i), 0)
        for head in range(shape.num_kv_heads):
            old = pltpu.bitcast(self.scratch.tile[parity, u, head], jnp.int32)
            word = jnp.broadcast_to(self.fresh.word_BKC[u, head : head + 1], mask.shape)
            self.scratch.tile[parity, u, head] = pltpu.bitcast((old & ~mask) | (word & mask), shape.kv_dtype)
        if self.scale is not None:
            lane = lax.broadcasted_iota(jnp.int32, (shape.num_kv_heads, 2, shape.page_tokens), 2)
            old = self.scratch.tile_scale[parity, u]
            self.scratch.tile_scale[parity, u] = jnp.where(lane == offset, self.fresh.scale_BK2W[u], old)


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


def _logits(static: _Static, score: Array, factor: Array | float) -> Array:
    """Scores times factor (which holds the scale), capped, in powers of two: exp2 takes them."""
    cap = static.spec.soft_cap
    if cap is None:
        return score * (factor * LOG2_E)
    return jnp.tanh(score * (factor * (1 / cap))) * (cap * LOG2_E)


def _start_state(static: _Static, q: Array, value: Ref, sinks: Ref, u: int, scratch: _Scratch) -> None:
    """The softmax over the new token and the sink."""
    shape = static.shape
    lanes = shape.key_width
    key = _rows(lambda k: value[k : k + 1, :lanes], shape)
    acc = _rows(lambda k: value[k : k + 1, shape.row_width - lanes :], shape)
    score = jnp.sum(q.astype(jnp.float32) * key, axis=1, keepdims=True)
    top = jnp.broadcast_to(_logits(static, score, static.spec.scale), (shape.num_heads, LANES))
    total = jnp.ones_like(top)
    if sinks is not None:
        logit, top = top, jnp.maximum(top, sinks[...])
        weight = jnp.exp2(logit - top)
        total = weight + jnp.exp2(sinks[...] - top)
        acc = acc * weight[:, :1]
    scratch.top[u], scratch.total[u], scratch.acc[u] = top, total, acc


def _attend(static: _Static, items: _Items, item: Array, q: Array, u: Array, scratch: _Scratch) -> None:
    """One key block into the state of its sequence. All heads at once: rows of scores are query heads."""
    shape, slot, lanes = static.shape, items.slot(item), static.shape.key_width

    def rows(k: int, first: int, end: int) -> Array:
        return (
            scratch.kv[slot, :, k, :, first:end].reshape(static.block_tokens, end - first).astype(shape.compute_dtype)
        )

    score = _products(q.astype(jnp.float32), lambda k: rows(k, 0, lanes), (1, 1), shape)
    first, end = items.live_tokens(item)
    token = lax.broadcasted_iota(jnp.int32, score.shape, 1)
    is_seen = token < end
    if static.spec.window is not None:
        is_seen &= token >= first
    factor: Array | float = static.spec.scale
    if shape.is_quantized:
        factor = _scales(static, scratch, slot, 0) * factor
    logit = jnp.where(is_seen, _logits(static, score, factor), LOWEST)
    old_top = scratch.top[u]
    top = jnp.maximum(old_top, jnp.max(logit, axis=1, keepdims=True))
    weight = jnp.exp2(logit - top[:, :1])
    keep = jnp.exp2(old_top - top)
    scratch.top[u] = top
    scratch.total[u] = scratch.total[u] * keep + jnp.sum(weight, axis=1, keepdims=True)
    if shape.is_quantized:
        # A stale scale may be NaN, and 0 * NaN is not 0.
        weight = jnp.where(is_seen, weight * _scales(static, scratch, slot, 1), 0)
    value = _products(weight, lambda k: rows(k, shape.row_width - lanes, shape.row_width), (1, 0), shape)
    scratch.acc[u] = scratch.acc[u] * keep[:, :1] + value


def _scales(static: _Static, scratch: _Scratch, slot: Array, which: int) -> Array:
    """[N, tokens]: scales of a block's keys (0) or values (1) for every query head."""
    pages = range(static.blocks.block_pages)

    def of_head(k: int) -> Array:
        return jnp.concatenate([scratch.scale[slot, page, k, which : which + 1] for page in pages], axis=1)

    return _rows(of_head, static.shape)
