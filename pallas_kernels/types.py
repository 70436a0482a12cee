"""Arrays that attention kernels share, and the error of an implementation that cannot run.

Axis letters (others: model/shapes.py): Z sequences of the step (decode rows, then prefill segments) · J query blocks ·
R rows of the pool (layers times pages) · C key and value of one head side by side (2H).
"""

from enum import StrEnum

import jax
from flax import struct


class Implementation(StrEnum):
    """How an operation runs; always an explicit choice."""

    REFERENCE = "reference"


class UnsupportedCase(ValueError):
    """The chosen implementation cannot run this case; ``why`` names the limit. Nothing falls back by itself."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(why)


@struct.dataclass
class AttnMeta:
    """Which tokens of the flat batch belong to which sequence, and where their pages are.

    The flat token axis T holds B decode rows of one token each, then J query blocks of T_block tokens. A block belongs
    to one sequence and starts on a page boundary of it; every block of a segment but the last is full.

    position_B: i32, index of the row's token in its sequence; its key and value are written there.
    page_table_ZM: i32, pages of each sequence in order; Z = B + prefill segments. Page 0 is the null page: table
      entries behind a sequence's pages hold it, and padding rows have nothing else.
    kv_len_Z: i32, tokens of each sequence including those of this step; 0 marks a padding row.
    blk_seq_J: i32, row of page_table_ZM, in [B, Z).
    blk_pos_J: i32, position of the block's first token, a multiple of the page size.
    blk_len_J: i32, real tokens of the block, 0 marks a padding block.
    """

    position_B: jax.Array
    page_table_ZM: jax.Array
    kv_len_Z: jax.Array
    blk_seq_J: jax.Array
    blk_pos_J: jax.Array
    blk_len_J: jax.Array

    @property
    def num_decode_rows(self) -> int:
        return self.position_B.shape[0]

    @property
    def num_blocks(self) -> int:
        return self.blk_seq_J.shape[0]

    def block_tokens(self, num_tokens: int) -> int:
        """Tokens of one query block in a flat batch of num_tokens; 0 where there are no blocks."""
        return (num_tokens - self.num_decode_rows) // self.num_blocks if self.num_blocks else 0
