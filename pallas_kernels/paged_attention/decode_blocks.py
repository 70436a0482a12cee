"""Block sizes of TPU decode: their heuristic with its reasons, the trips of its loops, and what does not fit a chip."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from headrace.pallas_kernels.block_sizes import pick
from headrace.pallas_kernels.chips import CHIPS, MIB, has_bfloat16_vectors
from headrace.pallas_kernels.kv_quantization import is_quantized
from headrace.pallas_kernels.types import Implementation, Kernels, KVPool, UnsupportedCase

SUBLANES, LANES = 8, 128
SMEM_BYTES = 1 * MIB
"""Scalar memory of every TPU generation since v4; the compiler and the pipeline need some of it themselves."""
SMEM_RESERVE_BYTES = 64 << 10
MOST_8_BIT_PAGES = 8
"""Of a key block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBlocks:
    """block_pages: pages that one key block holds. group: sequences of one grid step. slots: key blocks in VMEM.
    rows: query heads whose scores of a block are computed together, if whole key heads and registers can be cut so."""

    block_pages: int
    group: int = 8
    slots: int = 4
    rows: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeShape:
    """What the kernel is specialized on. rows: decode rows. table_pages: columns of the page table."""

    rows: int
    table_pages: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int
    kv_dtype: jnp.dtype
    q_dtype: jnp.dtype

    @property
    def is_quantized(self) -> bool:
        return is_quantized(self.kv_dtype)

    @property
    def row_width(self) -> int:
        """Lanes of a pool row: key and value side by side."""
        return 2 * self.head_dim

    @property
    def key_width(self) -> int:
        """Lanes of the query and of the accumulator. A head of 64 shares its 128 lanes with its value, so the query
        has zeros behind it, and the value comes out in the upper half."""
        return self.row_width if self.head_dim % LANES else self.head_dim

    @property
    def packing(self) -> int:
        """Pool values in a 32-bit word; they lie in neighbouring rows."""
        return 4 // jnp.dtype(self.kv_dtype).itemsize

    @property
    def tile_tokens(self) -> int:
        """Tokens of the smallest piece of a page that a copy can address."""
        return SUBLANES * self.packing

    @property
    def compute_dtype(self) -> jnp.dtype:
        """Of the products. 8-bit values are exact in bfloat16."""
        return jnp.dtype(jnp.float32 if self.kv_dtype == jnp.float32 else jnp.bfloat16)

    @property
    def token_bytes(self) -> int:
        """One token of all heads, without its scales."""
        return self.num_kv_heads * self.row_width * jnp.dtype(self.kv_dtype).itemsize

    @property
    def key(self) -> str:
        """Names everything that the best block sizes depend on, for tuned files."""
        return f"{self.kv_dtype}-n{self.num_heads}-k{self.num_kv_heads}-h{self.head_dim}-w{self.page_tokens}"


def decode_shape(rows: int, table_pages: int, num_heads: int, q_dtype: jnp.dtype, pool: KVPool) -> DecodeShape:
    """Shape of a call; a pool of shapes alone will do."""
    return DecodeShape(
        rows=rows,
        table_pages=table_pages,
        num_heads=num_heads,
        num_kv_heads=pool.num_kv_heads,
        head_dim=pool.head_dim,
        page_tokens=pool.page_tokens,
        kv_dtype=jnp.dtype(pool.pages_RKWC.dtype),
        q_dtype=jnp.dtype(q_dtype),
    )


def pick_blocks(shape: DecodeShape, kernels: Kernels) -> DecodeBlocks:
    """Explicit, tuned, or by the heuristic; checked against the chip. Raises: UnsupportedCase."""
    blocks = pick(kernels, DecodeBlocks, "paged_attention_decode", shape.key, lambda: heuristic(shape, kernels.chip))
    check(shape, blocks, kernels)
    return blocks


def heuristic(shape: DecodeShape, chip: str | None) -> DecodeBlocks:
    """Key blocks of 512 tokens (1,024 where those are under 512 KiB, fewer where they pass 4 MiB), of which 4 are in
    VMEM; 8 sequences to a step.

    By static cost on v6e, pages of 128 int8 tokens: a block costs 150 to 250 bundles whatever its length, because its
    products and its softmax wait for each other. With 8 key heads of 128 a block of 512 tokens costs 720 and one of
    1,024 costs 1,170, but the part of a last block that is nobody's costs the same, so sequences of 512 to 1,536 tokens
    win nothing by it; with one key head blocks of 1,024 cost 10% less in all. The sequences of a step share its own
    work, and their chains of operations fill each other's gaps. A model of one queue of copies, which takes 0.6 us to
    begin each, says that 2 blocks in VMEM cost 59% over the copies alone, 3 cost 18% and 4 cost 10%.

    The rest keeps what is computed together within 64 registers, by spills and fills that libtpu 0.0.42.1 reported.
    One head of 64 or 256 spilled with 1,024 tokens (bfloat16: 2, fp8: 30, int8 on v5e: 5); with 512 it takes up to
    7% more bundles. 8 heads of 256 in 8 bits spilled with 512 tokens (int8 on v5e: 79, fp8 on v6e: 19); with 256
    they take up to 5% more. Pages of 8 bits bring factors: 32 query heads at once spilled on chips that widen 8
    bits by way of float32 (8 heads of 128 on v5e: 48), and on all chips where the factors of short pages are moved
    to their lanes (v6e, pages of 32: 82 in int8, 118 in fp8). 16 at once take 5% more on v5e (1,018 a block for
    965), so other pages keep 32. 16 pages of 32 tokens spilled even so (v5p: 6), and are a block of 8.
    """
    is_8_bit = shape.compute_dtype.itemsize > jnp.dtype(shape.kv_dtype).itemsize
    is_lone = shape.num_kv_heads == 1 and shape.head_dim != LANES
    tokens = 1024 if 512 * shape.token_bytes < 512 << 10 and not is_lone else 512
    most_bytes = MIB if is_8_bit and shape.head_dim > LANES else 4 * MIB
    while tokens > shape.page_tokens and tokens * shape.token_bytes > most_bytes:
        tokens //= 2
    pages = max(1, min(tokens // shape.page_tokens, shape.table_pages, MOST_8_BIT_PAGES if is_8_bit else tokens))
    needs_few_rows = is_8_bit and (not has_bfloat16_vectors(chip) or shape.page_tokens < LANES)
    return DecodeBlocks(block_pages=pages, group=min(8, max(shape.rows, 1)), rows=16 if needs_few_rows else 32)


def heads_at_once(shape: DecodeShape, blocks: DecodeBlocks) -> int:
    """Key heads whose query heads are computed together: the most that divide them all and whose query heads fill whole
    registers; if those are too many, the fewest."""
    heads, per_head = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads
    sizes = [size for size in range(1, heads) if heads % size == 0 and size * per_head % SUBLANES == 0]
    return max((size for size in [*sizes, heads] if size * per_head <= blocks.rows), default=min([*sizes, heads]))


def num_groups(shape: DecodeShape, blocks: DecodeBlocks) -> int:
    return -(-shape.rows // blocks.group)


def max_items(shape: DecodeShape, blocks: DecodeBlocks) -> int:
    """Key blocks of a call whose sequences fill the page table."""
    return max(1, shape.rows * -(-shape.table_pages // blocks.block_pages))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTrips:
    """How often the loops of one call run. groups: grid steps. items: key blocks. pages: pages that are copied in.
    tokens: rows that are written."""

    groups: int
    items: int
    pages: int
    tokens: int


def decode_trips(lens: Sequence[int], page_tokens: int, blocks: DecodeBlocks, window: int | None = None) -> DecodeTrips:
    """Of decode rows whose sequences have these lengths, this step's token included; 0 is a padding row."""
    items = pages = 0
    for length in lens:
        seen_first = 0 if window is None else max(length - window, 0)
        if seen_first < length - 1:
            first, last = seen_first // page_tokens, -(-(length - 1) // page_tokens)
            items += -(-last // blocks.block_pages) - first // blocks.block_pages
            pages += last - first
    live = sum(length > 0 for length in lens)
    return DecodeTrips(groups=-(-len(lens) // blocks.group), items=items, pages=pages, tokens=live)


def vmem_bytes(shape: DecodeShape, blocks: DecodeBlocks) -> int:
    """What the kernel holds in VMEM: key blocks, tiles to write, state, inputs and outputs twice."""
    heads, padded_heads = shape.num_kv_heads, -(-shape.num_heads // SUBLANES) * SUBLANES
    lanes = max(shape.page_tokens, LANES)
    item = jnp.dtype(shape.kv_dtype).itemsize
    page = heads * shape.page_tokens * shape.row_width * item
    scales = heads * 2 * lanes * 4 if shape.is_quantized else 0
    tiles = 2 * blocks.group * (heads * shape.tile_tokens * shape.row_width * item + scales)
    state = blocks.group * padded_heads * (shape.key_width + 2 * LANES) * 4
    fresh = -(-heads // SUBLANES) * SUBLANES * shape.row_width * 8 + scales
    queries = 2 * max(padded_heads, 16) * shape.key_width * 4
    # A block's keys, values, scores and probabilities in compute type while the products run.
    block = blocks.block_pages * shape.page_tokens
    working = block * (heads * shape.row_width * shape.compute_dtype.itemsize + padded_heads * 16)
    return (
        blocks.slots * blocks.block_pages * (page + scales)
        + tiles
        + state
        + 2 * blocks.group * (fresh + queries)
        + working
    )


def smem_bytes(shape: DecodeShape, blocks: DecodeBlocks) -> int:
    """What the kernel holds in scalar memory: page table, lengths and the list of key blocks."""
    rows = num_groups(shape, blocks) * blocks.group
    return 4 * (shape.rows * shape.table_pages + 2 * max_items(shape, blocks) + 2 * rows)


def check(shape: DecodeShape, blocks: DecodeBlocks, kernels: Kernels) -> None:
    """Raises: UnsupportedCase naming the limit."""
    if kernels.chip is None or CHIPS[kernels.chip].implementation != Implementation.TPU:
        raise UnsupportedCase(f"TPU kernels need the name of a TPU, for its VMEM; the chip is {kernels.chip}")
    chip = CHIPS[kernels.chip]
    if shape.kv_dtype.name.startswith("float8") and chip.fp8 != shape.kv_dtype.name:
        raise UnsupportedCase(f"pages of {shape.kv_dtype} on {chip.name}, whose 8-bit float type is {chip.fp8}")
    if shape.head_dim != LANES // 2 and shape.head_dim % LANES:
        raise UnsupportedCase(f"heads of {shape.head_dim}; TPU decode takes 64 and multiples of {LANES}")
    if shape.page_tokens % shape.tile_tokens:
        raise UnsupportedCase(
            f"pages of {shape.page_tokens} tokens of {shape.kv_dtype}; TPU copies address {shape.tile_tokens} tokens"
        )
    if blocks.slots < 2 or blocks.group < 1 or blocks.block_pages < 1:
        raise UnsupportedCase(f"{blocks}: a block is computed while the next one is copied, so slots >= 2, others >= 1")
    needed, limit = smem_bytes(shape, blocks), SMEM_BYTES - SMEM_RESERVE_BYTES
    if needed > limit:
        raise UnsupportedCase(
            f"a page table of {shape.rows} x {shape.table_pages} takes {needed} bytes of scalar memory, over {limit}"
        )
    needed = vmem_bytes(shape, blocks)
    if needed > chip.on_chip_bytes:
        raise UnsupportedCase(f"{blocks} needs {needed} bytes of VMEM; {chip.name} has {chip.on_chip_bytes}")
