"""A dense layer as five operations of the CPU kernels, with nothing for XLA between them.

Norms, activation and residual are part of the products, the rotation and the write to pages part of attention. Other
layers (of experts, with biases, with other gates, with weights that are not quantized) take the general way of
``decoder.py`` through the same kernels.
"""

from typing import Any

import jax

from headrace.model.config import ModelConfig
from headrace.model.rope import Rotation
from headrace.model.router import Gate
from headrace.model.weights import LayerWeights
from headrace.pallas_kernels import api
from headrace.pallas_kernels.types import (
    AttentionSpec,
    AttnMeta,
    Implementation,
    Kernels,
    KVPool,
    Rms,
    TiledQuant,
)
from headrace.sharding.collectives import Shards

Array = jax.Array


def is_fused(w: LayerWeights[Any], cfg: ModelConfig, kernels: Kernels, shards: Shards) -> bool:
    """Whether ``fused_layer`` is what this layer is."""
    matrices = (w.q_DX, w.k_DY, w.v_DY, w.o_XD, w.gate_DF, w.up_DF, w.down_FD)
    between = (w.q_norm_H, w.k_norm_H, w.q_bias_X, w.k_bias_Y, w.v_bias_Y, w.o_bias_D)
    return (
        kernels.implementation is Implementation.CPU
        and shards.tensor.size == 1
        and cfg.gate == Gate()
        and all(isinstance(matrix, TiledQuant) for matrix in matrices)
        and all(part is None for part in between)
    )


def fused_layer(
    w: LayerWeights[Any],
    cfg: ModelConfig,
    x_TD: Array,
    pool: KVPool,
    first_row: Array,
    turn: Rotation,
    meta: AttnMeta,
    real_T: Array | None,
    kernels: Kernels,
    *,
    window: int | None,
) -> tuple[Array, KVPool]:
    """One layer that ``is_fused``. x_TD: float32. first_row: of this layer's page 0. real_T: False marks padding.
    window: see AttentionSpec.

    Returns: (float32 [T, D], pool).
    """
    spec = AttentionSpec(scale=cfg.head_dim**-0.5, window=window)
    norm = Rms(w.attn_norm_D, cfg.rms_norm_eps)
    qkv_TX = api.fused_matmul(x_TD, (w.q_DX, w.k_DY, w.v_DY), norm=norm, real_M=real_T, kernels=kernels)
    out_TX, pool = api.rotary_attention(
        qkv_TX, turn.cos_TH, turn.sin_TH, pool, first_row, meta, spec, sinks_N=w.sinks_N, kernels=kernels
    )
    x_TD = api.fused_matmul(out_TX, (w.o_XD,), residual_MN=x_TD, real_M=real_T, kernels=kernels)
    norm = Rms(w.ffn_norm_D, cfg.rms_norm_eps)
    gate_up_TF = api.fused_matmul(x_TD, (w.gate_DF, w.up_DF), norm=norm, real_M=real_T, kernels=kernels)
    return api.fused_matmul(
        gate_up_TF, (w.down_FD,), is_gated=True, residual_MN=x_TD, real_M=real_T, kernels=kernels
    ), pool
