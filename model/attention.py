"""The attention half of a layer: projections, rotary positions, paged write and read."""

import jax
import jax.numpy as jnp
from jax import lax

from headrace.model.config import ModelConfig
from headrace.model.norm import rms_norm
from headrace.model.rope import Rotation, rotate
from headrace.model.weights import LayerWeights
from headrace.pallas_kernels import api
from headrace.pallas_kernels.kv_quantization import to_pool
from headrace.pallas_kernels.types import (
    AttentionSpec,
    AttnMeta,
    GroupQuant,
    Implementation,
    Kernels,
    KVPool,
    TiledQuant,
)

Matrix = jax.Array | GroupQuant | TiledQuant


def project(equation: str, x: jax.Array, weight: Matrix, kernels: Kernels) -> jax.Array:
    """A product in the weight's type, accumulated and returned in float32.

    float32 is meant as such: by default a GPU or TPU would round the inputs. equation: of a quantized weight always
    rows times a matrix.
    """
    if isinstance(weight, GroupQuant | TiledQuant):
        return api.quant_matmul(x.astype(weight.dtype), weight, kernels=kernels)
    precision = lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    return jnp.einsum(equation, x.astype(weight.dtype), weight, precision=precision, preferred_element_type=jnp.float32)


def attention(
    w: LayerWeights[jax.Array],
    cfg: ModelConfig,
    x_TD: jax.Array,
    pool: KVPool,
    first_row: jax.Array,
    turn: Rotation,
    meta: AttnMeta,
    kernels: Kernels,
    *,
    window: int | None = None,
) -> tuple[jax.Array, KVPool]:
    """x_TD is normalized. first_row: row of this layer's page 0. window: see AttentionSpec; None in layers without one.

    Returns (output [T, D] of the heads that w holds, without o_bias_D; pool).
    """
    q_TNH = _heads(biased(project("TD,DX->TX", x_TD, w.q_DX, kernels), w.q_bias_X), cfg)
    k_TKH = _heads(biased(project("TD,DY->TY", x_TD, w.k_DY, kernels), w.k_bias_Y), cfg)
    v_TKH = _heads(biased(project("TD,DY->TY", x_TD, w.v_DY, kernels), w.v_bias_Y), cfg)
    if w.q_norm_H is not None and w.k_norm_H is not None:
        q_TNH, k_TKH = rms_norm(q_TNH, w.q_norm_H, cfg.rms_norm_eps), rms_norm(k_TKH, w.k_norm_H, cfg.rms_norm_eps)
    spec = AttentionSpec(scale=cfg.head_dim**-0.5, window=window)
    if kernels.implementation is Implementation.CPU:
        qkv_TX = jnp.concatenate([x.reshape(x.shape[0], -1) for x in (q_TNH, k_TKH, v_TKH)], axis=1)
        out_TX, pool = api.rotary_attention(
            qkv_TX, turn.cos_TH, turn.sin_TH, pool, first_row, meta, spec, sinks_N=w.sinks_N, kernels=kernels
        )
        return project("TX,XD->TD", out_TX, w.o_XD, kernels), pool
    # Queries are in the type of products, like every other activation that a product reads.
    q_TNH, k_TKH = rotate(q_TNH, turn).astype(w.q_DX.dtype), rotate(k_TKH, turn)
    new = to_pool(k_TKH, v_TKH, pool.dtype)
    out_TNH, pool = api.paged_attention(q_TNH, new, pool, first_row, meta, spec, sinks_N=w.sinks_N, kernels=kernels)
    return project("TX,XD->TD", out_TNH.reshape(out_TNH.shape[0], -1), w.o_XD, kernels), pool


def biased(x_TX: jax.Array, bias_X: jax.Array | None) -> jax.Array:
    """x with a bias, where there is one."""
    return x_TX if bias_X is None else x_TX + bias_X


def _heads(x_TX: jax.Array, cfg: ModelConfig) -> jax.Array:
    """[T, X] or [T, Y] as [T, heads, H]."""
    return x_TX.reshape(x_TX.shape[0], -1, cfg.head_dim)
