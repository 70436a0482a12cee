"""Paged attention on GPU through Pallas' Triton back end (deprecated since JAX 0.11, hence small and apart).

This step's tokens are written first, by XLA's scatter in place; then decode rows and query blocks each have a kernel.
"""

import jax
import jax.numpy as jnp

from headrace.pallas_kernels.paged_attention import gpu_pages
from headrace.pallas_kernels.paged_attention.gpu_decode import decode
from headrace.pallas_kernels.paged_attention.gpu_prefill import prefill
from headrace.pallas_kernels.types import AttentionSpec, AttnMeta, Kernels, KVPool, TokenKV
from headrace.pallas_kernels.write_pages.gpu import write_pages


def paged_attention(
    q_TNH: jax.Array,
    new: TokenKV,
    pool: KVPool,
    first_row: jax.Array | int,
    meta: AttnMeta,
    spec: AttentionSpec,
    sinks_N: jax.Array | None,
    kernels: Kernels,
) -> tuple[jax.Array, KVPool]:
    """See ``headrace.pallas_kernels.api.paged_attention``."""
    gpu_pages.check_limits(pool)
    pool = write_pages(new, pool, first_row, meta, kernels)
    rows, first_row_1 = meta.num_decode_rows, jnp.asarray(first_row, jnp.int32).reshape(1)
    parts = []
    if rows:
        parts.append(decode(q_TNH[:rows], pool, first_row_1, meta, spec, sinks_N, kernels))
    if meta.num_blocks:
        parts.append(prefill(q_TNH[rows:], pool, first_row_1, meta, spec, sinks_N, kernels))
    return (parts[0] if len(parts) == 1 else jnp.concatenate(parts)), pool
