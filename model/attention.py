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
    q_TNH = rotate(project("TD,DNH->TNH", x_TD, w.q_DNH), turn).astype(w.q_DNH.dtype)
    k_TKH = rotate(project("TD,DKH->TKH", x_TD, w.k_DKH), turn)
    v_TKH = project("TD,DKH->TKH", x_TD, w.v_DKH)
    new = to_pool(k_TKH, v_TKH, pool.dtype)
    spec = AttentionSpec(scale=cfg.head_dim**-0.5)
    out_TNH, pool = api.paged_attention(q_TNH, new, pool, first_row, meta, spec, kernels=kernels)
    # One contracted axis: with two, XLA:CPU transposes the weight in every step.
    width = cfg.num_heads * cfg.head_dim
    return project("TX,XD->TD", out_TNH.reshape(-1, width), w.o_NHD.reshape(width, -1)), pool
