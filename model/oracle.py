"""A slow reference decoder: the whole sequence at once, no cache, float32. For tests only.

Shares nothing with ``decoder.py`` but the specs. It states the computation with products and sums that anyone can check
against the papers; where the served path differs from it, the served path is wrong.
Source: Touvron et al. 2023 (Llama); Ainslie et al. 2023 (grouped queries); Su et al. 2021 (rotary positions), with the
pairing (i, i + H/2) of transformers.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from headrace.model.config import ModelConfig
from headrace.model.weights import LayerWeights, Weights

Leaf = jax.Array


def logits_SV(weights: Weights[Leaf], cfg: ModelConfig, token_ids: Sequence[int]) -> jax.Array:
    """Logits after each token of one sequence.

    Args:
      weights: arrays (of any float type; used as float32). token_ids: S >= 1 ids in [0, vocab_size).
    Returns: float32 [S, V]; row s scores the token at position s + 1.
    Raises: ValueError if token_ids is empty or an id is out of range (JAX would clamp it silently).
    """
    if not token_ids or not all(0 <= token < cfg.vocab_size for token in token_ids):
        raise ValueError(f"token_ids must be one or more ids below {cfg.vocab_size}")
    with jax.default_matmul_precision("highest"):
        x_SD = jnp.asarray(weights.embed_VD)[jnp.asarray(token_ids)].astype(jnp.float32)
        for layer in weights.layers:
            x_SD = _layer(layer, cfg, x_SD)
        x_SD = _rms_norm(x_SD, weights.final_norm_D, cfg.rms_norm_eps)
        if weights.head_DV is None:
            return jnp.einsum("SD,VD->SV", x_SD, _f32(weights.embed_VD))
        return jnp.einsum("SD,DV->SV", x_SD, _f32(weights.head_DV))


def _f32(x: Leaf) -> jax.Array:
    return jnp.asarray(x, jnp.float32)


def _rms_norm(x_SD: jax.Array, scale_D: Leaf, eps: float) -> jax.Array:
    return x_SD / jnp.sqrt(jnp.mean(x_SD**2, axis=-1, keepdims=True) + eps) * _f32(scale_D)


# Compiled as one program, since operation by operation a new length costs some 30 compilations.
@functools.partial(jax.jit, static_argnums=1)
def _layer(w: LayerWeights[Leaf], cfg: ModelConfig, x_SD: jax.Array) -> jax.Array:
    a_SD = _rms_norm(x_SD, w.attn_norm_D, cfg.rms_norm_eps)
    H = cfg.head_dim
    q_DNH, k_DKH, v_DKH = (_f32(x).reshape(x.shape[0], -1, H) for x in (w.q_DX, w.k_DY, w.v_DY))
    q_SNH = _rotate(jnp.einsum("SD,DNH->SNH", a_SD, q_DNH), cfg.rope_theta)
    k_SKH = _rotate(jnp.einsum("SD,DKH->SKH", a_SD, k_DKH), cfg.rope_theta)
    v_SKH = jnp.einsum("SD,DKH->SKH", a_SD, v_DKH)
    o_NHD = _f32(w.o_XD).reshape(-1, H, w.o_XD.shape[1])
    x_SD = x_SD + jnp.einsum("SNH,NHD->SD", _attend(q_SNH, k_SKH, v_SKH), o_NHD)
    m_SD = _rms_norm(x_SD, w.ffn_norm_D, cfg.rms_norm_eps)
    gate_SF, up_SF = m_SD @ _f32(w.gate_DF), m_SD @ _f32(w.up_DF)
    return x_SD + (gate_SF * jax.nn.sigmoid(gate_SF) * up_SF) @ _f32(w.down_FD)


def _rotate(x_SNH: jax.Array, theta: float) -> jax.Array:
    """Rotate each pair (i, i + H/2) of a head by position * theta ** (-2 i / H), as complex numbers."""
    S, _, H = x_SNH.shape
    half = H // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    turn_S1h = jnp.exp(1j * (jnp.arange(S, dtype=jnp.float32)[:, None] * frequency))[:, None, :]
    z_SNh = (x_SNH[..., :half] + 1j * x_SNH[..., half:]) * turn_S1h
    return jnp.concatenate([z_SNh.real, z_SNh.imag], axis=-1)


def _attend(q_SNH: jax.Array, k_SKH: jax.Array, v_SKH: jax.Array) -> jax.Array:
    """Causal attention; query head n reads key head n // G."""
    S, N, H = q_SNH.shape
    G = N // k_SKH.shape[1]
    k_SNH, v_SNH = jnp.repeat(k_SKH, G, axis=1), jnp.repeat(v_SKH, G, axis=1)
    scores_NQS = jnp.einsum("QNH,SNH->NQS", q_SNH, k_SNH) / jnp.sqrt(jnp.float32(H))
    causal_QS = jnp.arange(S)[:, None] >= jnp.arange(S)
    p_NQS = jax.nn.softmax(jnp.where(causal_QS, scores_NQS, -jnp.inf), axis=-1)
    return jnp.einsum("NQS,SNH->QNH", p_NQS, v_SNH)
