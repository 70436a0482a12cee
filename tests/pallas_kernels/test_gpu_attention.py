"""Paged attention on GPU, in Pallas' plain interpreter: what the kernels compute. That they compile, in place and
within the chip's limits, is tests/aot's."""

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.pallas_kernels import api
from headrace.pallas_kernels.paged_attention.cases import GEMMA_3_270M, SMOLLM2, AttentionCase
from headrace.pallas_kernels.paged_attention.gpu_decode import GpuDecodeBlocks
from headrace.pallas_kernels.paged_attention.gpu_prefill import GpuPrefillBlocks
from headrace.pallas_kernels.paged_attention.inputs import (
    AttentionInputs,
    expected,
    make_inputs,
    poisoned,
    row_of,
    stored_after,
)
from headrace.pallas_kernels.tolerances import relative_error, tolerance
from headrace.pallas_kernels.types import Kernels, KVPool, UnsupportedCase
from tests.pallas_kernels.gpu_interpreter import FAST_COMPILE, GPU

pytestmark = pytest.mark.usefixtures("quick_compiles")

WIDE_CASES = (
    AttentionCase(name="three heads a key head, page borders", **SMOLLM2, decode_lens=(1, 15, 16, 17, 0, 130)),
    AttentionCase(
        name="mixed, padding everywhere",
        **SMOLLM2,
        decode_lens=(40, 0),
        segments=((0, 33), (64, 32), (48, 1)),
        padding_blocks=1,
    ),
    AttentionCase(
        name="one head a key head, prefill alone, long pages",
        num_heads=2,
        num_kv_heads=2,
        head_dim=128,
        page_tokens=128,
        segments=((0, 130), (128, 128)),
        block_tokens=128,
    ),
    AttentionCase(name="one key head", **GEMMA_3_270M, decode_lens=(100, 5), segments=((0, 40),)),
    AttentionCase(
        name="eight heads a key head, shared pages",
        num_heads=16,
        num_kv_heads=2,
        head_dim=64,
        page_tokens=16,
        decode_lens=(100, 65, 33, 90),
        segments=((64, 40), (32, 16)),
        shared_pages=2,
    ),
    AttentionCase(
        name="window at its edges",
        **GEMMA_3_270M,
        window=32,
        decode_lens=(1, 31, 32, 33, 34, 47, 48, 49, 160),
        segments=((0, 70), (96, 33)),
    ),
    AttentionCase(name="window of one token", **SMOLLM2, window=1, decode_lens=(1, 16, 17), segments=((64, 33),)),
    AttentionCase(
        name="soft cap, window and sinks",
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        page_tokens=32,
        soft_cap=5.0,
        window=48,
        has_sinks=True,
        decode_lens=(20, 90, 0),
        segments=((32, 50),),
    ),
)
TYPES = (
    ("bfloat16", "bfloat16"),
    ("float8_e4m3fn", "bfloat16"),
    ("int8", "bfloat16"),
    ("float8_e5m2", "float32"),
    ("float32", "bfloat16"),
)
STORED_CASES = tuple(
    replace(case, name=f"{case.name}, {kv_dtype} for {q_dtype}", kv_dtype=kv_dtype, q_dtype=q_dtype)
    for case, types in ((WIDE_CASES[1], TYPES[:3]), (WIDE_CASES[7], TYPES[2:]))
    for kv_dtype, q_dtype in types
)
SMALL_BLOCKS = replace(
    GPU,
    blocks=(
        GpuDecodeBlocks(keys=16, splits=5, num_warps=4, stages=3),
        GpuPrefillBlocks(rows=16, keys=32, num_warps=4, stages=2),
    ),
)


@functools.cache
def run(kernels: Kernels) -> Callable[..., tuple[jax.Array, KVPool]]:
    call = functools.partial(api.paged_attention, kernels=kernels)
    return jax.jit(call, static_argnames="spec", compiler_options=FAST_COMPILE)


def attend(inputs: AttentionInputs, pool: KVPool, kernels: Kernels = GPU) -> tuple[np.ndarray, KVPool]:
    out, pool = run(kernels)(*replace(inputs, pool=pool).arguments(), sinks_N=inputs.sinks_N)
    return np.asarray(out), jax.tree.map(np.asarray, pool)


def real(inputs: AttentionInputs, out: np.ndarray) -> np.ndarray:
    return out[[token for token, _, _ in inputs.batch.rows]]


@pytest.mark.parametrize("case", WIDE_CASES + STORED_CASES, ids=lambda case: case.name)
def test_equals_dense_attention_whatever_lies_around(case: AttentionCase) -> None:
    inputs = make_inputs(case, seed=3)
    out, pool = attend(inputs, poisoned(case, inputs))
    clean, _ = attend(inputs, inputs.pool)
    assert out.dtype == case.q_dtype
    assert relative_error(real(inputs, out), expected(case, inputs)) < tolerance(case.q_dtype)
    assert np.isfinite(np.asarray(out, np.float32)).all()
    np.testing.assert_array_equal(out, clean)
    for row, length in enumerate(case.decode_lens):
        assert length or not out[row].any(), "a row without tokens gives 0"
    after = stored_after(case, inputs)
    for _, sequence, position in inputs.batch.rows:
        row, offset = row_of(case, inputs, sequence, position), position % case.page_tokens
        np.testing.assert_array_equal(pool.pages_RKWC[row, :, offset], after.pages_RKWC[row, :, offset])
        if after.scale_RK2W is not None:
            np.testing.assert_array_equal(pool.scale_RK2W[row, :, :, offset], after.scale_RK2W[row, :, :, offset])


@pytest.mark.parametrize("case", [WIDE_CASES[index] for index in (0, 1, 5, 7)], ids=lambda case: case.name)
def test_more_splits_than_blocks_and_more_tiles_than_one(case: AttentionCase) -> None:
    inputs = make_inputs(case, seed=4)
    out, _ = attend(inputs, poisoned(case, inputs), SMALL_BLOCKS)
    assert relative_error(real(inputs, out), expected(case, inputs)) < tolerance(jnp.float32)


def test_a_row_is_bit_equal_whatever_its_neighbours_hold() -> None:
    case = AttentionCase(name="mates", **SMOLLM2, decode_lens=(30, 90, 17, 130), segments=((0, 40), (32, 20)))
    inputs = make_inputs(case, seed=3)
    full, _ = attend(inputs, inputs.pool)
    lens = inputs.batch.meta.kv_len_Z
    for row in (1, 2):
        alone = np.where(np.arange(len(lens)) == row, lens, 0).astype(np.int32)
        meta = inputs.batch.meta.replace(kv_len_Z=alone, blk_len_J=np.zeros_like(inputs.batch.meta.blk_len_J))
        out, _ = attend(replace(inputs, batch=replace(inputs.batch, meta=meta)), inputs.pool)
        np.testing.assert_array_equal(out[row], full[row])


class TestLimits:
    case = AttentionCase(name="limits", num_heads=2, num_kv_heads=1, head_dim=64, page_tokens=16, decode_lens=(20,))

    def trace(self, case: AttentionCase, rows: int | None = None) -> None:
        inputs = make_inputs(case, seed=3)
        pool = inputs.pool
        if rows is not None:
            pool = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), pool)
        meta, spec = inputs.batch.meta, inputs.spec
        call = functools.partial(api.paged_attention, spec=spec, kernels=GPU)
        jax.eval_shape(call, inputs.q_TNH, inputs.new, pool, inputs.first_row, meta)

    def test_heads_that_are_no_power_of_two(self) -> None:
        with pytest.raises(UnsupportedCase, match="heads of 80 values"):
            self.trace(replace(self.case, head_dim=80))

    @pytest.mark.parametrize("gib, is_refused", [(1.9, False), (2.1, True), (3.9, True), (4.1, False)])
    def test_8_bit_pools_that_the_lowering_addresses_wrongly(self, gib: float, is_refused: bool) -> None:
        rows = int(gib * 2**30) // (16 * 128)
        if is_refused:
            with pytest.raises(UnsupportedCase, match="between 2 and 4 GiB"):
                self.trace(replace(self.case, kv_dtype="int8"), rows)
        else:
            self.trace(replace(self.case, kv_dtype="int8"), rows)

    def test_wide_pools_of_any_size(self) -> None:
        self.trace(replace(self.case, kv_dtype="bfloat16"), int(3e9) // (16 * 128 * 2))
