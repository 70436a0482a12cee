"""Paged attention in plain jnp: defines the semantics, and serves on CPU.

An online softmax (arXiv:1805.02867) runs over blocks of keys in a loop whose trip count is the real length, so there
are no context buckets and cost follows what is there. A block that is masked for a row leaves the row's state as it
was, bit for bit: the new maximum equals the old, its factor is exp(0) = 1, and the probabilities are exact zeros.
"""

import jax
import jax.numpy as jnp
from jax import lax

from headrace.pallas_kernels.types import AttnMeta

KV_BLOCK_TOKENS = 64
"""Keys per iteration."""
ROW_GROUP = 4
"""Decode rows that share one loop; the loop runs to the longest of them, so callers sort rows by length."""
LOWEST = -1e30
"""Start of the running maximum. Finite: the difference of two infinities would be NaN."""


def paged_attention(
    q_TNH: jax.Array, pool_RKWC: jax.Array, first_row: jax.Array | int, meta: AttnMeta, *, scale: float
) -> jax.Array:
    """See ``headrace.pallas_kernels.api.paged_attention``."""
    num_tokens, num_heads, width = q_TNH.shape
    num_kv_heads = pool_RKWC.shape[1]
    q_TKGH = (q_TNH.astype(jnp.float32) * scale).reshape(num_tokens, num_kv_heads, -1, width)
    rows = meta.num_decode_rows
    table_ZM = _padded_table(meta.page_table_ZM, pool_RKWC.shape[2])
    parts = []
    if rows:
        parts.append(_decode_rows(q_TKGH[:rows], pool_RKWC, first_row, table_ZM[:rows], meta.kv_len_Z[:rows]))
    if meta.num_blocks:
        parts.append(_query_blocks(q_TKGH[rows:], pool_RKWC, first_row, table_ZM, meta))
    return jnp.concatenate(parts).reshape(num_tokens, num_heads, width)


def _block_pages(page_tokens: int) -> int:
    return max(1, KV_BLOCK_TOKENS // page_tokens)


def _padded_table(table_ZM: jax.Array, page_tokens: int) -> jax.Array:
    """Whole key blocks; the padding is the null page."""
    return jnp.pad(table_ZM, ((0, 0), (0, -table_ZM.shape[1] % _block_pages(page_tokens))))


def _decode_rows(
    q_BKGH: jax.Array, pool_RKWC: jax.Array, first_row: jax.Array | int, table_BM: jax.Array, kv_len_B: jax.Array
) -> jax.Array:
    rows = q_BKGH.shape[0]
    group = next(size for size in (ROW_GROUP, 2, 1) if rows % size == 0)

    def attend_group(args: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q_UKGH, table_UM, kv_len_U = args
        visible_U1 = kv_len_U[:, None]
        return _attend(q_UKGH, pool_RKWC, first_row, table_UM, visible_U1, kv_len_U.max())

    if rows == group:
        return attend_group((q_BKGH, table_BM, kv_len_B))
    grouped = jax.tree.map(lambda x: x.reshape(rows // group, group, *x.shape[1:]), (q_BKGH, table_BM, kv_len_B))
    return lax.map(attend_group, grouped).reshape(q_BKGH.shape)


def _query_blocks(
    q_TKGH: jax.Array, pool_RKWC: jax.Array, first_row: jax.Array | int, table_ZM: jax.Array, meta: AttnMeta
) -> jax.Array:
    tokens, num_kv_heads, group, width = q_TKGH.shape
    block = tokens // meta.num_blocks
    offset = jnp.repeat(jnp.arange(block), group)

    def attend_block(args: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q_XKGH, sequence, start, length = args
        q_1KXH = q_XKGH.swapaxes(0, 1).reshape(1, num_kv_heads, block * group, width)
        end = jnp.where(length > 0, start + length, 0)
        # Padding tokens see what the last real token sees, never an unwritten key.
        visible_1X = jnp.minimum(start + offset + 1, end)[None]
        table_1M = lax.dynamic_slice_in_dim(table_ZM, sequence, 1)
        out_1KXH = _attend(q_1KXH, pool_RKWC, first_row, table_1M, visible_1X, end)
        return out_1KXH.reshape(num_kv_heads, block, group, width).swapaxes(0, 1)

    q_JXKGH = q_TKGH.reshape(meta.num_blocks, block, num_kv_heads, group, width)
    if meta.num_blocks == 1:
        return attend_block((q_JXKGH[0], meta.blk_seq_J[0], meta.blk_pos_J[0], meta.blk_len_J[0]))
    return lax.map(attend_block, (q_JXKGH, meta.blk_seq_J, meta.blk_pos_J, meta.blk_len_J)).reshape(q_TKGH.shape)


def _attend(
    q_UKXH: jax.Array,
    pool_RKWC: jax.Array,
    first_row: jax.Array | int,
    table_UM: jax.Array,
    visible_UX: jax.Array,
    num_keys: jax.Array,
) -> jax.Array:
    """Each of X queries of U sequences sees the first visible_UX keys ([U, 1]: all the same); num_keys: most of all."""
    sequences, num_kv_heads, queries, width = q_UKXH.shape
    page_tokens = pool_RKWC.shape[2]
    pages = _block_pages(page_tokens)
    block = pages * page_tokens
    head_K1 = jnp.arange(num_kv_heads)[:, None]
    # Keys and values stay side by side: zeros in the query and a cut at the end cost less than cutting every block.
    q_UKXC = jnp.pad(q_UKXH, ((0, 0), (0, 0), (0, 0), (0, width)))

    def step(j: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        top, total, acc = state
        row_UC = first_row + lax.dynamic_slice_in_dim(table_UM, j * pages, pages, axis=1)
        # One head of one page at a time gives the order that the products want, without a transpose. The pool is read
        # as it is: through a reshape, XLA computes the write twice, into a copy of the pool (seen for one row).
        kv = pool_RKWC.at[row_UC[:, None], head_K1].get(mode="promise_in_bounds")
        kv_UKYC = kv.reshape(sequences, num_kv_heads, block, -1)
        position_Y = j * block + jnp.arange(block)
        # Values behind the end may be NaN (a page's last tenant), and 0 * NaN is not 0.
        written_UY = position_Y < visible_UX.max(axis=1, keepdims=True)
        kv_UKYC = jnp.where(written_UY[:, None, :, None], kv_UKYC, 0)
        score = jnp.einsum("ukxc,ukyc->ukxy", q_UKXC, kv_UKYC, precision=lax.Precision.HIGHEST)
        seen_UXY = position_Y < visible_UX[:, :, None]
        score = jnp.where(seen_UXY[:, None], score, -jnp.inf)
        new_top = jnp.maximum(top, score.max(axis=-1))
        factor = jnp.exp(top - new_top)
        weight = jnp.exp(score - new_top[..., None])
        value = jnp.einsum("ukxy,ukyc->ukxc", weight, kv_UKYC, precision=lax.Precision.HIGHEST)
        return new_top, total * factor + weight.sum(axis=-1), acc * factor[..., None] + value

    shape = (sequences, num_kv_heads, queries)
    start = (jnp.full(shape, LOWEST), jnp.zeros(shape), jnp.zeros((*shape, 2 * width)))
    _, total, acc = lax.fori_loop(0, (num_keys + block - 1) // block, step, start)
    return acc[..., width:] / jnp.where(total > 0, total, 1)[..., None]
