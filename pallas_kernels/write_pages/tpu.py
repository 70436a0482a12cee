"""Key and value write on TPU: whole pages by copies inside HBM, single tokens by rewriting an aligned tile of rows.

XLA's scatter into 8-bit pages changes the layout of the whole pool and back, once per layer; these kernels alias it.

Scales of pages with fewer than 128 tokens must lie row-major (``jax.experimental.layout.Layout((0, 1, 2, 3))``, in and
out of the compiled program): by default XLA puts the rows of the pool along lanes, and then copies all scales twice per
kernel.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from headrace.pallas_kernels.types import AttnMeta, Kernels, KVPool, TokenKV, UnsupportedCase
from headrace.pallas_kernels.write_pages.reference import as_pages, block_rows

PAGES_IN_FLIGHT = 8
"""Copies inside HBM that run at once: enough to hide their latency (a page of 64 KiB takes 80 ns at 1.6 TB/s, an access
about 1 us), few enough to leave the queue of copies to others."""
SLOTS = 2
"""Tiles of the token write: one is changed while the next one is read and the previous one is written."""

Refs = Sequence[jax.Ref]


class Copy(Protocol):
    """What ``pltpu.make_async_copy`` returns."""

    def start(self) -> None: ...

    def wait(self) -> None: ...


Copies = Sequence[Copy]


def write_pages(new: TokenKV, pool: KVPool, first_row: jax.Array | int, meta: AttnMeta, kernels: Kernels) -> KVPool:
    """See ``headrace.pallas_kernels.api.write_pages``."""
    rows = meta.num_decode_rows
    if rows:
        pool = write_tokens(new.rows(0, rows), pool, first_row, meta, kernels)
    if meta.num_blocks:
        pool = write_blocks(new.rows(rows), pool, first_row, meta, kernels)
    return pool


def write_blocks(new: TokenKV, pool: KVPool, first_row: jax.Array | int, meta: AttnMeta, kernels: Kernels) -> KVPool:
    """Pages of the query blocks; those without a real token are skipped.

    Args:
      new: tokens of the query blocks alone, [J * block, K, C].
    Returns: the pool, the same buffers where it was donated.
    Raises: UnsupportedCase: a query block that is no whole number of pages.
    """
    block_tokens = new.kv_TKC.shape[0] // meta.num_blocks
    if block_tokens % pool.page_tokens:
        raise UnsupportedCase(f"query blocks of {block_tokens} tokens are no whole pages of {pool.page_tokens}")
    block_pages = block_tokens // pool.page_tokens
    source = jax.tree.leaves(as_pages(new, pool.page_tokens))
    leaves, tree = jax.tree.flatten(pool)
    row = block_rows(first_row, meta, block_pages, pool.page_tokens)
    written = pl.pallas_call(
        functools.partial(_copy_pages, block_pages=block_pages, page_tokens=pool.page_tokens),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * (2 * len(leaves)),
            out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(leaves),
            scratch_shapes=[pltpu.SemaphoreType.DMA((len(leaves),))],
        ),
        out_shape=[jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves],
        input_output_aliases={2 + len(leaves) + i: i for i in range(len(leaves))},
        interpret=kernels.interpret,
        name="write_blocks",
    )(row, meta.blk_len_J, *source, *leaves)
    return jax.tree.unflatten(tree, written)


def _copy_pages(row_P: jax.Ref, blk_len_J: jax.Ref, *refs: jax.Ref, block_pages: int, page_tokens: int) -> None:
    count = len(refs) // 3
    source, target, sems = refs[:count], refs[2 * count : 3 * count], refs[-1]

    def copies(page: jax.Array | int) -> Copies:
        return [pltpu.make_async_copy(source[i].at[page], target[i].at[row_P[page]], sems.at[i]) for i in range(count)]

    def copy_one(page: jax.Array, started: jax.Array) -> jax.Array:
        # All pages are equally large: whichever copy it is that ends, one page's bytes have arrived.
        pl.when(started >= PAGES_IN_FLIGHT)(lambda: wait(copies(0)))
        start(copies(page))
        return started + 1

    def copy_block(block: jax.Array, started: jax.Array) -> jax.Array:
        first = block * block_pages
        return lax.fori_loop(first, first + pl.cdiv(blk_len_J[block], page_tokens), copy_one, started)

    started = lax.fori_loop(0, blk_len_J.shape[0], copy_block, 0)
    pl.loop(0, jnp.minimum(started, PAGES_IN_FLIGHT))(lambda _: wait(copies(0)))


def write_tokens(new: TokenKV, pool: KVPool, first_row: jax.Array | int, meta: AttnMeta, kernels: Kernels) -> KVPool:
    """One token for each decode row; padding rows are skipped.

    HBM is written in tiles of 32 bytes' worth of rows, so that a token is written by reading its tile, changing it and
    writing it back. No two rows share a page.

    Args:
      new: tokens of the decode rows alone, [B, K, C].
    Returns: the pool, the same buffers where it was donated.
    """
    rows, heads, width = new.kv_TKC.shape
    leaves, tree = jax.tree.flatten(pool)
    tile = min(tile_rows(pool.pages_RKWC.dtype), pool.page_tokens)
    page_B1 = meta.position_B[:, None] // pool.page_tokens
    row_B = first_row + jnp.take_along_axis(meta.page_table_ZM[:rows], page_B1, axis=1, mode="clip")[:, 0]
    news = [_words(new.kv_TKC)[:, :, None]]
    scratch = [pltpu.VMEM((SLOTS, heads, tile, width), pool.pages_RKWC.dtype)]
    if new.scale_TK2 is not None:
        news.append(new.scale_TK2[..., None])
        scratch.append(pltpu.VMEM((SLOTS, heads, 2, pool.page_tokens), jnp.float32))
    written = pl.pallas_call(
        functools.partial(_rewrite_tiles, tile=tile),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(rows,),
            in_specs=[
                *(pl.BlockSpec((1, *value.shape[1:]), lambda i, *_: (i, 0, 0, 0)) for value in news),
                *[pl.BlockSpec(memory_space=pl.ANY)] * len(leaves),
            ],
            out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(leaves),
            scratch_shapes=[*scratch, pltpu.SemaphoreType.DMA((2, SLOTS, len(leaves)))],
        ),
        out_shape=[jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves],
        input_output_aliases={3 + len(leaves) + i: i for i in range(len(leaves))},
        interpret=kernels.interpret,
        name="write_tokens",
    )(row_B, meta.position_B % pool.page_tokens, meta.kv_len_Z[:rows], *news, *leaves)
    return jax.tree.unflatten(tree, written)


def tile_rows(dtype: jnp.dtype) -> int:
    """Tokens of one HBM tile: 8 rows of 32-bit words, each of which holds 1, 2 or 4 values of consecutive rows."""
    return 32 // jnp.dtype(dtype).itemsize


def _words(kv_TKC: jax.Array) -> jax.Array:
    """int32 that hold the bits of each value, so that one kernel rewrites every type."""
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[kv_TKC.dtype.itemsize]
    bits = lax.bitcast_convert_type(kv_TKC, unsigned)
    return lax.bitcast_convert_type(bits.astype(jnp.uint32), jnp.int32)


def _rewrite_tiles(row_B: jax.Ref, offset_B: jax.Ref, kv_len_B: jax.Ref, *refs: jax.Ref, tile: int) -> None:
    count = (len(refs) - 1) // 4
    news, pools, buffers, sems = refs[:count], refs[2 * count : 3 * count], refs[3 * count : 4 * count], refs[-1]
    index, rows = pl.program_id(0), pl.num_programs(0)

    def windows(i: jax.Array) -> Refs:
        first = pl.multiple_of(offset_B[i] // tile * tile, tile)
        return pools[0].at[row_B[i], :, pl.ds(first, tile), :], *(pool.at[row_B[i]] for pool in pools[1:])

    def reads(i: jax.Array) -> Copies:
        slot = i % SLOTS
        return [
            pltpu.make_async_copy(window, buffers[a].at[slot], sems.at[0, slot, a])
            for a, window in enumerate(windows(i))
        ]

    def writes(i: jax.Array) -> Copies:
        slot = i % SLOTS
        return [
            pltpu.make_async_copy(buffers[a].at[slot], window, sems.at[1, slot, a])
            for a, window in enumerate(windows(i))
        ]

    def if_live(i: jax.Array, action: Callable[[Copies], None], copies: Callable[[jax.Array], Copies]) -> None:
        """Padding rows all point at the null page: they would race with each other."""
        clamped = jnp.clip(i, 0, rows - 1)
        pl.when((i >= 0) & (i < rows) & (kv_len_B[clamped] > 0))(lambda: action(copies(clamped)))

    pl.when(index == 0)(lambda: if_live(index, start, reads))
    if_live(index - 1, wait, writes)
    if_live(index + 1, start, reads)
    if_live(index, wait, reads)

    @pl.when(kv_len_B[index] > 0)
    def _() -> None:
        put(lambda: _change(news, buffers, index % SLOTS, offset_B[index], tile), writes(index))

    pl.when(index == rows - 1)(lambda: if_live(index, wait, writes))


def _change(news: Refs, buffers: Refs, slot: jax.Array, offset: jax.Array, tile: int) -> None:
    """Put the new token into the tile of each head, and its scales into the page's."""
    _, heads, _, width = buffers[0].shape
    dtype = buffers[0].dtype
    bits = 8 * dtype.itemsize
    packed = 32 // bits
    word, shift = offset % tile // packed, offset % packed * bits
    is_word = lax.broadcasted_iota(jnp.int32, (tile // packed, width), 0) == word
    value_mask = lax.shift_left(jnp.int32((1 << bits) - 1 if packed > 1 else -1), shift)
    for head in range(heads):
        old = pltpu.bitcast(buffers[0][slot, head], jnp.int32)
        new = (old & ~value_mask) | lax.shift_left(news[0][0, head], shift)
        buffers[0][slot, head] = pltpu.bitcast(jnp.where(is_word, new, old), dtype)
    for scale, buffer in zip(news[1:], buffers[1:], strict=True):
        is_token = lax.broadcasted_iota(jnp.int32, buffer.shape[2:], 1) == offset
        for head in range(heads):
            buffer[slot, head] = jnp.where(is_token, scale[0, head], buffer[slot, head])


def put(change: Callable[[], None], copies: Copies) -> None:
    """Change a tile, then start to write it back."""
    change()
    start(copies)


def start(copies: Copies) -> None:
    """Start copies that belong together."""
    for copy in copies:
        copy.start()


def wait(copies: Copies) -> None:
    """Wait for all of them."""
    for copy in copies:
        copy.wait()
