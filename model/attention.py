"""The attention half of a layer: projections, rotary positions, paged write and read."""

import jax
import jax.numpy as jnp
from jax import lax

from headrace.model.config import ModelConfig
from headrace.model.rope import Rotation, rotate
from headrace.model.weights import LayerWeights
from headrace.pallas_kernels import api
from headrace.pallas_kernels.types import AttnMeta, Implementation


def project(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """A product that accumulates and returns float32, at float32 precision (a GPU or TPU would round its inputs)."""
    return jnp.einsum(equation, x, weight, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def attention(
    w: LayerWeights[jax.Array],
    cfg: ModelConfig,
    x_TD: jax.Array,
    pool_RKWC: jax.Array,
    first_row: jax.Array,
    turn: Rotation,
    meta: AttnMeta,
    implementation: Implementation,
) -> tuple[jax.Array, jax.Array]:
    """x_TD is normalized. first_row: row of this layer's page 0. Returns (output [T, D], pool)."""
    q_TNH = rotate(project("TD,DNH->TNH", x_TD, w.q_DNH), turn)
    k_TKH = rotate(project("TD,DKH->TKH", x_TD, w.k_DKH), turn)
    v_TKH = project("TD,DKH->TKH", x_TD, w.v_DKH)
    pool_RKWC = api.write_pages(pool_RKWC, k_TKH, v_TKH, first_row, meta, implementation=implementation)
    out_TNH = api.paged_attention(
        q_TNH, pool_RKWC, first_row, meta, scale=cfg.head_dim**-0.5, implementation=implementation
    )
    # One contracted axis: with two, XLA:CPU transposes the weight in every step.
    width = cfg.num_heads * cfg.head_dim
    return project("TX,XD->TD", out_TNH.reshape(-1, width), w.o_NHD.reshape(width, -1)), pool_RKWC
