"""What one step must move, multiply and exchange on each device of a mesh, and the time that takes at full rates.

A bound, not a forecast: nothing waits, every needed byte is read once, products run at the peak rate, and what devices
exchange is not hidden behind anything.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax

from headrace.model.config import ModelConfig
from headrace.model.pipeline import num_micro_batches
from headrace.model.specs import ParamSpec
from headrace.model.weights import Weights
from headrace.pallas_kernels.chips import Chip
from headrace.serving.app.build import QUERY_BLOCK_TOKENS
from headrace.serving.app.plan_types import Exchange, ExchangeKind, Point, StepCost, Workload
from headrace.sharding.links import Group
from headrace.sharding.mesh_shape import MeshShape
from headrace.sharding.rules import partition

SUM_ITEM_BYTES = 4
"""Sums between devices are of float32, and so are the three of a greedy draw: a maximum, a check and an id."""
DRAW_SUMS = 3
Lies = Callable[[Sequence[str]], Group]
"""How devices lie that differ along axes of the mesh only."""


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
class Ticks:
    """Of a step over stages: count of them, each over one of parts micro-batches; stages without one run on padding."""

    parts: int = 1
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """One model on one mesh of one chip.

    cfg: on the mesh. specs: of its weights, as they lie in memory. token_bytes: of one token's keys and values in all
    layers of a device. rungs: decode rows that programs have. block_tokens: of a query block.
    """

    cfg: ModelConfig
    mesh: MeshShape
    chip: Chip
    specs: Weights[ParamSpec]
    token_bytes: float
    lies: Lies
    rungs: tuple[int, ...] = (1,)
    block_tokens: int = QUERY_BLOCK_TOKENS

    def step(self, shape: StepShape) -> StepCost:
        ticks = self.ticks(shape)
        weight_bytes, flops = self._weights(shape, ticks)
        passes = math.ceil(shape.prompt_tokens / self.block_tokens)
        decoded, prompt = self._seen(shape.context), self._seen(shape.context / 2)
        kv_bytes = self.token_bytes * (shape.rows * decoded + passes * prompt)
        attended = shape.rows * decoded + shape.prompt_tokens * prompt
        layers = self.cfg.num_layers / self.mesh.stage
        flops += 4 * attended * layers * self.cfg.num_heads * self.cfg.head_dim / self.mesh.tensor
        return StepCost(
            weight_bytes=weight_bytes,
            kv_bytes=kv_bytes,
            flops=flops,
            exchanges=self._exchanges(shape, ticks),
            hbm_s=(weight_bytes + kv_bytes) / self.chip.hbm_bytes_per_s,
            products_s=flops / self.chip.matmul_bf16_per_s,
        )

    def ticks(self, shape: StepShape) -> Ticks:
        """See ``model/pipeline.py``."""
        if self.mesh.stage == 1:
            return Ticks()
        rows = next((rung for rung in self.rungs if rung >= shape.rows), self.rungs[-1])
        parts = num_micro_batches(rows, math.ceil(shape.prompt_tokens / self.block_tokens), self.mesh.stage)
        return Ticks(parts=parts, count=parts + self.mesh.stage - 1)

    def _seen(self, context: float) -> float:
        """Tokens that a query reads, of so many: the mean over layers with and without a window."""
        windows = self.cfg.layer_windows
        return sum(context if window is None else min(context, window) for window in windows) / len(windows)

    def _weights(self, shape: StepShape, ticks: Ticks) -> tuple[float, float]:
        """(bytes read, operations). Layers run in every tick, over a micro-batch."""
        weight_bytes, flops = 0.0, 0.0
        for spec in jax.tree.leaves(self.specs):
            entries = partition(spec, self.mesh)
            names = (name for entry in entries if entry for name in ((entry,) if isinstance(entry, str) else entry))
            parts = math.prod(self.mesh.sizes[name] for name in names)
            if not spec.name.startswith("layers."):
                read, used = _shares(spec, self.cfg, shape.tokens, shape.sampled)
            else:
                read, used = _shares(spec, self.cfg, shape.tokens / ticks.parts, shape.sampled)
                read, used, parts = read * ticks.count, used * ticks.count, parts * self.mesh.stage
            weight_bytes += spec.num_bytes * read / parts
            flops += 2 * math.prod(spec.shape) * used / parts
        return weight_bytes, flops

    def _exchanges(self, shape: StepShape, ticks: Ticks) -> tuple[Exchange, ...]:
        cfg, token = self.cfg, self.cfg.width * SUM_ITEM_BYTES
        layers, part = ticks.count * cfg.num_layers // self.mesh.stage, shape.tokens * token / ticks.parts
        wanted = [
            (ExchangeKind.SUM, ("stage", "tensor"), 1, shape.tokens * token),  # the embedding
            (ExchangeKind.SUM, ("tensor",), layers * (1 if cfg.num_experts else 2), part),
            (ExchangeKind.SUM, ("expert", "tensor"), layers if cfg.num_experts else 0, part),
            (ExchangeKind.SUM, ("stage",), 1, shape.sampled * token),  # what the last stage has
            (ExchangeKind.SEND, ("stage",), ticks.count, part),
            (ExchangeKind.DRAW, ("stage", "tensor"), DRAW_SUMS, shape.sampled * SUM_ITEM_BYTES),
        ]
        counts: dict[tuple[ExchangeKind, tuple[str, ...], float], int] = {}
        for what, axes, count, size_bytes in wanted:
            used = tuple(axis for axis in axes if self.mesh.sizes[axis] > 1)
            if used and count:
                key = what, used, size_bytes
                counts[key] = counts.get(key, 0) + count
        return tuple(self._exchange(*key, count) for key, count in counts.items())

    def _exchange(self, what: ExchangeKind, axes: tuple[str, ...], size_bytes: float, count: int) -> Exchange:
        group = self.lies(axes)
        is_sent = what is ExchangeKind.SEND
        return Exchange(
            what=what,
            axes=axes,
            group=str(group),
            count=count,
            size_bytes=size_bytes,
            link_bytes=size_bytes if is_sent else group.link_bytes(size_bytes),
            seconds=count * (group.send_s(size_bytes) if is_sent else group.all_reduce_s(size_bytes)),
        )

    def point(self, streams: int, work: Workload, chunk_tokens: int) -> Point:
        """Streams half through their output. While one generates, the prompt of one other must be read, for each of
        the streams: so many steps carry a chunk. Where there are more of these than a stream has tokens, every step has
        one, and streams wait for prompts."""
        context, chunks = work.prompt + work.output // 2, math.ceil(work.prompt / chunk_tokens)
        decode = self.step(StepShape(rows=streams, context=context))
        mixed = self.step(StepShape(rows=streams, context=context, prompt_tokens=min(chunk_tokens, work.prompt)))
        with_chunk = streams * chunks
        without = max(work.output - with_chunk, 0)
        return Point(
            streams=streams,
            decode=decode,
            mixed=mixed,
            token_s=(with_chunk * mixed.seconds + without * decode.seconds) / work.output,
            first_token_s=chunks * mixed.seconds,
        )

    def alone(self, work: Workload, chunk_tokens: int) -> StepCost:
        """A chunk of a prompt and nothing else."""
        return self.step(StepShape(rows=0, context=work.prompt, prompt_tokens=min(chunk_tokens, work.prompt)))


def stream_numbers(most: int) -> tuple[int, ...]:
    """1, 2, 4, … and the most."""
    return (*(1 << i for i in range(most.bit_length()) if 1 << i < most), most)


def _shares(spec: ParamSpec, cfg: ModelConfig, tokens: float, sampled: int) -> tuple[float, float]:
    """(share of a weight that so many tokens read, how often they multiply each of its elements)."""
    if spec.name == "embed_VD" and not cfg.tied_embeddings:
        return tokens / cfg.vocab_size, 0.0
    if spec.name in ("embed_VD", "head_DV"):
        return 1.0, sampled
    if spec.num_experts is not None:
        share = cfg.experts_per_token / cfg.num_experts
        # Experts that at least one token chose, if tokens choose alike.
        return 1 - (1 - share) ** tokens, share * tokens if spec.is_product else 0.0
    return 1.0, tokens if spec.is_product else 0.0
