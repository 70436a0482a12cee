"""The feed-forward half of a layer: one gated network, or a router and experts."""

import jax

from headrace.model.attention import project
from headrace.model.config import ModelConfig
from headrace.model.moe import experts, gated, route
from headrace.model.weights import LayerWeights
from headrace.pallas_kernels.types import Kernels

Array = jax.Array


def feed_forward(
    w: LayerWeights[Array],
    cfg: ModelConfig,
    x_TD: Array,
    is_real_T: Array | None,
    kernels: Kernels,
    *,
    first_expert: Array | int = 0,
    layer: Array | None = None,
) -> tuple[Array, Array | None]:
    """x_TD is normalized. is_real_T, first_expert, layer: of experts, see moe.experts.

    Returns: (float32 [T, D], i32 [E] tokens of each expert; None without experts). Where weights are cut over a mesh,
    the first is a part of the sum.
    """
    if cfg.num_experts:
        expert_TA, weight_TA = route(x_TD, w, cfg)
        options = {"kernels": kernels, "first_expert": first_expert, "is_real_T": is_real_T, "layer": layer}
        return experts(x_TD, w, cfg, expert_TA, weight_TA, **options)
    assert w.gate_DF is not None and w.up_DF is not None and w.down_FD is not None
    gate_TF = project("TD,DF->TF", x_TD, w.gate_DF)
    up_TF = project("TD,DF->TF", x_TD, w.up_DF)
    return project("TF,FD->TD", gated(gate_TF, up_TF, cfg.gate), w.down_FD), None
