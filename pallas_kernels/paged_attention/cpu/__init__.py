"""Rotary attention on CPU: one custom call turns queries and keys, stores keys and values, and attends to pages."""

import jax
import jax.numpy as jnp
import numpy as np

from headrace.pallas_kernels.native import library
from headrace.pallas_kernels.types import AttentionSpec, AttnMeta, Kernels, KVPool, UnsupportedCase

TARGET = "HeadraceRotaryAttention"
MAX_HEAD_DIM = 256
MAX_GROUP = 256
"""Query heads of a key head; a tile of one token must fit a thread's memory."""
WIDTH_STEP = 8
"""Of head width and page size: eight values of eight tokens are transposed at once."""
STORED = ("float32", "bfloat16", "int8")


def rotary_attention(
    qkv_TX: jax.Array,
    cos_TH: jax.Array,
    sin_TH: jax.Array,
    pool: KVPool,
    first_row: jax.Array | int,
    meta: AttnMeta,
    spec: AttentionSpec,
    sinks_N: jax.Array | None,
    kernels: Kernels,
) -> tuple[jax.Array, KVPool]:
    """See ``headrace.pallas_kernels.api.rotary_attention``.

    Padding rows and the padding tokens of a block give 0 and write nothing. An index that is out of range ends the
    program with an error (INVALID_ARGUMENT) that names it, before anything is written.
    """
    if spec.window is not None and spec.window < 1:
        raise UnsupportedCase(f"a window of {spec.window} tokens; 1 or more, or None")
    num_heads = _checked_heads(qkv_TX, cos_TH, sin_TH, pool, meta, sinks_N)
    library.load()
    empty = jnp.zeros((0,), jnp.float32)
    scale = empty if pool.scale_RK2W is None else pool.scale_RK2W
    result = jax.ShapeDtypeStruct((qkv_TX.shape[0], num_heads * pool.head_dim), jnp.float32)
    call = jax.ffi.ffi_call(
        TARGET,
        (result, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (pool.pages_RKWC, scale))),
        input_output_aliases={3: 1, 4: 2},
        vmap_method="sequential",
    )
    out, pages, scale = call(
        qkv_TX,
        cos_TH,
        sin_TH,
        pool.pages_RKWC,
        scale,
        empty if sinks_N is None else sinks_N.astype(jnp.float32),
        jnp.asarray(first_row, jnp.int32).reshape(1),
        *_plan_arrays(meta),
        scale=np.float32(spec.scale),
        window=np.int32(spec.window or 0),
        soft_cap=np.float32(spec.soft_cap or 0),
    )
    return out, pool.replace(pages_RKWC=pages, scale_RK2W=None if pool.scale_RK2W is None else scale)


def _plan_arrays(meta: AttnMeta) -> tuple[jax.Array, ...]:
    arrays = (
        meta.position_B, meta.page_table_ZM, meta.kv_len_Z, meta.blk_seq_J, meta.blk_pos_J, meta.blk_len_J
    )  # fmt: skip
    return tuple(jnp.asarray(x, jnp.int32) for x in arrays)


def _checked_heads(
    qkv_TX: jax.Array, cos_TH: jax.Array, sin_TH: jax.Array, pool: KVPool, meta: AttnMeta, sinks_N: jax.Array | None
) -> int:
    """Query heads. Raises: UnsupportedCase."""
    width, num_kv_heads = pool.head_dim, pool.num_kv_heads
    if pool.dtype.name not in STORED:
        raise UnsupportedCase(f"a pool of {pool.dtype}; on CPU it can be {', '.join(STORED)}")
    if pool.bits_of is not None and (pool.bits_of != "bfloat16" or pool.pages_RKWC.dtype != jnp.uint16):
        raise UnsupportedCase(f"{pool.bits_of} held as {pool.pages_RKWC.dtype}; on CPU it can be bfloat16 as uint16")
    if (pool.scale_RK2W is not None) != (pool.dtype == jnp.int8):
        raise UnsupportedCase(f"a pool of {pool.dtype} with scales" if pool.scale_RK2W is not None else "int8 unscaled")
    if width % WIDTH_STEP or not 0 < width <= MAX_HEAD_DIM:
        raise UnsupportedCase(f"heads of {width}; a multiple of {WIDTH_STEP} up to {MAX_HEAD_DIM}")
    if pool.page_tokens % WIDTH_STEP:
        raise UnsupportedCase(f"pages of {pool.page_tokens} tokens; a multiple of {WIDTH_STEP}")
    if qkv_TX.dtype != jnp.float32 or cos_TH.dtype != jnp.float32 or sin_TH.dtype != jnp.float32:
        raise UnsupportedCase(f"projections of {qkv_TX.dtype}, angles of {cos_TH.dtype}; float32")
    num_tokens, columns = qkv_TX.shape
    num_heads = columns // width - 2 * num_kv_heads
    if columns % width or num_heads < 1 or num_heads % num_kv_heads or num_heads // num_kv_heads > MAX_GROUP:
        raise UnsupportedCase(
            f"projections of {columns} values do not hold heads of {width} for {num_kv_heads} key heads"
        )
    if cos_TH.shape != (num_tokens, width // 2) or sin_TH.shape != cos_TH.shape:
        raise UnsupportedCase(f"angles of shape {cos_TH.shape} for {num_tokens} tokens and heads of {width}")
    blocks = meta.num_blocks * meta.block_tokens(num_tokens)
    if meta.num_decode_rows + blocks != num_tokens:
        raise UnsupportedCase(f"{num_tokens} tokens for {meta.num_decode_rows} rows and {meta.num_blocks} equal blocks")
    if sinks_N is not None and sinks_N.shape != (num_heads,):
        raise UnsupportedCase(f"sinks of shape {sinks_N.shape} for {num_heads} query heads")
    return num_heads
