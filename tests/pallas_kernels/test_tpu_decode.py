"""TPU decode in the TPU interpreter, which looks for races, fills memory with NaN and refuses to read outside."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.pallas_kernels import api
from headrace.pallas_kernels.paged_attention.cases import GEMMA_3_270M, SMOLLM2, AttentionCase
from headrace.pallas_kernels.paged_attention.decode_blocks import DecodeBlocks
from headrace.pallas_kernels.paged_attention.inputs import (
    AttentionInputs,
    expected,
    make_inputs,
    poisoned,
    stored_after,
)
from headrace.pallas_kernels.tolerances import relative_error, tolerance
from headrace.pallas_kernels.types import Implementation, Kernels, KVPool
from tests.pallas_kernels import interpreter

STRICT = interpreter.parameters()
LLAMA_LIKE = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "page_tokens": 32}
CASES = (
    AttentionCase(name="page borders", **SMOLLM2, decode_lens=(1, 15, 16, 17, 0, 33, 64, 65)),
    AttentionCase(name="one row", **SMOLLM2, decode_lens=(40,)),
    AttentionCase(name="no live row", **SMOLLM2, decode_lens=(0, 0, 0)),
    AttentionCase(name="shared pages", **SMOLLM2, decode_lens=(50, 65, 33, 49), shared_pages=2),
    AttentionCase(name="window edges", **GEMMA_3_270M, window=32, decode_lens=(1, 31, 32, 33, 34, 48, 49, 80)),
    AttentionCase(name="window of one token", **SMOLLM2, window=1, decode_lens=(1, 16, 17, 40)),
    AttentionCase(
        name="window, cap and sinks",
        num_heads=16,
        num_kv_heads=8,
        head_dim=64,
        page_tokens=16,
        soft_cap=5.0,
        window=20,
        has_sinks=True,
        decode_lens=(30, 1, 0, 16),
    ),
    *(
        AttentionCase(name=f"llama, {kv_dtype}", **LLAMA_LIKE, kv_dtype=kv_dtype, decode_lens=(0, 1, 32, 33, 34, 100))
        for kv_dtype in ("bfloat16", "int8", "float8_e5m2", "float8_e4m3fn")
    ),
    *(
        AttentionCase(
            name=f"three heads of 64, window, {kv_dtype}",
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            page_tokens=32,
            window=40,
            q_dtype="bfloat16",
            kv_dtype=kv_dtype,
            has_sinks=True,
            decode_lens=(41, 72, 97),
        )
        for kv_dtype in ("bfloat16", "int8", "float8_e5m2")
    ),
    AttentionCase(
        name="pages of 128",
        num_heads=2,
        num_kv_heads=1,
        head_dim=256,
        page_tokens=128,
        kv_dtype="int8",
        decode_lens=(129, 300),
    ),
)
BLOCKS = DecodeBlocks(block_pages=2, group=2)


@functools.cache
def _run(kernels: Kernels):
    return jax.jit(functools.partial(api.paged_attention, kernels=kernels), static_argnames="spec")


def kernels(blocks: DecodeBlocks | None = BLOCKS, interpret: object = STRICT, chip: str | None = None) -> Kernels:
    explicit = () if blocks is None else (blocks,)
    return Kernels(implementation=Implementation.TPU, chip=chip, interpret=interpret, blocks=explicit)


def attend(inputs: AttentionInputs, pool: KVPool, with_kernels: Kernels) -> tuple[np.ndarray, KVPool]:
    arguments = replace(inputs, pool=pool).arguments()
    run = _run(with_kernels)
    if with_kernels.interpret is True:
        return jax.tree.map(np.asarray, run(*arguments, sinks_N=inputs.sinks_N))
    return interpreter.run_without_race(run, *arguments, sinks_N=inputs.sinks_N)


def check(case: AttentionCase, with_kernels: Kernels) -> None:
    inputs = make_inputs(case, seed=3)
    before = poisoned(case, inputs)
    out, pool = attend(inputs, before, with_kernels)
    assert out.dtype == case.q_dtype
    bound = tolerance(jnp.float32 if case.kv_dtype == case.q_dtype == "float32" else jnp.bfloat16)
    live = [token for token, _, _ in inputs.batch.rows]
    assert relative_error(out[live], expected(case, inputs)) < bound
    padding = sorted(set(range(len(out))) - set(live))
    np.testing.assert_array_equal(out[padding].astype(np.float32), 0)
    check_pool(case, inputs, before, pool)


def check_pool(case: AttentionCase, inputs: AttentionInputs, before: KVPool, pool: KVPool) -> None:
    """Bit for bit what it was, with this step's tokens in it."""
    after = stored_after(case, replace(inputs, pool=before))
    bits = lambda array: array.view(f"u{array.dtype.itemsize}")  # noqa: E731
    np.testing.assert_array_equal(bits(pool.pages_RKWC), bits(after.pages_RKWC))
    if after.scale_RK2W is not None:
        np.testing.assert_array_equal(bits(pool.scale_RK2W), bits(after.scale_RK2W))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_dense_attention_and_stores_the_tokens(case: AttentionCase) -> None:
    check(case, kernels())
