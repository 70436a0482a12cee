"""Paged key and value write in plain jnp."""

import jax
import jax.numpy as jnp
from jax import lax

from headrace.pallas_kernels.types import AttnMeta


def write_pages(
    pool_RKWC: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, first_row: jax.Array | int, meta: AttnMeta
) -> jax.Array:
    """See ``headrace.pallas_kernels.api.write_pages``."""
    kv_TKC = jnp.concatenate([k_TKH, v_TKH], axis=-1).astype(pool_RKWC.dtype)
    rows = meta.num_decode_rows
    if rows:
        pool_RKWC = _write_tokens(pool_RKWC, kv_TKC[:rows], first_row, meta)
    if meta.num_blocks:
        pool_RKWC = _write_blocks(pool_RKWC, kv_TKC[rows:], first_row, meta)
    return pool_RKWC


def _write_tokens(pool_RKWC: jax.Array, kv_BKC: jax.Array, first_row: jax.Array | int, meta: AttnMeta) -> jax.Array:
    page_tokens = pool_RKWC.shape[2]
    page_B = meta.position_B // page_tokens
    row_B = first_row + jnp.take_along_axis(
        meta.page_table_ZM[: meta.num_decode_rows], page_B[:, None], axis=1, mode="clip"
    )
    offset_B = meta.position_B % page_tokens

    def write(i: jax.Array, pool: jax.Array) -> jax.Array:
        token = lax.dynamic_slice_in_dim(kv_BKC, i, 1)[:, :, None]
        return lax.dynamic_update_slice(pool, token, (row_B[i, 0], 0, offset_B[i], 0))

    return lax.fori_loop(0, kv_BKC.shape[0], write, pool_RKWC)


def _write_blocks(pool_RKWC: jax.Array, kv_TKC: jax.Array, first_row: jax.Array | int, meta: AttnMeta) -> jax.Array:
    _, num_heads, page_tokens, kv_width = pool_RKWC.shape
    block_pages = kv_TKC.shape[0] // meta.num_blocks // page_tokens
    page = jnp.arange(block_pages)
    max_pages = meta.page_table_ZM.shape[1]
    column = jnp.minimum(meta.blk_pos_J[:, None] // page_tokens + page, max_pages - 1)
    row = meta.page_table_ZM[meta.blk_seq_J[:, None], column]
    has_token = page * page_tokens < meta.blk_len_J[:, None]
    row = first_row + jnp.where(has_token, row, 0).reshape(-1)
    pages = kv_TKC.reshape(-1, page_tokens, num_heads, kv_width).swapaxes(1, 2)

    def write(i: jax.Array, pool: jax.Array) -> jax.Array:
        # One slice per page: XLA:CPU writes a slice as one copy and a scatter element by element.
        return lax.dynamic_update_slice(pool, lax.dynamic_slice_in_dim(pages, i, 1), (row[i], 0, 0, 0))

    return lax.fori_loop(0, pages.shape[0], write, pool_RKWC)
