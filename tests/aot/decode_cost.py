"""Static cost of TPU decode: bundles times trips, set against the time that its bytes take at the chip's bandwidth.

A lower bound of the kernel's own time: waits for memory are not in it, nor what XLA computes before the kernel starts,
once for all layers. Nothing here was measured on a TPU; the clock of v6e is inferred (see ``chips.py``).
"""

from dataclasses import asdict, dataclass
from typing import Any

import jax.numpy as jnp

from headrace.pallas_kernels.chips import CHIPS
from headrace.pallas_kernels.paged_attention.decode_blocks import (
    DecodeBlocks,
    DecodeShape,
    decode_shape,
    decode_trips,
    pick_blocks,
)
from tests.aot.bundles import Loop
from tests.aot.matrix import HEADS_PER_KV_HEAD, MEAN_TOKENS, MOST_TOKENS, ROWS, Entry, pool

LENS = tuple(MEAN_TOKENS // ROWS + 2 * MEAN_TOKENS // ROWS * i for i in range(ROWS))
"""64 sequences of evenly spread lengths from 16 to 2,032 tokens; their mean is 1,024."""
MOST_TIME_RATIO = 1.15
MOST_SEQUENCE_BUNDLES = 250


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCost:
    """bundles: of the whole call. sequence_bundles: of what runs once per group of sequences, for one sequence of it.
    time_ratio: time of the bundles over time of the bytes; below 1, memory is the limit."""

    name: str
    bundles: int
    sequence_bundles: float
    block_bundles: int
    bytes: int
    bundles_us: float
    bytes_us: float

    @property
    def time_ratio(self) -> float:
        return self.bundles_us / self.bytes_us

    @property
    def passed(self) -> bool:
        return self.time_ratio <= MOST_TIME_RATIO and self.sequence_bundles <= MOST_SEQUENCE_BUNDLES

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "time_ratio": round(self.time_ratio, 3), "passed": self.passed}


def shape_of(entry: Entry) -> DecodeShape:
    heads = entry.kv_heads * HEADS_PER_KV_HEAD
    return decode_shape(ROWS, MOST_TOKENS // entry.page_tokens, heads, jnp.dtype(jnp.bfloat16), pool(entry))


def decode_cost(entry: Entry, kernel: Loop, blocks: DecodeBlocks | None = None) -> DecodeCost:
    """Of one decode entry of the matrix, for sequences of LENS, from its kernel's loops. blocks: None for those that
    are picked without being given.

    The kernel is one loop over groups of sequences. The largest loop in it runs over key blocks, and the loops inside
    that one over the pages of a block (or, clearing a sequence's last pages, over as many tiles). Other loops of a
    group run over the pages of its first block. Predicated regions count as if they always ran.

    Raises: ValueError where the kernel does not look like that.
    """
    chip = CHIPS[entry.chip]
    if chip.clock_hz is None or len(kernel.loops) != 1 or not kernel.loops[0].loops:
        raise ValueError(f"{entry.name}: no clock, or no loop over groups with loops inside: {kernel.own()}")
    shape = shape_of(entry)
    blocks = blocks or pick_blocks(shape, entry.kernels)
    trips = decode_trips(LENS, entry.page_tokens, blocks)
    group = kernel.loops[0]
    block = max(group.loops, key=lambda loop: loop.bundles)
    in_block = sum(_all(loop) for loop in block.loops)
    in_group = group.bundles + blocks.block_pages * sum(_all(loop) for loop in group.loops if loop is not block)
    bundles = kernel.bundles + trips.groups * in_group + trips.items * block.bundles + trips.pages * in_block
    moved = moved_bytes(shape, blocks, trips.pages, trips.tokens)
    return DecodeCost(
        name=entry.name,
        bundles=bundles,
        sequence_bundles=in_group / blocks.group,
        block_bundles=block.bundles,
        bytes=moved,
        bundles_us=round(bundles / chip.clock_hz * 1e6, 1),
        bytes_us=round(moved / chip.hbm_bytes_per_s * 1e6, 1),
    )


def moved_bytes(shape: DecodeShape, blocks: DecodeBlocks, pages: int, tokens: int) -> int:
    """Between HBM and VMEM: pages, each new token's tile and page of factors both ways, queries and results."""
    item = jnp.dtype(shape.kv_dtype).itemsize
    tile = shape.num_kv_heads * shape.tile_tokens * shape.row_width * item
    page = shape.num_kv_heads * shape.page_tokens * shape.row_width * item
    factors = shape.is_quantized * shape.num_kv_heads * 2 * shape.page_tokens * 4
    queries = shape.num_heads * shape.key_width * jnp.dtype(shape.q_dtype).itemsize
    return pages * (page + factors) + tokens * (2 * (tile + factors) + 2 * queries)


def _all(loop: Loop) -> int:
    return sum(own for own in loop.own().values())
