"""The static cost of decode, by hand."""

import jax.numpy as jnp
import pytest

from headrace.pallas_kernels.chips import CHIPS
from headrace.pallas_kernels.paged_attention.decode_blocks import decode_shape, pick_blocks
from tests.aot.bundles import Loop
from tests.aot.decode_cost import LENS, DecodeCost, decode_cost
from tests.aot.matrix import MEAN_TOKENS, MOST_TOKENS, Entry, Operation, pool

ENTRY = Entry(chip="v6e", operation=Operation.DECODE, dtype="int8", head_dim=128, kv_heads=8, page_tokens=128)
PAGES = sum(-(-(length - 1) // 128) for length in LENS)
SHAPE = decode_shape(64, MOST_TOKENS // 128, 32, jnp.dtype(jnp.bfloat16), pool(ENTRY))
SIZES = pick_blocks(SHAPE, ENTRY.kernels)
BLOCKS = sum(-(-(length - 1) // (128 * SIZES.block_pages)) for length in LENS)
GROUPS = -(-64 // SIZES.group)


def kernel(group: int, block: int) -> Loop:
    """A loop over groups; in it a loop over blocks, with one over pages, and one that starts the first copies."""
    pages, first = Loop(3, bundles=20), Loop(2, bundles=10)
    blocks = Loop(2, bundles=block, loops=[pages])
    return Loop(0, bundles=50, loops=[Loop(1, bundles=group, loops=[first, blocks])])


def test_bundles_times_trips_and_bytes_of_the_mean_length() -> None:
    assert sum(LENS) / len(LENS) == MEAN_TOKENS
    cost = decode_cost(ENTRY, kernel(800, 700))
    assert cost.bundles == 50 + GROUPS * (800 + SIZES.block_pages * 10) + BLOCKS * 700 + PAGES * 20
    assert cost.sequence_bundles == (800 + SIZES.block_pages * 10) / SIZES.group
    page, tile, factors = 8 * 128 * 256, 8 * 32 * 256, 8 * 2 * 128 * 4
    assert cost.bytes == PAGES * (page + factors) + 64 * (2 * (tile + factors) + 2 * 32 * 128 * 2)
    assert cost.bytes_us == pytest.approx(1e6 * cost.bytes / CHIPS["v6e"].hbm_bytes_per_s, abs=0.06)
    assert cost.passed


def test_both_limits_are_kept() -> None:
    assert not decode_cost(ENTRY, kernel(251 * SIZES.group, 700)).passed
    assert not decode_cost(ENTRY, kernel(800, 5 * BLOCKS * 700)).passed
    fast = DecodeCost(
        name="", bundles=1, sequence_bundles=250, block_bundles=1, bytes=1, bundles_us=115.0, bytes_us=100.0
    )
    assert fast.passed


def test_another_kind_of_kernel_is_an_error_and_not_a_number() -> None:
    with pytest.raises(ValueError, match="no loop over groups"):
        decode_cost(ENTRY, Loop(0, bundles=100))
