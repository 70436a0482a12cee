"""Rotary positions (arXiv:2104.09864), with the pairing of transformers: value i turns with value i + H/2."""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from headrace.model.config import ModelConfig
from headrace.model.rope_scaling import frequencies


@struct.dataclass
class Rotation:
    """Cosine and sine of each token's angles, float32 [T, H/2]; made once per step and used by every layer."""

    cos_TH: jax.Array
    sin_TH: jax.Array


def rotation(position_T: jax.Array, cfg: ModelConfig, *, is_fused: bool = True) -> Rotation:
    """Angles position · frequency. Frequencies are rounded once, from float64; angles are float32 like the
    reference's (at position 8,191 an angle is off by at most 5e-4). is_fused: XLA may fuse it into its uses, which it
    cannot where a kernel reads it."""
    frequency_H, factor = frequencies(cfg.head_dim, cfg.rope_theta, cfg.rope_scaling)
    angle_TH = position_T.astype(jnp.float32)[:, None] * frequency_H
    if not is_fused:
        return Rotation(cos_TH=jnp.cos(angle_TH) * factor, sin_TH=jnp.sin(angle_TH) * factor)
    # XLA:CPU fuses cosine and sine into every use and computes them anew per layer and head (5% of a prefill step); it
    # honours no barrier there, but does not fuse through a product.
    once = jnp.eye(cfg.head_dim // 2) * factor
    return Rotation(
        cos_TH=jnp.dot(jnp.cos(angle_TH), once, precision=lax.Precision.HIGHEST),
        sin_TH=jnp.dot(jnp.sin(angle_TH), once, precision=lax.Precision.HIGHEST),
    )


def rotate(x_TNH: jax.Array, turn: Rotation) -> jax.Array:
    """x_TNH float32 [T, heads, H], turned by each token's angles."""
    low, high = jnp.split(x_TNH, 2, axis=-1)
    cos, sin = turn.cos_TH[:, None], turn.sin_TH[:, None]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
