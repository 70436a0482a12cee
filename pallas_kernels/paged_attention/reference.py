"""Paged attention in plain jnp: defines the semantics, and serves where no kernel runs.

An online softmax (arXiv:1805.02867) runs over blocks of keys in a loop whose trip count is the real length (or window),
so there are no context buckets and cost follows what is there. A block that is masked for a row leaves the row's state
as it was, bit for bit: the new maximum equals the old, its factor is exp(0) = 1, and the probabilities are exact zeros.
"""

import jax
import jax.numpy as jnp
from jax import lax

from headrace.pallas_kernels.paged_attention.online_softmax import LOWEST
from headrace.pallas_kernels.types import AttentionSpec, AttnMeta, Kernels, KVPool, TokenKV
from headrace.pallas_kernels.write_pages.reference import write_pages

Array = jax.Array

KV_BLOCK_TOKENS = 64
"""Keys per iteration."""
ROW_GROUP = 4
"""Decode rows that share one loop; the loop runs to the longest of them, so callers sort rows by length."""


def paged_attention(
    q_TNH: Array,
    new: TokenKV,
    pool: KVPool,
    first_row: Array | int,
    meta: AttnMeta,
    spec: AttentionSpec,
    sinks_N: Array | None,
    kernels: Kernels,
) -> tuple[Array, KVPool]:
    """See ``headrace.pallas_kernels.api.paged_attention``."""
    pool = write_pages(new, pool, first_row, meta, kernels)
    return attend(q_TNH, pool, first_row, meta, spec, sinks_N), pool


def attend(
    q_TNH: Array, pool: KVPool, first_row: Array | int, meta: AttnMeta, spec: AttentionSpec, sinks_N: Array | None
) -> Array:
    """The reading half: the pool holds this step's tokens already."""
    num_tokens, num_heads, width = q_TNH.shape
    q_TKGH = (q_TNH.astype(jnp.float32) * spec.scale).reshape(num_tokens, pool.num_kv_heads, -1, width)
    sink_KG = None if sinks_N is None else sinks_N.astype(jnp.float32).reshape(pool.num_kv_heads, -1)
    rows = meta.num_decode_rows
    table_ZM = _padded_table(meta.page_table_ZM, pool.page_tokens)
    parts = []
    if rows:
        parts.append(_decode_rows(q_TKGH[:rows], pool, first_row, table_ZM[:rows], meta.kv_len_Z[:rows], spec, sink_KG))
    if meta.num_blocks:
        parts.append(_query_blocks(q_TKGH[rows:], pool, first_row, table_ZM, meta, spec, sink_KG))
    return jnp.concatenate(parts).reshape(num_tokens, num_heads, width).astype(q_TNH.dtype)


def _block_pages(page_tokens: int) -> int:
    return max(1, KV_BLOCK_TOKENS // page_tokens)


def _padded_table(table_ZM: Array, page_tokens: int) -> Array:
    """Whole key blocks; the padding is the null page."""
    return jnp.pad(table_ZM, ((0, 0), (0, -table_ZM.shape[1] % _block_pages(page_tokens))))


def _decode_rows(
    q_BKGH: Array,
    pool: KVPool,
    first_row: Array | int,
    table_BM: Array,
    kv_len_B: Array,
    spec: AttentionSpec,
    sink_KG: Array | None,
) -> Array:
    rows = q_BKGH.shape[0]
    group = next(size for size in (ROW_GROUP, 2, 1) if rows % size == 0)

    def attend_group(args: tuple[Array, Array, Array]) -> Array:
        q_UKGH, table_UM, kv_len_U = args
        return _attend(q_UKGH, pool, first_row, table_UM, kv_len_U[:, None], spec, sink_KG)

    if rows == group:
        return attend_group((q_BKGH, table_BM, kv_len_B))
    grouped = jax.tree.map(lambda x: x.reshape(rows // group, group, *x.shape[1:]), (q_BKGH, table_BM, kv_len_B))
    return lax.map(attend_group, grouped).reshape(q_BKGH.shape)


def _query_blocks(
    q_TKGH: Array,
    pool: KVPool,
    first_row: Array | int,
    table_ZM: Array,
    meta: AttnMeta,
    spec: AttentionSpec,
    sink_KG: Array | None,
) -> Array:
    tokens, num_kv_heads, group, width = q_TKGH.shape
    block = tokens // meta.num_blocks
    offset = jnp.repeat(jnp.arange(block), group)
    sink_KX = None if sink_KG is None else jnp.tile(sink_KG, (1, block))

    def attend_block(args: tuple[Array, Array, Array, Array]) -> Array:
        q_XKGH, sequence, start, length = args
        q_1KXH = q_XKGH.swapaxes(0, 1).reshape(1, num_kv_heads, block * group, width)
        end = jnp.where(length > 0, start + length, 0)
        # Padding tokens see what the last real token sees, never an unwritten key.
        visible_1X = jnp.minimum(start + offset + 1, end)[None]
        table_1M = lax.dynamic_slice_in_dim(table_ZM, sequence, 1)
        out_1KXH = _attend(q_1KXH, pool, first_row, table_1M, visible_1X, spec, sink_KX)
        return out_1KXH.reshape(num_kv_heads, block, group, width).swapaxes(0, 1)

    q_JXKGH = q_TKGH.reshape(meta.num_blocks, block, num_kv_heads, group, width)
    if meta.num_blocks == 1:
        return attend_block((q_JXKGH[0], meta.blk_seq_J[0], meta.blk_pos_J[0], meta.blk_len_J[0]))
    return lax.map(attend_block, (q_JXKGH, meta.blk_seq_J, meta.blk_pos_J, meta.blk_len_J)).reshape(q_TKGH.shape)


def _gather(pool: KVPool, row_UP: Array) -> Array:
    """float32 [U, K, tokens, C] of the pages of each sequence."""
    sequences = row_UP.shape[0]
    head_K1 = jnp.arange(pool.num_kv_heads)[:, None]
    # One head of one page at a time gives the order that the products want, without a transpose. The pool is read
    # as it is: through a reshape, XLA computes the write twice, into a copy of the pool (seen for one row).
    kv = pool.pages_RKWC.at[row_UP[:, None], head_K1].get(mode="promise_in_bounds")
    if pool.bits_of is not None:
        kv = lax.bitcast_convert_type(kv, pool.dtype)
    kv = kv.astype(jnp.float32)
    if pool.scale_RK2W is not None:
        scale = pool.scale_RK2W.at[row_UP[:, None], head_K1].get(mode="promise_in_bounds")
        kv = kv * jnp.repeat(scale.swapaxes(-1, -2), pool.head_dim, axis=-1)
    return kv.reshape(sequences, pool.num_kv_heads, -1, kv.shape[-1])


def _attend(
    q_UKXH: Array,
    pool: KVPool,
    first_row: Array | int,
    table_UM: Array,
    end_UX: Array,
    spec: AttentionSpec,
    sink_KX: Array | None,
) -> Array:
    """Each of X queries of U sequences sees keys below end_UX ([U, 1]: all the same), as far back as the window."""
    sequences, num_kv_heads, queries, width = q_UKXH.shape
    pages = _block_pages(pool.page_tokens)
    block = pages * pool.page_tokens
    start_UX = jnp.zeros_like(end_UX) if spec.window is None else jnp.maximum(end_UX - spec.window, 0)
    # Keys and values stay side by side: zeros in the query and a cut at the end cost less than cutting every block.
    q_UKXC = jnp.pad(q_UKXH, ((0, 0), (0, 0), (0, 0), (0, width)))

    def step(j: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = state
        row_UP = first_row + lax.dynamic_slice_in_dim(table_UM, j * pages, pages, axis=1)
        kv_UKYC = _gather(pool, row_UP)
        position_Y = j * block + jnp.arange(block)
        # Values outside may be NaN (a page's last tenant), and 0 * NaN is not 0.
        first_U1, last_U1 = start_UX.min(axis=1, keepdims=True), end_UX.max(axis=1, keepdims=True)
        is_live_UY = (position_Y >= first_U1) & (position_Y < last_U1)
        kv_UKYC = jnp.where(is_live_UY[:, None, :, None], kv_UKYC, 0)
        score = jnp.einsum("ukxc,ukyc->ukxy", q_UKXC, kv_UKYC, precision=lax.Precision.HIGHEST)
        if spec.soft_cap is not None:
            score = spec.soft_cap * jnp.tanh(score / spec.soft_cap)
        is_seen_UXY = (position_Y >= start_UX[:, :, None]) & (position_Y < end_UX[:, :, None])
        score = jnp.where(is_seen_UXY[:, None], score, -jnp.inf)
        new_top = jnp.maximum(top, score.max(axis=-1))
        factor = jnp.exp(top - new_top)
        weight = jnp.exp(score - new_top[..., None])
        value = jnp.einsum("ukxy,ukyc->ukxc", weight, kv_UKYC, precision=lax.Precision.HIGHEST)
        return new_top, total * factor + weight.sum(axis=-1), acc * factor[..., None] + value

    shape = (sequences, num_kv_heads, queries)
    if sink_KX is None:
        start = (jnp.full(shape, LOWEST), jnp.zeros(shape), jnp.zeros((*shape, 2 * width)))
    else:
        start = (jnp.broadcast_to(sink_KX, shape), jnp.ones(shape), jnp.zeros((*shape, 2 * width)))
    first_block, last_block = start_UX.min() // block, (end_UX.max() + block - 1) // block
    _, total, acc = lax.fori_loop(first_block, last_block, step, start)
    return acc[..., width:] / jnp.where(total > 0, total, 1)[..., None]
