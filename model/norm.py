"""Normalization."""

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x_TD: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x²) + eps) · scale over the last axis, in float32 (arXiv:1910.07467)."""
    x_TD = x_TD.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x_TD), axis=-1, keepdims=True)
    return x_TD * lax.rsqrt(mean_square + eps) * scale_D.astype(jnp.float32)
