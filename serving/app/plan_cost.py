"""What one step must move, multiply and exchange on each device of a mesh, and the time that takes at full rates.

A bound, not a forecast: nothing waits, every needed byte is read once, products run at the peak rate, and what devices
exchange is not hidden behind anything.
"""

import math
from dataclasses import dataclass

import jax
import numpy as np

from headrace.model.config import ModelConfig
from headrace.model.specs import ParamSpec, param_specs
from headrace.pallas_kernels.chips import Chip
from headrace.serving.app.build import QUERY_BLOCK_TOKENS
from headrace.sharding.mesh_shape import MeshShape
from headrace.sharding.rules import partition
from headrace.sharding.topologies import Links

ACTIVATION_BYTES = 4
"""Sums between devices are of float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """rows: sequences that decode, each with context tokens before it. prompt_tokens: of one prompt, which is half
    through: it has context / 2 tokens before it."""

    rows: int
    context: int
    prompt_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.rows + self.prompt_tokens

    @property
    def sampled(self) -> int:
        return self.rows + (1 if self.prompt_tokens else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Of one device and one step. collectives: sums over devices, each of sum_bytes."""

    weight_bytes: float
    kv_bytes: float
    flops: float
    collectives: int
    sum_bytes: float
    hbm_s: float
    products_s: float
    links_s: float

    @property
    def seconds(self) -> float:
        return max(self.hbm_s, self.products_s) + self.links_s

    @property
    def bound(self) -> str:
        """The largest term."""
        terms = {"memory": self.hbm_s, "products": self.products_s, "links": self.links_s}
        return max(terms, key=lambda name: terms[name])


def step_cost(
    cfg: ModelConfig,
    mesh: MeshShape,
    chip: Chip,
    links: Links,
    shape: StepShape,
    *,
    dtype: np.dtype,
    kv_token_bytes: float,
) -> StepCost:
    """cfg: on the mesh. kv_token_bytes: of one token in all layers, on one device."""
    weight_bytes, flops = 0.0, 0.0
    for spec in jax.tree.leaves(param_specs(cfg, dtype)):
        parts = math.prod(mesh.sizes[axis] for axis in partition(spec, mesh) if axis is not None)
        read, used = _shares(spec, cfg, shape)
        weight_bytes += spec.num_bytes * read / parts
        flops += 2 * math.prod(spec.shape) * used / parts
    passes = math.ceil(shape.prompt_tokens / QUERY_BLOCK_TOKENS)
    kv_bytes = kv_token_bytes * (shape.rows * shape.context + passes * shape.context / 2)
    attended = shape.rows * shape.context + shape.prompt_tokens * shape.context / 2
    flops += 4 * attended * cfg.num_layers * cfg.num_heads * cfg.head_dim / mesh.tensor
    collectives = 1 + 2 * cfg.num_layers if mesh.tensor * mesh.expert > 1 else 0
    sum_bytes = shape.tokens * cfg.width * ACTIVATION_BYTES
    return StepCost(
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        flops=flops,
        collectives=collectives,
        sum_bytes=sum_bytes,
        hbm_s=(weight_bytes + kv_bytes) / chip.hbm_bytes_per_s,
        products_s=flops / chip.matmul_bf16_per_s,
        links_s=collectives * links.all_reduce_s(sum_bytes, mesh.tensor * mesh.expert),
    )


def _shares(spec: ParamSpec, cfg: ModelConfig, shape: StepShape) -> tuple[float, float]:
    """(share of a weight that a step reads, how often it multiplies each of its elements)."""
    if spec.name == "embed_VD" and not cfg.tied_embeddings:
        return shape.tokens / cfg.vocab_size, 0.0
    if spec.name in ("embed_VD", "head_DV"):
        return 1.0, shape.sampled
    if spec.num_experts is not None:
        share = cfg.experts_per_token / cfg.num_experts
        # Experts that at least one token chose, if tokens choose alike.
        return 1 - (1 - share) ** shape.tokens, share * shape.tokens if spec.is_product else 0.0
    return 1.0, shape.tokens if spec.is_product else 0.0
