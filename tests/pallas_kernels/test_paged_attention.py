import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.pallas_kernels import api
from headrace.pallas_kernels.paged_attention import reference
from headrace.pallas_kernels.paged_attention.cases import CASES, FLOAT32_CASES, SMOLLM2, AttentionCase
from headrace.pallas_kernels.paged_attention.inputs import (
    AttentionInputs,
    expected,
    make_inputs,
    poisoned,
    row_of,
    stored_after,
)
from headrace.pallas_kernels.tolerances import relative_error, tolerance
from headrace.pallas_kernels.types import AttnMeta, Implementation, Kernels, KVPool, UnsupportedCase

REFERENCE = Kernels()


@functools.cache
def run(kernels: Kernels) -> Callable[..., tuple[jax.Array, KVPool]]:
    return jax.jit(functools.partial(api.paged_attention, kernels=kernels), static_argnames="spec")


def attend(inputs: AttentionInputs, kernels: Kernels, pool: KVPool | None = None) -> np.ndarray:
    inputs = inputs if pool is None else replace(inputs, pool=pool)
    out, _ = run(kernels)(*inputs.arguments(), sinks_N=inputs.sinks_N)
    return np.asarray(out)


def real(inputs: AttentionInputs, out: np.ndarray) -> np.ndarray:
    return out[[token for token, _, _ in inputs.batch.rows]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
class TestReference:
    def test_equals_dense_attention(self, case: AttentionCase) -> None:
        inputs = make_inputs(case, seed=3)
        out = attend(inputs, REFERENCE)
        assert out.dtype == case.q_dtype
        assert relative_error(real(inputs, out), expected(case, inputs)) < tolerance(jnp.float32)

    def test_poison_outside_the_sequence_changes_no_bit(self, case: AttentionCase) -> None:
        inputs = make_inputs(case, seed=3)
        clean, dirty = attend(inputs, REFERENCE), attend(inputs, REFERENCE, poisoned(case, inputs))
        np.testing.assert_array_equal(real(inputs, dirty), real(inputs, clean))

    def test_padding_is_finite(self, case: AttentionCase) -> None:
        assert np.isfinite(attend(make_inputs(case, seed=3), REFERENCE)).all()

    def test_stores_this_steps_tokens(self, case: AttentionCase) -> None:
        inputs = make_inputs(case, seed=3)
        _, pool = run(REFERENCE)(*inputs.arguments(), sinks_N=inputs.sinks_N)
        after = stored_after(case, inputs)
        for _, sequence, position in inputs.batch.rows:
            row, offset = row_of(case, inputs, sequence, position), position % case.page_tokens
            np.testing.assert_array_equal(pool.pages_RKWC[row, :, offset], after.pages_RKWC[row, :, offset])
            if after.scale_RK2W is not None:
                np.testing.assert_array_equal(pool.scale_RK2W[row, :, :, offset], after.scale_RK2W[row, :, :, offset])


class TestBatchMates:
    case = AttentionCase(
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
        inputs = make_inputs(self.case, seed=3)
        full = attend(inputs, REFERENCE)
        lens = np.asarray(inputs.batch.meta.kv_len_Z)
        for row in range(len(self.case.decode_lens)):
            alone = np.where(np.arange(len(lens)) == row, lens, 0).astype(np.int32)
            blocks = np.zeros_like(inputs.batch.meta.blk_len_J)
            out = attend(_with_meta(inputs, inputs.batch.meta.replace(kv_len_Z=alone, blk_len_J=blocks)), REFERENCE)
            np.testing.assert_array_equal(out[row], full[row])

    def test_a_row_is_bit_equal_in_every_place(self) -> None:
        """Rows are grouped in fours; the place of a row, and so its group, must not matter."""
        inputs = make_inputs(replace(self.case, segments=()), seed=3)
        full = attend(inputs, REFERENCE)
        order = np.random.default_rng(6).permutation(len(self.case.decode_lens))
        meta = inputs.batch.meta
        moved = _with_meta(
            inputs,
            meta.replace(
                position_B=meta.position_B[order],
                page_table_ZM=meta.page_table_ZM[order],
                kv_len_Z=meta.kv_len_Z[order],
            ),
        )
        new = jax.tree.map(lambda x: x[order], inputs.new)
        out = attend(replace(moved, q_TNH=inputs.q_TNH[order], new=new), REFERENCE)
        np.testing.assert_array_equal(out, full[order])

    def test_nan_of_one_sequence_stays_there(self) -> None:
        inputs = make_inputs(self.case, seed=3)
        clean = attend(inputs, REFERENCE)
        pages = np.array(inputs.pool.pages_RKWC)
        pages[inputs.first_row + inputs.batch.meta.page_table_ZM[2, 0]] = np.nan
        out = attend(inputs, REFERENCE, KVPool(pages))
        assert np.isnan(out[2]).any()
        others = [token for token, sequence, _ in inputs.batch.rows if sequence != 2]
        np.testing.assert_array_equal(out[others], clean[others])


def _with_meta(inputs: AttentionInputs, meta: AttnMeta) -> AttentionInputs:
    return replace(inputs, batch=replace(inputs.batch, meta=meta))


def test_cost_follows_the_real_length() -> None:
    """The loop's bound is an input: one compiled program, and no shape of the context in it."""
    case = AttentionCase(name="long", num_heads=2, num_kv_heads=1, head_dim=8, page_tokens=16, decode_lens=(4096,))
    inputs = make_inputs(case, seed=3)
    jitted = jax.jit(
        functools.partial(api.paged_attention, kernels=REFERENCE), static_argnames="spec", donate_argnames="pool"
    )
    compiled = jitted.lower(*jax.tree.map(jnp.asarray, inputs.arguments()[:3]), *inputs.arguments()[3:]).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4096 * 4 * reference.ROW_GROUP


class TestRefusals:
    case = AttentionCase(name="refusals", **SMOLLM2, decode_lens=(20,))

    def test_heads_that_do_not_divide(self) -> None:
        inputs = make_inputs(self.case, seed=3)
        with pytest.raises(UnsupportedCase, match="8 query heads are not a multiple of 3 key heads"):
            attend(replace(inputs, q_TNH=inputs.q_TNH[:, :8]), REFERENCE)

    def test_pages_of_another_head_size(self) -> None:
        inputs = make_inputs(self.case, seed=3)
        with pytest.raises(UnsupportedCase, match="128 values do not hold two heads of 32"):
            attend(replace(inputs, q_TNH=inputs.q_TNH[:, :, :32]), REFERENCE)

    def test_tokens_of_another_type(self) -> None:
        inputs = make_inputs(self.case, seed=3)
        pages = inputs.pool.pages_RKWC.astype(jnp.bfloat16)
        with pytest.raises(UnsupportedCase, match="tokens of float32 do not go into a pool of bfloat16"):
            attend(inputs, REFERENCE, KVPool(pages))

    def test_8_bit_pages_without_scales(self) -> None:
        inputs = make_inputs(replace(self.case, kv_dtype="int8"), seed=3)
        with pytest.raises(UnsupportedCase, match="a pool of int8 without scales"):
            attend(inputs, REFERENCE, KVPool(inputs.pool.pages_RKWC))


def test_every_border_is_in_the_grid() -> None:
    lens = {length for case in FLOAT32_CASES for length in case.decode_lens}
    assert {0, 1, 15, 16, 17} <= lens
    assert any(not case.decode_lens for case in FLOAT32_CASES)
    assert any(not case.segments for case in FLOAT32_CASES)
    assert {case.head_dim for case in FLOAT32_CASES} == {64, 128, 256}
    assert list(Implementation) == ["reference", "tpu", "gpu", "cpu"]
