import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.pallas_kernels import api
from headrace.pallas_kernels.batch_case import Batch, BatchCase, make_batch
from headrace.pallas_kernels.paged_attention import reference
from headrace.pallas_kernels.paged_attention.cases import CASES
from headrace.pallas_kernels.types import Implementation, UnsupportedCase

LAYERS, LAYER, SCALE = 2, 1, 0.11


@functools.cache
def run(implementation: Implementation) -> Callable[..., jax.Array]:
    return jax.jit(functools.partial(api.paged_attention, scale=SCALE, implementation=implementation))


def pool_for(case: BatchCase, batch: Batch, seed: int) -> np.ndarray:
    shape = (LAYERS * batch.num_pages, case.num_kv_heads, case.page_tokens, 2 * case.head_dim)
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def queries(case: BatchCase, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((case.num_tokens, case.num_heads, case.head_dim), np.float32)


def attend(
    case: BatchCase, batch: Batch, q: np.ndarray, pool: np.ndarray, implementation: Implementation
) -> np.ndarray:
    return np.asarray(run(implementation)(q, pool, LAYER * batch.num_pages, batch.meta))


def dense(
    case: BatchCase, batch: Batch, q: np.ndarray, pool: np.ndarray, sequence: int, token: int, position: int
) -> np.ndarray:
    """Attention of one token, in float64, over keys gathered one by one."""
    group = case.num_heads // case.num_kv_heads
    rows = LAYER * batch.num_pages + batch.meta.page_table_ZM[sequence]
    kv = pool[rows].swapaxes(1, 2).reshape(-1, case.num_kv_heads, 2 * case.head_dim)[: position + 1].astype(np.float64)
    out = np.empty((case.num_heads, case.head_dim))
    for head in range(case.num_heads):
        score = kv[:, head // group, : case.head_dim] @ q[token, head].astype(np.float64) * SCALE
        weight = np.exp(score - score.max())
        out[head] = weight @ kv[:, head // group, case.head_dim :] / weight.sum()
    return out


@pytest.mark.parametrize("implementation", list(Implementation))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
class TestCases:
    def test_equals_dense_attention(self, case: BatchCase, implementation: Implementation) -> None:
        batch = make_batch(case, seed=3)
        q, pool = queries(case, 4), pool_for(case, batch, 5)
        out = attend(case, batch, q, pool, implementation)
        assert out.dtype == np.float32
        for token, sequence, position in batch.rows:
            expected = dense(case, batch, q, pool, sequence, token, position)
            np.testing.assert_allclose(out[token], expected, atol=2e-6, rtol=2e-5)

    def test_nan_outside_the_sequence_changes_no_bit(self, case: BatchCase, implementation: Implementation) -> None:
        batch = make_batch(case, seed=3)
        q, pool = queries(case, 4), pool_for(case, batch, 5)
        clean = attend(case, batch, q, pool, implementation)
        poisoned = np.full_like(pool, np.nan)
        for sequence, length in enumerate(case.kv_lens):
            for position in range(length):
                row = LAYER * batch.num_pages + batch.meta.page_table_ZM[sequence, position // case.page_tokens]
                offset = position % case.page_tokens
                poisoned[row, :, offset] = pool[row, :, offset]
        tokens = [token for token, _, _ in batch.rows]
        np.testing.assert_array_equal(attend(case, batch, q, poisoned, implementation)[tokens], clean[tokens])

    def test_padding_is_finite(self, case: BatchCase, implementation: Implementation) -> None:
        batch = make_batch(case, seed=3)
        assert np.isfinite(attend(case, batch, queries(case, 4), pool_for(case, batch, 5), implementation)).all()


class TestBatchMates:
    case = BatchCase(
        name="mates",
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        page_tokens=16,
        decode_lens=(30, 90, 64, 5, 17, 130, 1, 77),
        segments=((0, 40), (32, 20)),
    )

    def test_a_row_is_bit_equal_whatever_its_neighbours_hold(self) -> None:
        """Neighbours of other lengths make the loops run longer; a masked block must be an exact no-op."""
        batch = make_batch(self.case, seed=3)
        q, pool = queries(self.case, 4), pool_for(self.case, batch, 5)
        full = attend(self.case, batch, q, pool, Implementation.REFERENCE)
        lens = np.asarray(batch.meta.kv_len_Z)
        for row in range(len(self.case.decode_lens)):
            alone = np.where(np.arange(len(lens)) == row, lens, 0).astype(np.int32)
            meta = batch.meta.replace(kv_len_Z=alone, blk_len_J=np.zeros_like(batch.meta.blk_len_J))
            out = attend(self.case, replace(batch, meta=meta), q, pool, Implementation.REFERENCE)
            np.testing.assert_array_equal(out[row], full[row])

    def test_a_row_is_bit_equal_in_every_place(self) -> None:
        """Rows are grouped in fours; the place of a row, and so its group, must not matter."""
        case = replace(self.case, segments=())
        batch = make_batch(case, seed=3)
        q, pool = queries(case, 4), pool_for(case, batch, 5)
        full = attend(case, batch, q, pool, Implementation.REFERENCE)
        order = np.random.default_rng(6).permutation(len(case.decode_lens))
        meta = batch.meta.replace(
            position_B=batch.meta.position_B[order],
            page_table_ZM=batch.meta.page_table_ZM[order],
            kv_len_Z=batch.meta.kv_len_Z[order],
        )
        out = attend(case, replace(batch, meta=meta), q[order], pool, Implementation.REFERENCE)
        np.testing.assert_array_equal(out, full[order])

    def test_nan_of_one_sequence_stays_there(self) -> None:
        batch = make_batch(self.case, seed=3)
        q, pool = queries(self.case, 4), pool_for(self.case, batch, 5)
        clean = attend(self.case, batch, q, pool, Implementation.REFERENCE)
        victim = LAYER * batch.num_pages + batch.meta.page_table_ZM[2, 0]
        pool[victim] = np.nan
        out = attend(self.case, batch, q, pool, Implementation.REFERENCE)
        assert np.isnan(out[2]).any()
        others = [token for token, sequence, _ in batch.rows if sequence != 2]
        np.testing.assert_array_equal(out[others], clean[others])


def test_cost_follows_the_real_length() -> None:
    """The loop's bound is an input: one compiled program, and no shape of the context in it."""
    case = BatchCase(name="long", num_heads=2, num_kv_heads=1, head_dim=8, page_tokens=16, decode_lens=(4096,))
    batch = make_batch(case, seed=3)
    q, pool = queries(case, 4), pool_for(case, batch, 5)
    compiled = run(Implementation.REFERENCE).lower(q, pool, 0, batch.meta).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4096 * 4 * reference.ROW_GROUP


def test_refuses_heads_that_do_not_divide() -> None:
    case = CASES[0]
    batch = make_batch(case, seed=3)
    q = jnp.zeros((case.num_tokens, 8, case.head_dim))
    with pytest.raises(UnsupportedCase, match="8 query heads are not a multiple of 3 key heads"):
        api.paged_attention(
            q, pool_for(case, batch, 5), 0, batch.meta, scale=1.0, implementation=Implementation.REFERENCE
        )


def test_refuses_pages_of_another_head_size() -> None:
    case = CASES[0]
    batch = make_batch(case, seed=3)
    q = jnp.zeros((case.num_tokens, case.num_heads, 32))
    with pytest.raises(UnsupportedCase, match="128 values do not hold two heads of 32"):
        api.paged_attention(
            q, pool_for(case, batch, 5), 0, batch.meta, scale=1.0, implementation=Implementation.REFERENCE
        )
