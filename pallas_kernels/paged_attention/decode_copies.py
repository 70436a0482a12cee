"""Copies of TPU decode between the pool in HBM and VMEM: key blocks in, and the tiles of new tokens there and back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from headrace.pallas_kernels.paged_attention.decode_blocks import SUBLANES, DecodeBlocks, DecodeShape
from headrace.pallas_kernels.paged_attention.decode_work import Fresh, Work
from headrace.pallas_kernels.types import AttentionSpec

Array = jax.Array
Ref = Any
Copy = Any


@dataclass(frozen=True, slots=True)
class Static:
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
class Scratch:
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


class Items:
    """Key blocks in VMEM: item i lies in slot i % slots."""

    def __init__(self, static: Static, work: Work, pages: Ref, scale: Ref, scratch: Scratch) -> None:
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


class Tiles:
    """The pool's tiles that this step's tokens go into, and those tokens' pages of scales."""

    def __init__(self, static: Static, work: Work, pages: Ref, scale: Ref, fresh: Fresh, scratch: Scratch) -> None:
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
