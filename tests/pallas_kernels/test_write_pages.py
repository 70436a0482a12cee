import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.pallas_kernels import api
from headrace.pallas_kernels.batch_case import BatchCase, make_batch
from headrace.pallas_kernels.types import AttnMeta, Implementation
from headrace.pallas_kernels.write_pages.cases import CASES

LAYERS, LAYER = 3, 1


@pytest.mark.parametrize("implementation", list(Implementation))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_writes_every_token_and_nothing_else(case: BatchCase, implementation: Implementation) -> None:
    batch = make_batch(case, seed=1)
    rng = np.random.default_rng(2)
    shape = (LAYERS * batch.num_pages, case.num_kv_heads, case.page_tokens, 2 * case.head_dim)
    before = rng.standard_normal(shape, np.float32)
    k, v = rng.standard_normal((2, case.num_tokens, case.num_kv_heads, case.head_dim), np.float32)
    first_row = LAYER * batch.num_pages
    write = jax.jit(functools.partial(api.write_pages, implementation=implementation), donate_argnums=0)
    after = np.asarray(write(jnp.asarray(before), k, v, first_row, batch.meta))

    written = np.zeros(shape[:1] + shape[2:3], bool)
    for token, sequence, position in batch.rows:
        row = first_row + batch.meta.page_table_ZM[sequence, position // case.page_tokens]
        offset = position % case.page_tokens
        written[row, offset] = True
        np.testing.assert_array_equal(after[row, :, offset], np.concatenate([k[token], v[token]], axis=-1))
    # The rest of a page that a segment ends in may be overwritten, and the null page of this layer; nothing else.
    free_to_change = written.copy()
    free_to_change[first_row] = True
    for index, (start, count) in enumerate(case.segments):
        sequence, end = len(case.decode_lens) + index, start + count
        page = batch.meta.page_table_ZM[sequence, (end - 1) // case.page_tokens]
        free_to_change[first_row + page, (end - 1) % case.page_tokens :] = True
    kept = ~free_to_change
    np.testing.assert_array_equal(after.swapaxes(1, 2)[kept], before.swapaxes(1, 2)[kept])


@pytest.mark.parametrize("rows", [1, 4])
def test_a_donated_pool_is_written_in_place(rows: int) -> None:
    """A copy of the pool per layer would cost more than the whole step; seen when read and write were fused."""
    case = BatchCase(name="decode", num_heads=9, num_kv_heads=3, head_dim=64, page_tokens=16, decode_lens=(20,) * rows)
    batch = make_batch(case, seed=1, spare_pages=500)
    pool = jax.ShapeDtypeStruct((2 * batch.num_pages, 3, 16, 128), jnp.float32)
    k = jax.ShapeDtypeStruct((rows, 3, 64), jnp.float32)

    def two_layers(pool: jax.Array, k: jax.Array, v: jax.Array, meta: AttnMeta) -> tuple[jax.Array, jax.Array]:
        total = jnp.zeros((rows, 9, 64))
        for layer in range(2):
            first_row = layer * batch.num_pages
            pool = api.write_pages(pool, k, v, first_row, meta, implementation=Implementation.REFERENCE)
            q = jnp.repeat(k, 3, axis=1) + total
            total += api.paged_attention(q, pool, first_row, meta, scale=1.0, implementation=Implementation.REFERENCE)
            k = total[:, ::3]
        return pool, total

    compiled = jax.jit(two_layers, donate_argnums=0).lower(pool, k, k, batch.meta).compile()
    analysis = compiled.memory_analysis()
    pool_bytes = 4 * np.prod(pool.shape)
    assert analysis.alias_size_in_bytes >= pool_bytes
    assert analysis.temp_size_in_bytes < pool_bytes / 2
