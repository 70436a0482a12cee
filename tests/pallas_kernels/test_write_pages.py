import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.pallas_kernels import api
from headrace.pallas_kernels.batch_case import make_batch
from headrace.pallas_kernels.kv_quantization import to_pool
from headrace.pallas_kernels.paged_attention.cases import SMOLLM2, AttentionCase
from headrace.pallas_kernels.paged_attention.inputs import make_inputs, row_of
from headrace.pallas_kernels.types import AttentionSpec, AttnMeta, Kernels, KVPool
from headrace.pallas_kernels.write_pages.cases import CASES

REFERENCE = Kernels()
ALL_CASES = [
    replace(case, name=f"{case.name}, {dtype}", kv_dtype=dtype)
    for case in CASES
    for dtype in ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")
]


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.name)
def test_writes_every_token_and_nothing_else(case: AttentionCase) -> None:
    inputs = make_inputs(case, seed=1)
    write = jax.jit(functools.partial(api.write_pages, kernels=REFERENCE), donate_argnames="pool")
    pool = jax.tree.map(jnp.array, inputs.pool)
    after = jax.tree.map(np.asarray, write(inputs.new, pool, inputs.first_row, inputs.batch.meta))

    written = np.zeros((after.pages_RKWC.shape[0], case.page_tokens), bool)
    for token, sequence, position in inputs.batch.rows:
        row, offset = row_of(case, inputs, sequence, position), position % case.page_tokens
        written[row, offset] = True
        np.testing.assert_array_equal(after.pages_RKWC[row, :, offset], inputs.new.kv_TKC[token])
        if after.scale_RK2W is not None:
            np.testing.assert_array_equal(after.scale_RK2W[row, :, :, offset], inputs.new.scale_TK2[token])
    # The rest of a page that a segment ends in may be overwritten, and the null page of this layer; nothing else.
    free_to_change = written.copy()
    free_to_change[inputs.first_row] = True
    for index, (start, count) in enumerate(case.segments):
        last = start + count - 1
        row = row_of(case, inputs, len(case.decode_lens) + index, last)
        free_to_change[row, last % case.page_tokens :] = True
    kept = ~free_to_change
    np.testing.assert_array_equal(after.pages_RKWC.swapaxes(1, 2)[kept], inputs.pool.pages_RKWC.swapaxes(1, 2)[kept])
    if after.scale_RK2W is not None:
        tokens_first = (0, 3, 1, 2)
        np.testing.assert_array_equal(
            after.scale_RK2W.transpose(tokens_first)[kept], inputs.pool.scale_RK2W.transpose(tokens_first)[kept]
        )


@pytest.mark.parametrize("rows", [1, 4])
def test_a_donated_pool_is_written_in_place(rows: int) -> None:
    """A copy of the pool per layer would cost more than the whole step; seen when read and write were fused."""
    case = AttentionCase(name="decode", **SMOLLM2, decode_lens=(20,) * rows)
    batch = make_batch(case, seed=1, spare_pages=500)
    pool = KVPool(jax.ShapeDtypeStruct((2 * batch.num_pages, 3, 16, 128), jnp.float32))
    k = jax.ShapeDtypeStruct((rows, 3, 64), jnp.float32)

    def two_layers(pool: KVPool, k: jax.Array, v: jax.Array, meta: AttnMeta) -> tuple[KVPool, jax.Array]:
        total = jnp.zeros((rows, 9, 64))
        for layer in range(2):
            first_row = layer * batch.num_pages
            q, new = jnp.repeat(k, 3, axis=1) + total, to_pool(k, v, jnp.float32)
            spec = AttentionSpec(scale=1.0)
            out, pool = api.paged_attention(q, new, pool, first_row, meta, spec, kernels=REFERENCE)
            total += out
            k = total[:, ::3]
        return pool, total

    compiled = jax.jit(two_layers, donate_argnums=0).lower(pool, k, k, batch.meta).compile()
    analysis = compiled.memory_analysis()
    pool_bytes = 4 * np.prod(pool.pages_RKWC.shape)
    assert analysis.alias_size_in_bytes >= pool_bytes
    assert analysis.temp_size_in_bytes < pool_bytes / 2
