"""The served decoder: pure functions from weights, inputs and pages to hidden states and logits.

One layer function serves unrolled and scanned layers. A tuple of layers is unrolled; layers stacked into one
``LayerWeights`` (``stack_layers``) are scanned, one period of ``ModelConfig.window_pattern`` at a time. The pool of
pages is carried from layer to layer whole, each layer using its own range of rows, so that a donated pool is updated in
place. Over stages of a mesh each device has a part of the layers (``pipeline.py``).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.typing import DTypeLike

from headrace.model.attention import Matrix, attention, biased, project
from headrace.model.config import ModelConfig
from headrace.model.feed_forward import feed_forward
from headrace.model.fused_layer import fused_layer, is_fused
from headrace.model.moe import real_tokens
from headrace.model.norm import rms_norm
from headrace.model.pipeline import Batch, run_stages
from headrace.model.rope import Rotation, rotation
from headrace.model.weights import LayerWeights, Weights
from headrace.pallas_kernels import api
from headrace.pallas_kernels.kv_quantization import is_quantized
from headrace.pallas_kernels.types import AttnMeta, Implementation, Kernels, KVPool, TiledQuant
from headrace.sharding.collectives import ONE_DEVICE, MeshAxis, Shards, VocabularyShard

Array = jax.Array
Layer = Callable[..., tuple[Array, KVPool, Array | None]]
"""``_layer``, with all bound that is the same in each."""


@struct.dataclass
class StepInputs:
    """The flat tokens of one step. token_T: i32 ids. position_T: i32, index of each token in its sequence."""

    token_T: Array
    position_T: Array
    meta: AttnMeta


def pool_shape(cfg: ModelConfig, num_pages: int, page_tokens: int) -> tuple[int, int, int, int]:
    """[L * P, K, W, 2H]; page p of layer l is row l * P + p, and page 0 of each layer is the null page."""
    return cfg.num_layers * num_pages, cfg.num_kv_heads, page_tokens, 2 * cfg.head_dim


def new_pool(
    cfg: ModelConfig, num_pages: int, page_tokens: int, dtype: DTypeLike = jnp.float32, *, as_bits: bool = False
) -> KVPool:
    """A pool of zeros, with scales where the type needs them: zeros, since a stale NaN would outlive a mask.

    as_bits: see KVPool.bits_of; for float types of 8 or 16 bits.
    """
    of = jnp.dtype(dtype)
    shape = pool_shape(cfg, num_pages, page_tokens)
    scale = jnp.zeros((*shape[:2], 2, page_tokens)) if is_quantized(of) else None
    if as_bits:
        return KVPool(jnp.zeros(shape, {1: jnp.uint8, 2: jnp.uint16}[of.itemsize]), scale, bits_of=of.name)
    return KVPool(jnp.zeros(shape, of), scale)


def forward(
    weights: Weights[Array],
    inputs: StepInputs,
    pool: KVPool,
    cfg: ModelConfig,
    *,
    kernels: Kernels = Kernels(),
    shards: Shards = ONE_DEVICE,
) -> tuple[Array, KVPool]:
    """Run all layers over the step's tokens.

    Args:
      weights: arrays, layers unrolled or stacked. inputs: every id and index in range (nothing is checked here).
      pool: see new_pool; donate it. kernels: which code runs attention and experts.
      shards: inside ``shard_map``, what this device's weights and pages are a part of; cfg stays that of the whole.
    Returns: (float32 hidden states [T, D] after the final norm, of the last stage there alone; pool).
    """
    hidden_TD, pool, _ = forward_counting(weights, inputs, pool, cfg, kernels=kernels, shards=shards)
    return hidden_TD, pool


def forward_counting(
    weights: Weights[Array],
    inputs: StepInputs,
    pool: KVPool,
    cfg: ModelConfig,
    *,
    kernels: Kernels = Kernels(),
    shards: Shards = ONE_DEVICE,
) -> tuple[Array, KVPool, Array | None]:
    """As forward, and the load: i32 [L, E] real tokens that each layer of this device sent to each expert; None without
    experts."""
    num_layers = cfg.num_layers // shards.stage.size

    def run(batch: Batch, pool: KVPool) -> tuple[Array, KVPool, Array | None]:
        asks = cfg.num_experts or kernels.implementation is Implementation.CPU
        is_real_T = real_tokens(batch.meta, batch.x_TD.shape[0]) if asks else None
        layer = functools.partial(
            _layer, cfg=cfg, turn=batch.turn, meta=batch.meta, is_real_T=is_real_T, kernels=kernels, shards=shards
        )
        run_layers = _scanned if isinstance(weights.layers, LayerWeights) else _unrolled
        return run_layers(layer, weights.layers, batch.x_TD, pool, cfg.layer_windows, num_layers)

    x_TD = _embed(weights.embed_VD, inputs.token_T, shards.vocabulary, kernels)
    turn = rotation(inputs.position_T, cfg, is_fused=kernels.implementation is not Implementation.CPU)
    batch = Batch(x_TD, turn, inputs.meta)
    if shards.stage.size == 1:
        x_TD, pool, load_LE = run(batch, pool)
    else:
        x_TD, pool, load_LE = run_stages(run, batch, pool, shards.stage)
    return rms_norm(x_TD, weights.final_norm_D, cfg.rms_norm_eps), pool, load_LE


def _embed(embed_VD: Matrix, token_T: Array, axis: MeshAxis, kernels: Kernels) -> Array:
    """float32 [T, D]. Each device holds rows of the embedding; all but one give zeros."""
    if isinstance(embed_VD, TiledQuant):
        return api.columns(embed_VD, token_T, kernels=kernels)
    if axis.size == 1:
        return embed_VD.at[token_T].get(mode="promise_in_bounds").astype(jnp.float32)
    index_T = VocabularyShard(axis=axis, size=embed_VD.shape[0] * axis.size).index_of(token_T)
    return axis.sum(embed_VD.at[index_T].get(mode="fill", fill_value=0).astype(jnp.float32))


def logits(
    weights: Weights[Array], hidden_TD: Array, is_real_T: Array | None = None, *, kernels: Kernels = Kernels()
) -> Array:
    """float32 [T, V], of this device's part of the vocabulary; a tied head reads the embedding.

    is_real_T: False marks rows whose result nobody reads: 0, without work, where the head is in tiles."""
    if is_real_T is not None and isinstance(_head(weights), TiledQuant):
        return api.fused_matmul(hidden_TD, (_head(weights),), real_M=is_real_T, kernels=kernels)
    if weights.head_DV is None:
        return project("TD,VD->TV", hidden_TD, weights.embed_VD, kernels)
    return project("TD,DV->TV", hidden_TD, weights.head_DV, kernels)


def has_best_column(weights: Weights[Array], kernels: Kernels, shards: Shards) -> bool:
    """Whether ``best_token`` runs: the CPU's kernels, on one device, with a quantized head."""
    is_alone = shards.vocabulary.size == shards.data.size == 1
    return kernels.implementation is Implementation.CPU and is_alone and isinstance(_head(weights), TiledQuant)


def best_token(
    weights: Weights[Array], hidden_TD: Array, is_real_T: Array | None = None, *, kernels: Kernels
) -> tuple[Array, Array]:
    """What sampling takes without the logits in memory: (i32 [T] lowest id of the largest logit, any id where one is
    NaN; bool [T] whether all logits are finite). is_real_T: False marks rows whose result nobody reads."""
    token_T, _, is_finite_T = api.best_column(hidden_TD, _head(weights), real_M=is_real_T, kernels=kernels)
    return token_T, is_finite_T


def _head(weights: Weights[Any]) -> Any:
    return weights.embed_VD if weights.head_DV is None else weights.head_DV


def stack_layers(weights: Weights[Array]) -> Weights[Array]:
    """The same weights with layers stacked on a new first axis, for scanning."""
    return weights.replace(layers=jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights.layers))


def _unrolled(
    layer: Layer,
    layers: tuple[LayerWeights[Array], ...],
    x_TD: Array,
    pool: KVPool,
    windows: tuple[int | None, ...],
    num_layers: int,
) -> tuple[Array, KVPool, Array | None]:
    pages, loads = pool.pages_RKWC.shape[0] // num_layers, []
    for index, w in enumerate(layers):
        window = windows[index % len(windows)]
        x_TD, pool, load_E = layer(x_TD, pool, w, jnp.int32(index * pages), window=window, expert_layer=None)
        loads.append(load_E)
    return x_TD, pool, None if loads[0] is None else jnp.stack(loads)


def _scanned(
    layer: Layer,
    layers: LayerWeights[Array],
    x_TD: Array,
    pool: KVPool,
    windows: tuple[int | None, ...],
    num_layers: int,
) -> tuple[Array, KVPool, Array | None]:
    """A period of windows in each iteration, which picks its layers itself: see _layer_at."""
    pages = pool.pages_RKWC.shape[0] // num_layers

    def period(carry: tuple[Array, KVPool], first: Array) -> tuple[tuple[Array, KVPool], list[Array | None]]:
        loads = []
        for offset, window in enumerate(windows):
            index = first + offset
            w = _layer_at(layers, index)
            *carry, load_E = layer(*carry, w, index * pages, window=window, expert_layer=index)
            loads.append(load_E)
        return tuple(carry), loads

    firsts = jnp.arange(0, num_layers, len(windows), dtype=jnp.int32)
    (x_TD, pool), loads = lax.scan(period, (x_TD, pool), firsts)
    return x_TD, pool, None if loads[0] is None else jnp.stack(loads, axis=1).reshape(num_layers, -1)


def _layer_at(stacked: LayerWeights[Array], index: Array) -> LayerWeights[Array]:
    """One layer's weights. Experts' matrices stay those of all layers: kernels read them in place, while a slice of
    them would be a copy (2.7 GB in each step of gpt-oss-20b, by the TPU compiler's own account)."""
    matrices = {"gate_EDF": stacked.gate_EDF, "up_EDF": stacked.up_EDF, "down_EFD": stacked.down_EFD}
    others = stacked.replace(**dict.fromkeys(matrices))
    sliced = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, 0, keepdims=False), others)
    return sliced.replace(**matrices)


# Jitted by itself, so that unrolled layers are traced and lowered once per program and not once per layer.
@functools.partial(jax.jit, static_argnames=("cfg", "kernels", "shards", "window"))
def _layer(
    x_TD: Array,
    pool: KVPool,
    w: LayerWeights[Array],
    first_row: Array,
    *,
    cfg: ModelConfig,
    turn: Rotation,
    meta: AttnMeta,
    is_real_T: Array | None,
    kernels: Kernels,
    shards: Shards,
    window: int | None,
    expert_layer: Array | None,
) -> tuple[Array, KVPool, Array | None]:
    if is_fused(w, cfg, kernels, shards):
        return (*fused_layer(w, cfg, x_TD, pool, first_row, turn, meta, is_real_T, kernels, window=window), None)
    a_TD = rms_norm(x_TD, w.attn_norm_D, cfg.rms_norm_eps)
    attended_TD, pool = attention(w, cfg, a_TD, pool, first_row, turn, meta, kernels, window=window)
    # Each device has its heads' part of the sum over heads; the bias comes once.
    attended_TD = biased(shards.tensor.sum(attended_TD), w.o_bias_D)
    x_TD = x_TD + attended_TD
    m_TD = rms_norm(x_TD, w.ffn_norm_D, cfg.rms_norm_eps)
    y_TD, load_E = feed_forward(w, cfg, m_TD, is_real_T, kernels, shards, layer=expert_layer)
    return x_TD + y_TD, pool, load_E
