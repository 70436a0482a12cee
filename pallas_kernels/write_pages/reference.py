"""Paged key and value write in plain jnp."""

import jax
import jax.numpy as jnp
from jax import lax

from headrace.pallas_kernels.types import AttnMeta, Kernels, KVPool, TokenKV


def write_pages(new: TokenKV, pool: KVPool, first_row: jax.Array | int, meta: AttnMeta, kernels: Kernels) -> KVPool:
    """See ``headrace.pallas_kernels.api.write_pages``."""
    rows, bits_of = meta.num_decode_rows, pool.bits_of
    if bits_of is not None:
        new = new.replace(kv_TKC=lax.bitcast_convert_type(new.kv_TKC, pool.pages_RKWC.dtype))
        pool = pool.replace(bits_of=None)
    if rows:
        pool = _write_tokens(new.rows(0, rows), pool, first_row, meta)
    if meta.num_blocks:
        pool = _write_blocks(new.rows(rows), pool, first_row, meta)
    return pool.replace(bits_of=bits_of)


def _write_tokens(new: TokenKV, pool: KVPool, first_row: jax.Array | int, meta: AttnMeta) -> KVPool:
    page_B = meta.position_B // pool.page_tokens
    row_B = first_row + jnp.take_along_axis(
        meta.page_table_ZM[: meta.num_decode_rows], page_B[:, None], axis=1, mode="clip"
    )
    offset_B = meta.position_B % pool.page_tokens

    def write(i: jax.Array, pool: KVPool) -> KVPool:
        token = lax.dynamic_slice_in_dim(new.kv_TKC, i, 1)[:, :, None]
        pages = lax.dynamic_update_slice(pool.pages_RKWC, token, (row_B[i, 0], 0, offset_B[i], 0))
        if new.scale_TK2 is None:
            return KVPool(pages)
        scale = lax.dynamic_slice_in_dim(new.scale_TK2, i, 1)[..., None]
        return KVPool(pages, lax.dynamic_update_slice(pool.scale_RK2W, scale, (row_B[i, 0], 0, 0, offset_B[i])))

    return lax.fori_loop(0, meta.num_decode_rows, write, pool)


def block_rows(first_row: jax.Array | int, meta: AttnMeta, block_pages: int, page_tokens: int) -> jax.Array:
    """Row of the pool for each page of each query block, [J * block_pages]; the null page for pages without a token."""
    page = jnp.arange(block_pages)
    column = jnp.minimum(meta.blk_pos_J[:, None] // page_tokens + page, meta.page_table_ZM.shape[1] - 1)
    row = meta.page_table_ZM[meta.blk_seq_J[:, None], column]
    has_token = page * page_tokens < meta.blk_len_J[:, None]
    return first_row + jnp.where(has_token, row, 0).reshape(-1)


def as_pages(new: TokenKV, page_tokens: int) -> KVPool:
    """Tokens of query blocks, cut into pages [pages, K, W, C] and [pages, K, 2, W]."""
    _, heads, width = new.kv_TKC.shape
    pages = new.kv_TKC.reshape(-1, page_tokens, heads, width).swapaxes(1, 2)
    if new.scale_TK2 is None:
        return KVPool(pages)
    return KVPool(pages, new.scale_TK2.reshape(-1, page_tokens, heads, 2).transpose(0, 2, 3, 1))


def _write_blocks(new: TokenKV, pool: KVPool, first_row: jax.Array | int, meta: AttnMeta) -> KVPool:
    block_pages = new.kv_TKC.shape[0] // meta.num_blocks // pool.page_tokens
    row = block_rows(first_row, meta, block_pages, pool.page_tokens)
    source = as_pages(new, pool.page_tokens)

    def write(i: jax.Array, pool: KVPool) -> KVPool:
        # One slice per page: XLA:CPU writes a slice as one copy and a scatter element by element.
        return jax.tree.map(
            lambda to, pages: lax.dynamic_update_slice(to, lax.dynamic_slice_in_dim(pages, i, 1), (row[i], 0, 0, 0)),
            pool,
            source,
        )

    return lax.fori_loop(0, row.shape[0], write, pool)
