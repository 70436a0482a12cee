"""The feed-forward half of a layer: one gated network, or a router and experts."""

import jax

from headrace.model.attention import project
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
        return shards.sum(part_TD), load_E
    assert w.gate_DF is not None and w.up_DF is not None and w.down_FD is not None
    gate_TF = project("TD,DF->TF", x_TD, w.gate_DF, kernels)
    up_TF = project("TD,DF->TF", x_TD, w.up_DF, kernels)
    return shards.tensor.sum(project("TF,FD->TD", gated(gate_TF, up_TF, cfg.gate), w.down_FD, kernels)), None
