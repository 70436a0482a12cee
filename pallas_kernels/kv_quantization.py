"""Keys and values in the type that the pool stores: as they are, or 8 bits with one factor per token and head.

Plain jnp in every implementation: XLA fuses it with the rotation of the keys. Kernels get tokens that are quantized
already, so that attention sees the same numbers whether a token was written in this step or long ago.
"""

import jax
import jax.numpy as jnp

from headrace.pallas_kernels.types import TokenKV, UnsupportedCase

LARGEST = {
    jnp.dtype(jnp.int8): 127.0,
    jnp.dtype(jnp.float8_e4m3fn): float(jnp.finfo(jnp.float8_e4m3fn).max),
    jnp.dtype(jnp.float8_e5m2): float(jnp.finfo(jnp.float8_e5m2).max),
}
"""Value that a token's largest element is scaled to, by stored type. -128 is not used: the range is symmetric."""


def is_quantized(dtype: jnp.dtype) -> bool:
    """Whether a pool of this type has scales. Raises: UnsupportedCase for types that no pool has."""
    if jnp.dtype(dtype) in LARGEST:
        return True
    if jnp.dtype(dtype) in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        return False
    raise UnsupportedCase(
        f"a KV pool of {jnp.dtype(dtype)}; it can be float32, bfloat16, {', '.join(map(str, LARGEST))}"
    )


def to_pool(k_TKH: jax.Array, v_TKH: jax.Array, dtype: jnp.dtype) -> TokenKV:
    """Keys (rotated) and values, side by side, in the pool's type."""
    if not is_quantized(dtype):
        return TokenKV(jnp.concatenate([k_TKH, v_TKH], axis=-1).astype(dtype))
    kv_TK2H = jnp.stack([k_TKH, v_TKH], axis=2).astype(jnp.float32)
    largest = LARGEST[jnp.dtype(dtype)]
    scale_TK2 = jnp.abs(kv_TK2H).max(axis=-1) / largest
    # A token of zeros has scale 0 and is divided by 1.
    level_TK2H = kv_TK2H / jnp.where(scale_TK2 > 0, scale_TK2, 1)[..., None]
    # Rounding may lift the largest element past the end of the range, which 8-bit floats would make NaN or infinity.
    level_TK2H = jnp.clip(level_TK2H, -largest, largest)
    if jnp.issubdtype(dtype, jnp.integer):
        level_TK2H = jnp.round(level_TK2H)
    tokens, heads, _, width = kv_TK2H.shape
    return TokenKV(level_TK2H.astype(dtype).reshape(tokens, heads, 2 * width), scale_TK2)
