import functools
from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.pallas_kernels import api
from headrace.pallas_kernels.paged_attention.cases import AttentionCase
from headrace.pallas_kernels.paged_attention.inputs import AttentionInputs, make_inputs, poisoned, row_of
from headrace.pallas_kernels.types import Implementation, Kernels, KVPool, UnsupportedCase
from headrace.pallas_kernels.write_pages.tpu import PAGES_IN_FLIGHT, tile_rows
from tests.pallas_kernels import interpreter

pytestmark = pytest.mark.usefixtures("quick_compiles")

SMALL = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 64, "page_tokens": 16, "block_tokens": 32}
MIXED = AttentionCase(
    name="mixed", **SMALL, decode_lens=(1, 0, 16, 17, 40, 0), segments=((0, 33), (16, 16), (32, 1)), padding_blocks=1
)
CASES = (
    *(replace(MIXED, name=f"mixed, {dtype}", kv_dtype=dtype) for dtype in ("float32", "bfloat16")),
    *(replace(MIXED, name=f"mixed, {dtype}", kv_dtype=dtype) for dtype in ("int8", "float8_e4m3fn", "float8_e5m2")),
    AttentionCase(name="padding rows alone", **SMALL, decode_lens=(0, 0), kv_dtype="int8"),
    AttentionCase(
        name="several tiles a page, one head",
        **(SMALL | {"num_heads": 1, "num_kv_heads": 1, "head_dim": 128, "page_tokens": 64, "block_tokens": 64}),
        decode_lens=(1, 32, 33, 64, 97),
        segments=((64, 65),),
        kv_dtype="int8",
    ),
    AttentionCase(
        name="more pages than are in flight, bfloat16", **SMALL, segments=((0, 150), (16, 1)), kv_dtype="bfloat16"
    ),
)


def leaves(pool: KVPool) -> Iterator[np.ndarray]:
    """Pages and scales, both as [R, W, ...], as bits: NaN equals itself."""
    yield pool.pages_RKWC.swapaxes(1, 2).view(f"u{pool.pages_RKWC.dtype.itemsize}")
    if pool.scale_RK2W is not None:
        yield pool.scale_RK2W.transpose(0, 3, 1, 2).view(np.uint32)


def may_change(case: AttentionCase, inputs: AttentionInputs) -> tuple[np.ndarray, np.ndarray]:
    """[R, W] of the tokens written, and of those whose page a query block ends in."""
    rows = inputs.pool.pages_RKWC.shape[0]
    is_written, is_free = np.zeros((2, rows, case.page_tokens), bool)
    for _, sequence, position in inputs.batch.rows:
        is_written[row_of(case, inputs, sequence, position), position % case.page_tokens] = True
    for index, (start, count) in enumerate(case.segments):
        last = start + count - 1
        is_free[row_of(case, inputs, len(case.decode_lens) + index, last), last % case.page_tokens + 1 :] = True
    return is_written, is_free


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_writes_every_token_and_nothing_else(case: AttentionCase) -> None:
    inputs = make_inputs(case, seed=1)
    before = jax.tree.map(np.array, poisoned(case, inputs))
    kernels = Kernels(implementation=Implementation.TPU, chip="v6e", interpret=interpreter.parameters())
    write = jax.jit(functools.partial(api.write_pages, kernels=kernels))
    after = interpreter.run_without_race(write, inputs.new, before, inputs.first_row, inputs.batch.meta)

    expected = jax.tree.map(np.array, before)
    for token, sequence, position in inputs.batch.rows:
        row, offset = row_of(case, inputs, sequence, position), position % case.page_tokens
        expected.pages_RKWC[row, :, offset] = inputs.new.kv_TKC[token]
        if expected.scale_RK2W is not None:
            expected.scale_RK2W[row, :, :, offset] = inputs.new.scale_TK2[token]
    is_written, is_free = may_change(case, inputs)
    assert is_written.sum() == len(inputs.batch.rows)
    for out, wanted in zip(leaves(after), leaves(expected), strict=True):
        np.testing.assert_array_equal(out[~is_free], wanted[~is_free])


def test_blocks_that_are_no_whole_pages_are_refused() -> None:
    inputs = make_inputs(replace(MIXED, block_tokens=24), seed=1)
    kernels = Kernels(implementation=Implementation.TPU, chip="v6e")
    with pytest.raises(UnsupportedCase, match="query blocks of 24 tokens are no whole pages of 16"):
        jax.eval_shape(
            functools.partial(api.write_pages, kernels=kernels), inputs.new, inputs.pool, 0, inputs.batch.meta
        )


def test_tiles_are_32_bytes_of_rows() -> None:
    assert [tile_rows(jnp.dtype(dtype)) for dtype in ("float32", "bfloat16", "int8", "float8_e5m2")] == [8, 16, 32, 32]


def test_the_grid_fills_the_queue() -> None:
    pages = [sum(-(-count // case.page_tokens) for _, count in case.segments) for case in CASES]
    assert max(pages) > PAGES_IN_FLIGHT
