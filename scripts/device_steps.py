"""Whole steps of a two-layer model with random weights: kernels against the reference, then seconds per step."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from headrace.model import decoder
from headrace.model.config import ModelConfig
from headrace.model.decoder import StepInputs, forward, new_pool
from headrace.model.specs import Init, ParamSpec, param_specs
from headrace.model.weights import Weights
from headrace.pallas_kernels.batch_case import Batch, BatchCase, make_batch
from headrace.pallas_kernels.tolerances import relative_error
from headrace.pallas_kernels.types import Kernels, KVPool

Array = jax.Array

LLAMA_8B_2_LAYERS = ModelConfig(
    family="llama",
    vocab_size=32_768,
    num_layers=2,
    width=4096,
    ffn_width=14_336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_context=8192,
    rope_theta=500_000.0,
    rms_norm_eps=1e-5,
    tied_embeddings=False,
)
"""Widths of Llama-3.1-8B; layers and vocabulary are cut."""
TINY = dataclasses.replace(
    LLAMA_8B_2_LAYERS, vocab_size=128, width=64, ffn_width=96, num_heads=4, num_kv_heads=2, head_dim=64
)
LOGIT_BOUND = 0.05
"""Relative to the largest logit: two layers of bfloat16 products, rounded in another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A compiled function's pieces: logits of every token, and the pool."""

    cfg: ModelConfig
    batch: Batch
    weights: Weights[Array]
    inputs: StepInputs
    kv_dtype: str
    page_tokens: int

    def pool(self, seed: int) -> KVPool:
        """As a served pool is: what nobody stored is zero, what earlier steps stored is random."""
        empty = new_pool(self.cfg, self.batch.num_pages, self.page_tokens, jnp.dtype(self.kv_dtype))
        keys = jax.random.split(jax.random.key(seed), 2)
        pages = jax.random.normal(keys[0], empty.pages_RKWC.shape, jnp.bfloat16)
        if empty.scale_RK2W is None:
            return KVPool(pages.astype(empty.pages_RKWC.dtype))
        pages = (pages * 30).clip(-127, 127).astype(empty.pages_RKWC.dtype)
        return KVPool(pages, jax.random.uniform(keys[1], empty.scale_RK2W.shape, jnp.float32, 0.02, 0.04))

    def function(self, kernels: Kernels) -> Callable[[Weights[Array], StepInputs, KVPool], tuple[Array, KVPool]]:
        def run(weights: Weights[Array], inputs: StepInputs, pool: KVPool) -> tuple[Array, KVPool]:
            hidden_TD, pool = forward(weights, inputs, pool, self.cfg, kernels=kernels)
            return decoder.logits(weights, hidden_TD), pool

        return run


def random_weights(cfg: ModelConfig, seed: int) -> Weights[Array]:
    """Drawn on the device, bfloat16."""
    specs = param_specs(cfg, jnp.bfloat16)

    @functools.partial(jax.jit, static_argnums=1)
    def draw(key: Array, spec: ParamSpec) -> Array:
        if spec.init is Init.ONES:
            return jnp.ones(spec.shape, spec.dtype)
        if spec.init is Init.ZEROS:
            return jnp.zeros(spec.shape, spec.dtype)
        return jax.random.normal(key, spec.shape, spec.dtype) * spec.num_inputs**-0.5

    leaves, tree = jax.tree.flatten(specs)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    weights: Weights[Array] = jax.tree.unflatten(tree, [draw(k, s) for k, s in zip(keys, leaves, strict=True)])
    # As they are served: scanned on TPU alone.
    return decoder.stack_layers(weights) if jax.default_backend() == "tpu" else weights


def make_step(cfg: ModelConfig, case: BatchCase, weights: Weights[Array], kv_dtype: str, seed: int) -> Step:
    batch = make_batch(case, seed)
    position_T = np.zeros(case.num_tokens, np.int32)
    for token, _, position in batch.rows:
        position_T[token] = position
    token_T = np.random.default_rng(seed).integers(0, cfg.vocab_size, case.num_tokens).astype(np.int32)
    inputs = StepInputs(token_T=token_T, position_T=position_T, meta=batch.meta)
    return Step(
        cfg=cfg,
        batch=batch,
        weights=weights,
        inputs=jax.tree.map(jnp.asarray, inputs),
        kv_dtype=kv_dtype,
        page_tokens=case.page_tokens,
    )


def compare(step: Step, kernels: Kernels, seed: int) -> tuple[float, float]:
    """(relative difference of the logits of real tokens, share of tokens with another best id)."""
    outs = []
    for choice in (kernels, Kernels()):
        run = jax.jit(step.function(choice), donate_argnums=2)
        out, _ = run(step.weights, step.inputs, step.pool(seed))
        outs.append(np.asarray(out)[[token for token, _, _ in step.batch.rows]])
    return relative_error(*outs), float((outs[0].argmax(axis=-1) != outs[1].argmax(axis=-1)).mean())
