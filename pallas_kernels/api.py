"""One public function per operation. The implementation is an explicit choice; none falls back to another."""

import jax

from headrace.pallas_kernels.paged_attention import reference as paged_attention_reference
from headrace.pallas_kernels.types import AttnMeta, Implementation, UnsupportedCase
from headrace.pallas_kernels.write_pages import reference as write_pages_reference


def paged_attention(
    q_TNH: jax.Array,
    pool_RKWC: jax.Array,
    first_row: jax.Array | int,
    meta: AttnMeta,
    *,
    scale: float,
    implementation: Implementation,
) -> jax.Array:
    """Causal attention of a mixed batch over paged keys and values, which already hold this step's tokens.

    Args:
      q_TNH: queries, rotated. N is a multiple of K; query head n reads key head n // (N / K).
      pool_RKWC: pages of all layers of one kind; the key of a head is [..., :H], its value [..., H:].
      first_row: row of page 0 of this layer (layer index times pages per layer).
      meta: see AttnMeta. Every index must be in range: the host validates plans, nothing is checked here.
      scale: factor on the scores.
      implementation: which kernel runs.

    Returns:
      float32 [T, N, H]. Rows of padding are finite where the pages of the sequence are; a decode row with kv_len 0
      gives 0. What a row gives does not depend on the other rows, bit for bit, nor do unwritten or stale parts of
      pages change it, NaN included.

    Raises:
      UnsupportedCase: the implementation cannot run these shapes.
    """
    if q_TNH.shape[1] % pool_RKWC.shape[1]:
        raise UnsupportedCase(f"{q_TNH.shape[1]} query heads are not a multiple of {pool_RKWC.shape[1]} key heads")
    if pool_RKWC.shape[3] != 2 * q_TNH.shape[2]:
        raise UnsupportedCase(f"pool rows of {pool_RKWC.shape[3]} values do not hold two heads of {q_TNH.shape[2]}")
    match implementation:
        case Implementation.REFERENCE:
            return paged_attention_reference.paged_attention(q_TNH, pool_RKWC, first_row, meta, scale=scale)


def write_pages(
    pool_RKWC: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    first_row: jax.Array | int,
    meta: AttnMeta,
    *,
    implementation: Implementation,
) -> jax.Array:
    """Store keys and values of a mixed batch; with a donated pool this happens in place.

    A decode row writes one token. A query block writes whole pages, also behind its last real token (the tail of a
    page is overwritten later, and is masked until then); pages without a real token go to the null page, as do padding
    rows.

    Args and errors: as paged_attention.
    """
    match implementation:
        case Implementation.REFERENCE:
            return write_pages_reference.write_pages(pool_RKWC, k_TKH, v_TKH, first_row, meta)
