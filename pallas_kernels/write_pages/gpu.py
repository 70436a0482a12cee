"""Paged key and value write on GPU: XLA's scatter, which writes a donated pool in place there.

No Pallas is needed: a scatter moves the new tokens and nothing else. Every index is explicit and leads the array, since
XLA transposes a scatter's operand, here the whole pool, when the indexed axes are not its first ones.
"""

import jax
import jax.numpy as jnp
from jax import lax

from headrace.pallas_kernels.types import AttnMeta, Kernels, KVPool, TokenKV
from headrace.pallas_kernels.write_pages.reference import as_pages, block_rows


def write_pages(new: TokenKV, pool: KVPool, first_row: jax.Array | int, meta: AttnMeta, kernels: Kernels) -> KVPool:
    """See ``headrace.pallas_kernels.api.write_pages``."""
    del kernels  # nothing here depends on the chip
    rows = meta.num_decode_rows
    if rows:
        pool = _write_tokens(new.rows(0, rows), pool, first_row, meta)
    if meta.num_blocks:
        pool = _write_blocks(new.rows(rows), pool, first_row, meta)
    return pool


def _write_tokens(new: TokenKV, pool: KVPool, first_row: jax.Array | int, meta: AttnMeta) -> KVPool:
    rows = meta.num_decode_rows
    # Padding rows all write to the null page. Which of them wins is undefined, and nobody reads it.
    page_B = meta.page_table_ZM[jnp.arange(rows), lax.div(meta.position_B, pool.page_tokens)]
    row_B11 = (first_row + page_B)[:, None, None]
    offset_B11 = lax.rem(meta.position_B, pool.page_tokens)[:, None, None]
    head_K1 = jnp.arange(pool.num_kv_heads)[:, None]
    pages = pool.pages_RKWC.at[row_B11[..., 0], head_K1[:, 0], offset_B11[..., 0]].set(
        new.kv_TKC, mode="promise_in_bounds"
    )
    if new.scale_TK2 is None:
        return KVPool(pages)
    scale = pool.scale_RK2W.at[row_B11, head_K1, jnp.arange(2), offset_B11].set(new.scale_TK2, mode="promise_in_bounds")
    return KVPool(pages, scale)


def _write_blocks(new: TokenKV, pool: KVPool, first_row: jax.Array | int, meta: AttnMeta) -> KVPool:
    block_pages = new.kv_TKC.shape[0] // meta.num_blocks // pool.page_tokens
    row = block_rows(first_row, meta, block_pages, pool.page_tokens)
    return jax.tree.map(
        lambda to, pages: to.at[row].set(pages, mode="promise_in_bounds"), pool, as_pages(new, pool.page_tokens)
    )
