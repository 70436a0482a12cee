"""What the GPU kernels of paged attention share: their limits, one block of keys and values, one softmax step."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from headrace.pallas_kernels.paged_attention.online_softmax import LOG2_E
from headrace.pallas_kernels.types import AttentionSpec, KVPool, UnsupportedCase

Array = jax.Array

SMALLEST_DOT = 16
"""Rows that Triton's dot needs at least."""
MULTIPROCESSORS = 132
"""Of an H100 SXM and of an H200."""


def check_limits(pool: KVPool) -> None:
    """Raises: UnsupportedCase for shapes that Triton, or JAX's lowering to it, cannot run."""
    width, pages = pool.head_dim, pool.pages_RKWC
    if width & (width - 1) or not SMALLEST_DOT <= width <= 256:
        raise UnsupportedCase(f"heads of {width} values: the GPU kernels need a power of two from 16 to 256")
    if pages.dtype.itemsize == 1 and 2**31 < pages.size <= 2**32:
        # jax/_src/pallas/triton/lowering.py takes 64-bit offsets above 2^32 bytes and signed 32-bit ones below.
        raise UnsupportedCase(
            f"an 8-bit pool of {pages.size / 2**30:.2f} GiB: between 2 and 4 GiB Pallas Triton would address it with "
            "32-bit offsets that wrap; take fewer or more pages"
        )


def compute_dtype(q_dtype: jnp.dtype, pool: KVPool) -> jnp.dtype:
    """Type of the products: float32 where a query or a stored value has more than bfloat16 can hold."""
    is_wide = jnp.float32 in (jnp.dtype(q_dtype), pool.pages_RKWC.dtype)
    return jnp.dtype(jnp.float32 if is_wide else jnp.bfloat16)


def padded_rows(rows: int) -> int:
    """The power of two, 16 or more, that holds so many rows."""
    return max(SMALLEST_DOT, 1 << (rows - 1).bit_length())


def dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """float32 product over one axis of each; float32 inputs keep all their bits."""
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def attend_block(
    state: tuple[Array, Array, Array],
    q_XH: Array,
    pool: KVPool,
    table_ref: Array,
    place: tuple[Array, Array, Array],
    position_Y: Array,
    live: tuple[Array, Array],
    is_seen_XY: Array,
    spec: AttentionSpec,
) -> tuple[Array, Array, Array]:
    """One step of the online softmax (arXiv:1805.02867), in powers of two, over one block of keys of one head.

    state: running maximum [X], sum [X], weighted values [X, H]. q_XH: in the type of the products. pool: of
    references. place: first row of the layer, row of the table, key head. live: first and last position that any
    query sees; keys outside are loaded from inside it, so that a page's last tenant is never read: it may hold NaN,
    and 0 * NaN is not 0. (Masked loads have no rule in Pallas' interpreter.) is_seen_XY: what each query sees.
    """
    top_X, total_X, acc_XH = state
    first_row, sequence, head = place
    width = pool.head_dim
    position_Y = jnp.clip(position_Y, *live)
    row_Y = first_row + table_ref[sequence, lax.div(position_Y, pool.page_tokens)]
    offset_Y = lax.rem(position_Y, pool.page_tokens)
    k_YH = pool.pages_RKWC[row_Y, head, offset_Y, pl.ds(0, width)].astype(q_XH.dtype)
    score = dot(q_XH, k_YH, (1, 1)) * spec.scale
    if pool.scale_RK2W is not None:
        score = score * pool.scale_RK2W[row_Y, head, 0, offset_Y][None, :]
    if spec.soft_cap is not None:
        score = spec.soft_cap * jnp.tanh(score / spec.soft_cap)
    score = jnp.where(is_seen_XY, score * LOG2_E, -jnp.inf)
    new_top_X = jnp.maximum(top_X, score.max(axis=1))
    factor_X = jnp.exp2(top_X - new_top_X)
    weight = jnp.exp2(score - new_top_X[:, None])
    total_X = total_X * factor_X + weight.sum(axis=1)
    if pool.scale_RK2W is not None:
        weight = weight * pool.scale_RK2W[row_Y, head, 1, offset_Y][None, :]
    v_YH = pool.pages_RKWC[row_Y, head, offset_Y, pl.ds(width, width)].astype(q_XH.dtype)
    acc_XH = acc_XH * factor_X[:, None] + dot(weight.astype(q_XH.dtype), v_YH, (1, 0))
    return new_top_X, total_X, acc_XH
