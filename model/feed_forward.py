"""The feed-forward half of a layer: one gated network, or a router and experts, with or without one that all take."""

import jax
import jax.numpy as jnp

from headrace.model.attention import Matrix, project
from headrace.model.config import ModelConfig
from headrace.model.moe import experts, gated, route
from headrace.model.weights import LayerWeights
from headrace.pallas_kernels.types import Kernels
from headrace.sharding.collectives import ONE_DEVICE, Shards

Array = jax.Array


def feed_forward(
    w: LayerWeights[Array],
    cfg: ModelConfig,
    x_TD: Array,
    is_real_T: Array | None,
    kernels: Kernels,
    shards: Shards = ONE_DEVICE,
    *,
    layer: Array | None = None,
) -> tuple[Array, Array | None]:
    """x_TD is normalized. is_real_T, layer: of experts, see moe.experts. shards: how w is cut; all devices have all
    tokens.

    Returns: (float32 [T, D], i32 [E] tokens of each expert; None without experts), the same on every device.
    """
    if cfg.num_experts:
        expert_TA, weight_TA = route(x_TD, w, cfg)
        assert w.gate_EDF is not None
        part_TD, load_E = experts(
            x_TD,
            w,
            cfg,
            expert_TA,
            weight_TA,
            kernels=kernels,
            first_expert=shards.expert.index * w.gate_EDF.shape[-3],
            adds_bias=shards.tensor.index == 0,
            is_real_T=is_real_T,
            layer=layer,
        )
        if w.shared_gate_DF is not None:
            # Its width is cut over the tensor axis only, and the sum goes over both.
            part_TD += jnp.where(shards.expert.index == 0, _shared(w, cfg, x_TD, kernels), 0)
        return shards.sum(part_TD), load_E
    return shards.tensor.sum(_network(x_TD, w.gate_DF, w.up_DF, w.down_FD, cfg, kernels)), None


def _shared(w: LayerWeights[Array], cfg: ModelConfig, x_TD: Array, kernels: Kernels) -> Array:
    """float32 [T, D]: this device's part of what the shared expert gives."""
    part_TD = _network(x_TD, w.shared_gate_DF, w.shared_up_DF, w.shared_down_FD, cfg, kernels)
    if w.shared_score_D1 is None:
        return part_TD
    return part_TD * jax.nn.sigmoid(project("TD,DF->TF", x_TD, w.shared_score_D1, kernels))


def _network(
    x_TD: Array,
    gate_DF: Matrix | None,
    up_DF: Matrix | None,
    down_FD: Matrix | None,
    cfg: ModelConfig,
    kernels: Kernels,
) -> Array:
    """float32 [T, D] of the width that this device has."""
    assert gate_DF is not None and up_DF is not None and down_FD is not None
    gate_TF, up_TF = project("TD,DF->TF", x_TD, gate_DF, kernels), project("TD,DF->TF", x_TD, up_DF, kernels)
    return project("TF,FD->TD", gated(gate_TF, up_TF, cfg.gate), down_FD, kernels)
