"""Layers of experts: which experts a token takes, and their products by sorted dispatch.

Rows are sorted by expert, multiplied group by group, and gathered back; nothing is scattered, and no token is dropped.
Each token sums its experts in the order of its own choice, so that a result does not depend on batch mates.
"""

import jax
import jax.numpy as jnp
from jax import lax

from headrace.model.config import ModelConfig
from headrace.model.router import Gate, RouterBias, RouterScore
from headrace.model.weights import LayerWeights
from headrace.pallas_kernels import api
from headrace.pallas_kernels.types import AttnMeta, Kernels

Array = jax.Array


def route(x_TD: Array, w: LayerWeights[Array], cfg: ModelConfig) -> tuple[Array, Array]:
    """Choose experts for each token, in float32: rounding two logits past each other is another model.

    Args:
      x_TD: what the experts will get. w: of one layer, its router whole even where experts are cut over a mesh.
    Returns: (i32 [T, A] experts, best first and ties to the lower index; float32 [T, A] what to weigh them with).
    """
    router, A = cfg.router, cfg.experts_per_token
    assert router is not None and w.router_DE is not None
    x_TD, router_DE = x_TD.astype(jnp.float32), w.router_DE.astype(jnp.float32)
    logit_TE = jnp.dot(x_TD, router_DE, precision=lax.Precision.HIGHEST)
    if router.bias is RouterBias.LOGITS:
        logit_TE += w.router_bias_E
    if router.score is RouterScore.SOFTMAX_CHOSEN:
        best_TA, expert_TA = lax.top_k(logit_TE, A)
        return expert_TA, jax.nn.softmax(best_TA, axis=-1) * router.scale
    softmax, sigmoid = jax.nn.softmax, jax.nn.sigmoid
    score_TE = softmax(logit_TE, axis=-1) if router.score is RouterScore.SOFTMAX else sigmoid(logit_TE)
    choice_TE = score_TE + w.router_bias_E if router.bias is RouterBias.CHOICE else score_TE
    _, expert_TA = lax.top_k(choice_TE, A)
    weight_TA = jnp.take_along_axis(score_TE, expert_TA, axis=-1)
    if router.renormalize:
        weight_TA /= weight_TA.sum(axis=-1, keepdims=True)
    return expert_TA, weight_TA * router.scale


def experts(
    x_TD: Array,
    w: LayerWeights[Array],
    cfg: ModelConfig,
    expert_TA: Array,
    weight_TA: Array,
    *,
    kernels: Kernels,
    first_expert: Array | int = 0,
    adds_bias: Array | bool = True,
    is_real_T: Array | None = None,
    layer: Array | int | None = None,
) -> tuple[Array, Array]:
    """The weighed sum of each token's experts.

    Args:
      w: of one layer; it may hold a range of the experts only, from first_expert on, as many as gate_EDF has, and a
        part of their width. What is elsewhere gives zeros, so that parts sum to the whole, if down_bias_ED is added by
        one part of the width: adds_bias.
      expert_TA, weight_TA: see route. is_real_T: False marks padding, which gets zeros and costs no product; None is
        all real. layer: the three matrices are those of all layers, [L, E, ...], and this is the one meant.
    Returns: (float32 [T, D], i32 [E] tokens of every expert of the model, in this range or not).
    """
    T, A = expert_TA.shape
    assert w.gate_EDF is not None and w.up_EDF is not None and w.down_EFD is not None
    num_local = w.gate_EDF.shape[-3]
    expert_M = _without_padding(expert_TA, cfg, is_real_T).reshape(-1)
    order_M = jnp.argsort(expert_M, stable=True)
    load_E = expert_load(expert_M, cfg.num_experts)
    local_M = expert_M[order_M] - first_expert
    is_local_M1 = ((local_M >= 0) & (local_M < num_local))[:, None]
    index_M = jnp.clip(local_M, 0, num_local - 1)

    def product(x_MK: Array, weight: Array, bias: Array | None) -> Array:
        x_MK = x_MK.astype(weight.dtype)
        y = api.grouped_matmul(x_MK, weight, load_E, group_offset=first_expert, layer=layer, kernels=kernels)
        return y if bias is None else y + jnp.where(is_local_M1, bias[index_M].astype(jnp.float32), 0)

    x_MD = x_TD[order_M // A]
    h_MF = gated(product(x_MD, w.gate_EDF, w.gate_bias_EF), product(x_MD, w.up_EDF, w.up_bias_EF), cfg.gate)
    down_bias_ED = None if w.down_bias_ED is None else jnp.where(adds_bias, w.down_bias_ED, 0)
    y_MD = product(h_MF, w.down_EFD, down_bias_ED)
    y_TAD = y_MD[jnp.argsort(order_M)].reshape(T, A, -1)
    return (y_TAD * weight_TA[:, :, None]).sum(axis=1), load_E


def dense_experts(
    x_TD: Array,
    w: LayerWeights[Array],
    cfg: ModelConfig,
    expert_TA: Array,
    weight_TA: Array,
    *,
    first_expert: Array | int = 0,
    is_real_T: Array | None = None,
) -> tuple[Array, Array]:
    """As experts, but every token is multiplied with every expert: a second opinion, E / A times as much work."""
    expert_TA = _without_padding(expert_TA, cfg, is_real_T)
    assert w.gate_EDF is not None and w.up_EDF is not None and w.down_EFD is not None
    local_E = jnp.arange(w.gate_EDF.shape[0]) + first_expert
    weight_TE = jnp.where(expert_TA[:, :, None] == local_E, weight_TA[:, :, None], 0).sum(axis=1)

    def product(equation: str, x: Array, weight: Array, bias: Array | None) -> Array:
        weight = weight.astype(jnp.float32)
        y = jnp.einsum(equation, x.astype(jnp.float32), weight, precision=lax.Precision.HIGHEST)
        return y if bias is None else y + bias.astype(jnp.float32)

    gate_TEF = product("TD,EDF->TEF", x_TD, w.gate_EDF, w.gate_bias_EF)
    up_TEF = product("TD,EDF->TEF", x_TD, w.up_EDF, w.up_bias_EF)
    y_TED = product("TEF,EFD->TED", gated(gate_TEF, up_TEF, cfg.gate), w.down_EFD, w.down_bias_ED)
    return (y_TED * weight_TE[:, :, None]).sum(axis=1), expert_load(expert_TA, cfg.num_experts)


def gated(gate_TF: Array, up_TF: Array, gate: Gate) -> Array:
    """What goes from the first products to the last one; see Gate."""
    if gate.limit is not None:
        gate_TF = jnp.minimum(gate_TF, gate.limit)
        up_TF = jnp.clip(up_TF, -gate.limit, gate.limit)
    if gate.up_offset:
        up_TF = up_TF + gate.up_offset
    return gate_TF * jax.nn.sigmoid(gate_TF if gate.alpha == 1 else gate.alpha * gate_TF) * up_TF


def expert_load(expert_TA: Array, num_experts: int) -> Array:
    """i32 [E], how often each expert is named; indices from num_experts on are padding."""
    return (expert_TA.reshape(-1, 1) == jnp.arange(num_experts)).sum(axis=0, dtype=jnp.int32)


def real_tokens(meta: AttnMeta, num_tokens: int) -> Array:
    """bool [T]: False for the padding of decode rows and query blocks."""
    rows = meta.num_decode_rows
    is_real_JT = jnp.arange(meta.block_tokens(num_tokens)) < meta.blk_len_J[:, None]
    return jnp.concatenate([meta.kv_len_Z[:rows] > 0, is_real_JT.reshape(-1)])


def _without_padding(expert_TA: Array, cfg: ModelConfig, is_real_T: Array | None) -> Array:
    """Padding takes an expert behind the last one: it sorts last and is in no group."""
    return expert_TA if is_real_T is None else jnp.where(is_real_T[:, None], expert_TA, cfg.num_experts)
