"""A slow reference decoder: the whole sequence at once, no cache, float32. For tests only.

Shares nothing with ``decoder.py`` but the specs. It states the computation with products and sums that anyone can check
against the papers; where the served path differs from it, the served path is wrong.
Source: Touvron et al. 2023 (Llama); Ainslie et al. 2023 (grouped queries); Su et al. 2021 (rotary positions), with the
pairing (i, i + H/2) of transformers; Peng et al. 2023 (YaRN); Jiang et al. 2024 (Mixtral); OpenAI 2025 (gpt-oss).
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from headrace.model.config import ModelConfig
from headrace.model.rope_scaling import Llama3Scaling, YarnScaling
from headrace.model.weights import LayerWeights, Weights
from headrace.pallas_kernels.types import GroupQuant

Leaf = jax.Array | GroupQuant


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
        embed_VD = _embedding(weights.embed_VD)
        x_SD = embed_VD[jnp.asarray(token_ids)].astype(jnp.float32)
        for index, layer in enumerate(weights.layers):
            x_SD = _layer(layer, cfg, x_SD, cfg.layer_windows[index % len(cfg.layer_windows)])
        x_SD = _rms_norm(x_SD, weights.final_norm_D, cfg.rms_norm_eps)
        if weights.head_DV is None:
            return jnp.einsum("SD,VD->SV", x_SD, _f32(embed_VD))
        return jnp.einsum("SD,DV->SV", x_SD, _f32(weights.head_DV))


def _embedding(x: Leaf) -> jax.Array:
    """[V, D]; a quantized one is the head [D, V]."""
    return _f32(x).T if isinstance(x, GroupQuant) else jnp.asarray(x)


def _f32(x: Leaf) -> jax.Array:
    """A quantized weight is what its integers, scales and offsets come to."""
    if not isinstance(x, GroupQuant):
        return jnp.asarray(x, jnp.float32)
    scale, offset = (
        None if part is None else jnp.repeat(jnp.asarray(part, jnp.float32), x.group, axis=-2)
        for part in (x.scale_GN, x.offset_GN)
    )
    values = jnp.asarray(x.values_KN).astype(jnp.float32) * scale
    return values if offset is None else values + offset


def _expert(x: Leaf, index: int) -> Leaf:
    one: Leaf = jax.tree.map(lambda part: part[index], x)
    return one


def _rms_norm(x_SD: jax.Array, scale_D: Leaf, eps: float) -> jax.Array:
    return x_SD / jnp.sqrt(jnp.mean(x_SD**2, axis=-1, keepdims=True) + eps) * _f32(scale_D)


# Compiled as one program, since operation by operation a new length costs some 30 compilations.
@functools.partial(jax.jit, static_argnums=(1, 3))
def _layer(w: LayerWeights[Leaf], cfg: ModelConfig, x_SD: jax.Array, window: int | None) -> jax.Array:
    a_SD = _rms_norm(x_SD, w.attn_norm_D, cfg.rms_norm_eps)
    q_SNH, k_SKH, v_SKH = (
        (a_SD @ _f32(x_DY) + (0 if bias_Y is None else _f32(bias_Y))).reshape(a_SD.shape[0], -1, cfg.head_dim)
        for x_DY, bias_Y in ((w.q_DX, w.q_bias_X), (w.k_DY, w.k_bias_Y), (w.v_DY, w.v_bias_Y))
    )
    if cfg.qk_norm:
        q_SNH = _rms_norm(q_SNH, w.q_norm_H, cfg.rms_norm_eps)
        k_SKH = _rms_norm(k_SKH, w.k_norm_H, cfg.rms_norm_eps)
    attended_SNH = _attend(_rotate(q_SNH, cfg), _rotate(k_SKH, cfg), v_SKH, window, w.sinks_N)
    o_NHD = _f32(w.o_XD).reshape(-1, cfg.head_dim, w.o_XD.shape[1])
    x_SD = x_SD + jnp.einsum("SNH,NHD->SD", attended_SNH, o_NHD)
    if w.o_bias_D is not None:
        x_SD = x_SD + _f32(w.o_bias_D)
    m_SD = _rms_norm(x_SD, w.ffn_norm_D, cfg.rms_norm_eps)
    if cfg.num_experts == 0:
        return x_SD + _gate(m_SD @ _f32(w.gate_DF), m_SD @ _f32(w.up_DF), cfg) @ _f32(w.down_FD)
    weight_SE = _weigh(w, cfg, m_SD)
    for e in range(cfg.num_experts):
        gate_SF, up_SF = m_SD @ _f32(_expert(w.gate_EDF, e)), m_SD @ _f32(_expert(w.up_EDF, e))
        if cfg.expert_bias:
            gate_SF, up_SF = gate_SF + _f32(w.gate_bias_EF[e]), up_SF + _f32(w.up_bias_EF[e])
        y_SD = _gate(gate_SF, up_SF, cfg) @ _f32(_expert(w.down_EFD, e))
        if cfg.expert_bias:
            y_SD = y_SD + _f32(w.down_bias_ED[e])
        x_SD = x_SD + weight_SE[:, e, None] * y_SD
    return x_SD if cfg.shared_expert_width == 0 else x_SD + _shared(w, cfg, m_SD)


def _shared(w: LayerWeights[Leaf], cfg: ModelConfig, m_SD: jax.Array) -> jax.Array:
    y_SD = _gate(m_SD @ _f32(w.shared_gate_DF), m_SD @ _f32(w.shared_up_DF), cfg) @ _f32(w.shared_down_FD)
    return y_SD / (1 + jnp.exp(-m_SD @ _f32(w.shared_score_D1))) if cfg.has_shared_gate else y_SD


def _gate(gate_SF: jax.Array, up_SF: jax.Array, cfg: ModelConfig) -> jax.Array:
    limit = jnp.inf if cfg.gate.limit is None else cfg.gate.limit
    gate_SF, up_SF = jnp.minimum(gate_SF, limit), jnp.maximum(jnp.minimum(up_SF, limit), -limit)
    return gate_SF / (1 + jnp.exp(-cfg.gate.alpha * gate_SF)) * (up_SF + cfg.gate.up_offset)


def _weigh(w: LayerWeights[Leaf], cfg: ModelConfig, m_SD: jax.Array) -> jax.Array:
    """[S, E]: what each token gives each expert, zero for those that it does not choose."""
    router = cfg.router
    bias_E = 0 if w.router_bias_E is None else _f32(w.router_bias_E)
    logit_SE = m_SD @ _f32(w.router_DE) + (bias_E if router.bias == "logits" else 0)
    if router.score == "sigmoid":
        score_SE = 1 / (1 + jnp.exp(-logit_SE))
    else:
        score_SE = jax.nn.softmax(logit_SE, axis=-1)
    choice_SE = score_SE + (bias_E if router.bias == "choice" else 0)
    # An expert's rank: how many are better, or as good and in front of it.
    is_better_SEE = choice_SE[:, None, :] > choice_SE[:, :, None]
    is_equal_SEE = choice_SE[:, None, :] == choice_SE[:, :, None]
    is_before_EE = jnp.arange(cfg.num_experts)[None, :] < jnp.arange(cfg.num_experts)[:, None]
    rank_SE = (is_better_SEE | (is_equal_SEE & is_before_EE)).sum(axis=-1)
    score_SE = jnp.where(rank_SE < cfg.experts_per_token, score_SE, 0)
    # A softmax over the chosen is the softmax over all, divided by what the chosen have of it.
    if router.renormalize or router.score == "softmax_chosen":
        score_SE = score_SE / score_SE.sum(axis=-1, keepdims=True)
    return score_SE * router.scale


def _rotate(x_SNH: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Rotate each pair (i, i + H/2) of a head by position * frequency i, as complex numbers."""
    S, _, H = x_SNH.shape
    half = H // 2
    frequency_h = jnp.array([_frequency(i, cfg) for i in range(half)], jnp.float32)
    turn_S1h = jnp.exp(1j * (jnp.arange(S, dtype=jnp.float32)[:, None] * frequency_h))[:, None, :]
    z_SNh = (x_SNH[..., :half] + 1j * x_SNH[..., half:]) * turn_S1h * _attention_factor(cfg)
    return jnp.concatenate([z_SNh.real, z_SNh.imag], axis=-1)


def _frequency(i: int, cfg: ModelConfig) -> float:
    """theta ** (-2 i / H), divided by a scaling's factor as far as its wave is long beside the original context."""
    plain: float = cfg.rope_theta ** (-2 * i / cfg.head_dim)
    scaling = cfg.rope_scaling
    if scaling is None:
        return plain
    if isinstance(scaling, Llama3Scaling):
        turns = scaling.original_context * plain / (2 * math.pi)
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    else:
        # Dimension at which a frequency makes so many turns over the original context (eq. 17 and 18 of YaRN).
        first, last = (
            cfg.head_dim / 2 * math.log(scaling.original_context / (turns * 2 * math.pi), cfg.rope_theta)
            for turns in (scaling.beta_fast, scaling.beta_slow)
        )
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, cfg.head_dim - 1)
        kept = 1 - (i - first) / (last - first or 0.001)
    kept = min(max(kept, 0.0), 1.0)
    return plain * kept + plain / scaling.factor * (1 - kept)


def _attention_factor(cfg: ModelConfig) -> float:
    if not isinstance(cfg.rope_scaling, YarnScaling):
        return 1.0
    given = cfg.rope_scaling.attention_factor
    return 1 + math.log(cfg.rope_scaling.factor) / 10 if given is None else given


def _attend(
    q_SNH: jax.Array, k_SKH: jax.Array, v_SKH: jax.Array, window: int | None, sinks_N: Leaf | None
) -> jax.Array:
    """Causal attention; query head n reads key head n // G."""
    S, N, H = q_SNH.shape
    G = N // k_SKH.shape[1]
    k_SNH, v_SNH = jnp.repeat(k_SKH, G, axis=1), jnp.repeat(v_SKH, G, axis=1)
    scores_NQS = jnp.einsum("QNH,SNH->NQS", q_SNH, k_SNH) / jnp.sqrt(jnp.float32(H))
    distance_QS = jnp.arange(S)[:, None] - jnp.arange(S)
    is_seen_QS = (distance_QS >= 0) & (distance_QS < (S if window is None else window))
    scores_NQS = jnp.where(is_seen_QS, scores_NQS, -jnp.inf)
    if sinks_N is not None:
        sink_NQ1 = jnp.broadcast_to(_f32(sinks_N)[:, None, None], (N, S, 1))
        scores_NQS = jnp.concatenate([scores_NQS, sink_NQ1], axis=-1)
    p_NQS = jax.nn.softmax(scores_NQS, axis=-1)[:, :, :S]
    return jnp.einsum("NQS,SNH->QNH", p_NQS, v_SNH)
