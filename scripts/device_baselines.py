"""What a kernel's time is set against: XLA's own gather and dot, JAX's paged attention, cuDNN attention."""

import math

import jax
import jax.numpy as jnp

from headrace.pallas_kernels.types import AttnMeta, KVPool

Array = jax.Array


def gather_and_dot(q_BNH: Array, pool: KVPool, first_row: int, meta: AttnMeta, scale: float) -> Array:
    """Decode as XLA does it alone: gather all pages of the table, then two products and a masked softmax."""
    rows, heads, width = q_BNH.shape
    kv = pool.pages_RKWC[first_row + meta.page_table_ZM[:rows]].astype(q_BNH.dtype)
    if pool.scale_RK2W is not None:
        factor = pool.scale_RK2W[first_row + meta.page_table_ZM[:rows]].swapaxes(-1, -2)
        kv = kv * jnp.repeat(factor, width, axis=-1).astype(q_BNH.dtype)
    kv = kv.swapaxes(1, 2).reshape(rows, pool.num_kv_heads, -1, 2 * width)
    q = q_BNH.reshape(rows, pool.num_kv_heads, -1, width)
    score = jnp.einsum("bkgh,bksh->bkgs", q, kv[..., :width], preferred_element_type=jnp.float32) * scale
    is_seen = jnp.arange(kv.shape[2]) < meta.kv_len_Z[:rows, None]
    weight = jax.nn.softmax(jnp.where(is_seen[:, None, None], score, -1e30), axis=-1).astype(q.dtype)
    out = jnp.einsum("bkgs,bksh->bkgh", weight, kv[..., width:], preferred_element_type=jnp.float32)
    return out.reshape(rows, heads, width).astype(q_BNH.dtype)


def jax_paged_attention(q_BNH: Array, pages: tuple[Array, Array], lengths_B: Array, table_BM: Array) -> Array:
    """JAX's Triton kernel for decode; keys and values apart, [K, P, W, H] each. It has no scale argument.

    Raises: ImportError where this JAX has it no more.
    """
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    q_BNH = q_BNH * q_BNH.shape[-1] ** -0.5
    # The kernel wants the table's width to be a multiple of its splits.
    splits = math.gcd(table_BM.shape[1], 16)
    return paged_attention(
        q_BNH, *pages, table_BM, lengths_B, k_splits=splits, pages_per_compute_block=math.gcd(table_BM.shape[1], 8)
    )


def cudnn_decode(q_BNH: Array, kv_BSKC: Array, lengths_B: Array) -> Array:
    """cuDNN over contiguous keys and values (it cannot read a shared pool): a lower bound that skips the gather."""
    width = q_BNH.shape[-1]
    return jax.nn.dot_product_attention(
        q_BNH[:, None],
        kv_BSKC[..., :width],
        kv_BSKC[..., width:],
        key_value_seq_lengths=lengths_B,
        query_seq_lengths=jnp.ones_like(lengths_B),
        implementation="cudnn",
    )[:, 0]


def cudnn_prefill(q_BSNH: Array, k_BSKH: Array, v_BSKH: Array) -> Array:
    """Causal cuDNN attention over contiguous keys and values of equal length."""
    return jax.nn.dot_product_attention(q_BSNH, k_BSKH, v_BSKH, is_causal=True, implementation="cudnn")
