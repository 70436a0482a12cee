"""Mixed batches of named shapes, for tests, benches and tuners of the kernels."""

from dataclasses import dataclass

import numpy as np

from headrace.pallas_kernels.types import AttnMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCase:
    """decode_lens: tokens of each decode row's sequence, 0 is a padding row. segments: (start, tokens) of each prefill
    segment; start is a multiple of page_tokens. padding_blocks: query blocks behind the segments. shared_pages: the
    first pages of the longest sequence that every sequence with as many whole pages from earlier steps shares."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int
    decode_lens: tuple[int, ...] = ()
    segments: tuple[tuple[int, int], ...] = ()
    block_tokens: int = 32
    padding_blocks: int = 0
    shared_pages: int = 0

    @property
    def kv_lens(self) -> tuple[int, ...]:
        return *self.decode_lens, *(start + count for start, count in self.segments)

    @property
    def num_blocks(self) -> int:
        return sum(-(-count // self.block_tokens) for _, count in self.segments) + self.padding_blocks

    @property
    def num_tokens(self) -> int:
        return len(self.decode_lens) + self.num_blocks * self.block_tokens

    @property
    def old_lens(self) -> tuple[int, ...]:
        """Tokens of each sequence that earlier steps stored."""
        return *(max(length - 1, 0) for length in self.decode_lens), *(start for start, _ in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """meta: host arrays. num_pages: of one layer. rows: (flat token, sequence, position) of every real token."""

    meta: AttnMeta
    num_pages: int
    rows: tuple[tuple[int, int, int], ...]


def make_batch(case: BatchCase, seed: int, spare_pages: int = 3) -> Batch:
    """Pages at random places; table columns behind a sequence's pages hold the null page."""
    needed = [-(-length // case.page_tokens) for length in case.kv_lens]
    num_pages = 1 + sum(needed) + spare_pages
    free = list(np.random.default_rng(seed).permutation(np.arange(1, num_pages)))
    table = np.zeros((len(needed), max(needed, default=0) + 1), np.int32)
    for index, count in enumerate(needed):
        table[index, :count] = [free.pop() for _ in range(count)]
    if case.shared_pages:
        longest = int(np.argmax(case.kv_lens))
        for index, old in enumerate(case.old_lens):
            if old // case.page_tokens >= case.shared_pages:
                table[index, : case.shared_pages] = table[longest, : case.shared_pages]
    decode = len(case.decode_lens)
    rows = [(i, i, length - 1) for i, length in enumerate(case.decode_lens) if length]
    blocks: list[tuple[int, int, int]] = []
    for index, (start, count) in enumerate(case.segments):
        first = decode + len(blocks) * case.block_tokens
        rows += [(first + i, decode + index, start + i) for i in range(count)]
        blocks += [
            (decode + index, start + offset, min(case.block_tokens, count - offset))
            for offset in range(0, count, case.block_tokens)
        ]
    blocks += [(decode, 0, 0)] * case.padding_blocks
    sequence_J, position_J, length_J = np.array(blocks, np.int32).reshape(-1, 3).T
    meta = AttnMeta(
        position_B=np.maximum(np.array(case.decode_lens, np.int32) - 1, 0),
        page_table_ZM=table,
        kv_len_Z=np.array(case.kv_lens, np.int32),
        blk_seq_J=sequence_J,
        blk_pos_J=position_J,
        blk_len_J=length_J,
    )
    return Batch(meta=meta, num_pages=num_pages, rows=tuple(rows))
