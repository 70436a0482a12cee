"""What TPU decode computes before its kernel starts: the list of key blocks, and new tokens as the kernel wants them.

All of it but the tokens depends on lengths alone, so XLA computes it once for all layers that share a window.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from headrace.pallas_kernels.paged_attention.decode_blocks import DecodeBlocks, DecodeShape, max_items, num_groups
from headrace.pallas_kernels.types import AttnMeta, TokenKV

Array = jax.Array


@struct.dataclass
class Work:
    """Scalars of a call, all i32. Key blocks (items) of sequence 0 come first, then those of sequence 1, and so on.

    kv_len: [rows, rounded up to whole groups]. table: flat page table. item_seq, item_block: sequence and key block of
    each item. group_start: first item of each group, and behind the last group their number. first_row: [1].
    """

    kv_len: Array
    table: Array
    item_seq: Array
    item_block: Array
    group_start: Array
    first_row: Array


def list_work(
    meta: AttnMeta, first_row: Array | int, shape: DecodeShape, blocks: DecodeBlocks, window: int | None
) -> Work:
    """A padding row has no item; nor has a key block that lies behind the window."""
    groups, rows = num_groups(shape, blocks), meta.num_decode_rows
    block_tokens = blocks.block_pages * shape.page_tokens
    kv_len = jnp.pad(meta.kv_len_Z[:rows], (0, groups * blocks.group - rows))
    seen_first = jnp.zeros_like(kv_len) if window is None else jnp.maximum(kv_len - window, 0)
    seen_end = jnp.maximum(kv_len - 1, 0)
    first, last = seen_first // block_tokens, (seen_end + block_tokens - 1) // block_tokens
    count = jnp.where(seen_first < seen_end, last - first, 0)
    # Sums over comparisons: they fuse, where a cumulative sum, a search and a gather are ten small programs.
    row, item = jnp.arange(len(kv_len)), jnp.arange(max_items(shape, blocks), dtype=jnp.int32)
    group_row = jnp.arange(groups + 1) * blocks.group
    end = jnp.where(row[:, None] >= row, count, 0).sum(axis=1, dtype=jnp.int32)
    is_past = end <= item[:, None]
    item_seq = jnp.minimum(is_past.sum(axis=1, dtype=jnp.int32), rows - 1)
    before = jnp.where(is_past, count, 0).sum(axis=1, dtype=jnp.int32)
    first_of_seq = jnp.where(row == item_seq[:, None], first, 0).sum(axis=1, dtype=jnp.int32)
    return Work(
        kv_len=kv_len,
        table=meta.page_table_ZM[:rows].reshape(-1),
        item_seq=item_seq,
        item_block=first_of_seq + item - before,
        group_start=jnp.where(row < group_row[:, None], count, 0).sum(axis=1, dtype=jnp.int32),
        first_row=jnp.full(1, first_row, jnp.int32),
    )


@struct.dataclass
class Fresh:
    """This step's tokens. value_BKC: float32, what the pool will mean by them. word_BKC: i32, their stored bits,
    repeated through the word. scale_BK2W: their scales in every lane of a page, or None."""

    value_BKC: Array
    word_BKC: Array
    scale_BK2W: Array | None


def fresh_tokens(new: TokenKV, shape: DecodeShape) -> Fresh:
    """See Fresh."""
    value = new.kv_TKC.astype(jnp.float32)
    scale_BK2W = None
    if new.scale_TK2 is not None:
        value = value * jnp.repeat(new.scale_TK2, shape.head_dim, axis=-1)
        scale_BK2W = jnp.broadcast_to(new.scale_TK2[..., None], (*new.scale_TK2.shape, shape.page_tokens))
    bits = 32 // shape.packing
    unsigned = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[bits]
    ones = sum(1 << (bits * i) for i in range(shape.packing))
    word = lax.bitcast_convert_type(new.kv_TKC, unsigned).astype(jnp.uint32) * jnp.uint32(ones)
    return Fresh(value, lax.bitcast_convert_type(word, jnp.int32), scale_BK2W)
