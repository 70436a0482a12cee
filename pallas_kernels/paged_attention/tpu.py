"""Paged attention on TPU: whole pages are written, then one kernel serves decode rows and one serves query blocks.

All of them thread the same donated pool. Decode comes before prefill: its write in place would otherwise have to wait
for a reader of the old pool, and the compiler might copy the pool instead.
"""

import jax
import jax.numpy as jnp

from headrace.pallas_kernels.paged_attention.tpu_decode import decode
from headrace.pallas_kernels.paged_attention.tpu_prefill import prefill
from headrace.pallas_kernels.types import AttentionSpec, AttnMeta, Kernels, KVPool, TokenKV
from headrace.pallas_kernels.write_pages.tpu import write_blocks


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
    rows, parts = meta.num_decode_rows, []
    if meta.num_blocks:
        pool = write_blocks(new.rows(rows), pool, first_row, meta, kernels)
    if rows:
        out, pool = decode(q_TNH[:rows], new.rows(0, rows), pool, first_row, meta, spec, sinks_N, kernels)
        parts.append(out)
    if meta.num_blocks:
        out = prefill(q_TNH[rows:], pool, first_row, meta, spec, sinks_N, kernels)
        parts.append(out.astype(q_TNH.dtype))
    return (jnp.concatenate(parts) if len(parts) > 1 else parts[0]), pool
