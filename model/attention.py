"""The attention half of a layer: projections, rotary positions, paged write and read."""

import jax
import jax.numpy as jnp
from jax import lax

from headrace.model.config import ModelConfig
from headrace.model.rope import Rotation, rotate
from headrace.model.weights import LayerWeights
from headrace.pallas_kernels import api
from headrace.pallas_kernels.kv_quantization import to_pool
from headrace.pallas_kernels.types import AttentionSpec, AttnMeta, Kernels, KVPool


def project(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """A product in the weight's type, accumulated and returned in float32.

    float32 is meant as such: by default a GPU or TPU would round the inputs.
    """
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
) -> tuple[jax.Array, KVPool]:
    """x_TD is normalized. first_row: row of this layer's page 0. Returns (output [T, D], pool)."""
    # Queries are in the type of products, like every other activation that a product reads.
    q_TNH = rotate(_heads(project("TD,DX->TX", x_TD, w.q_DX), cfg), turn).astype(w.q_DX.dtype)
    k_TKH = rotate(_heads(project("TD,DY->TY", x_TD, w.k_DY), cfg), turn)
    v_TKH = _heads(project("TD,DY->TY", x_TD, w.v_DY), cfg)
    new = to_pool(k_TKH, v_TKH, pool.dtype)
    spec = AttentionSpec(scale=cfg.head_dim**-0.5)
    out_TNH, pool = api.paged_attention(q_TNH, new, pool, first_row, meta, spec, kernels=kernels)
    return project("TX,XD->TD", out_TNH.reshape(out_TNH.shape[0], -1), w.o_XD), pool


def _heads(x_TX: jax.Array, cfg: ModelConfig) -> jax.Array:
    """[T, X] or [T, Y] as [T, heads, H]."""
    return x_TX.reshape(x_TX.shape[0], -1, cfg.head_dim)
