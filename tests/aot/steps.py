"""Whole steps of real models with the kernels inside, as the runner compiles them, from the shapes of all arguments."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey, tree_flatten_with_path

from headrace.model.config import ModelConfig
from headrace.model.on_mesh import config_on_mesh
from headrace.model.published.configurations import published_config
from headrace.model.specs import WeightScheme
from headrace.model.weights import LayerWeights, Weights
from headrace.pallas_kernels.chips import CHIPS
from headrace.pallas_kernels.types import GroupQuant, Implementation, Kernels, KVPool
from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.plan import ProgramKind
from headrace.serving.runner.arrays import pool_shapes, state_shapes
from headrace.serving.runner.backend import Backend
from headrace.serving.runner.inputs import InputLayout
from headrace.serving.runner.programs import program_name, step_program
from headrace.serving.runner.weights import weight_shapes
from headrace.sharding.mesh import make_mesh
from headrace.sharding.mesh_shape import MeshShape
from scripts.device_steps import LLAMA_8B_2_LAYERS
from tests.aot.matrix import BLOCK_TOKENS, BLOCKS, MOST_TOKENS, Built
from tests.model.tiny import SMOLLM2

MODELS = {
    "smollm2-135m": SMOLLM2,
    "llama-3.1-8b": replace(LLAMA_8B_2_LAYERS, num_layers=32, vocab_size=128_256, max_context=131_072),
}
EXPERTS = {name: published_config(name) for name in ("qwen3-30b-a3b",)}
"""Compiled for v6e."""
LARGE = {name: published_config(name) for name in ("llama-3.1-70b",)}
"""Compiled for a mesh."""
INT8_CHIPS = ("v5e", "v6e", "h100")
"""Of int8 weights of Llama-3.1-8B, which a v5e holds whole."""
FITTING_LAYERS = {("v5e", "llama-3.1-8b"): 20, ("v6e", "qwen3-30b-a3b"): 20}
"""All 32 layers of Llama-3.1-8B in bfloat16 are 16.1 GB, as much as a v5e has, and all 48 of Qwen3-30B-A3B 61 GB,
twice a v6e; layers are scanned, so that the program is the same."""
SLOTS = 16
"""XLA takes longer over the sampler than over all else, and the longer the more rows it has: 40 s of CPU time for 64
rows of SmolLM2's vocabulary, 12 s for 16."""
PAGE_TOKENS = {"bfloat16": 64, "int8": 128}
"""The runner's own choice on a TPU."""

LEAST_WEIGHT = 500_000
"""Elements: an activation may have as many as a smaller weight by chance."""
SLICED = {"tpu7x": "q_DX"}
"""On TPU7x XLA writes the slice of a layer's q to HBM instead of VMEM: of Llama-3.1-8B 33 MB, 8% of a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeStep:
    """topology: slice of chips, None: one chip. tensor: devices that the model is cut over."""

    chip: str
    model: str
    kind: ProgramKind
    kv_dtype: str
    weights: WeightScheme = WeightScheme.NATIVE
    topology: str | None = None
    tensor: int = 1

    @property
    def config(self) -> ModelConfig:
        """On the mesh."""
        cfg = (MODELS | EXPERTS | LARGE)[self.model]
        layers = FITTING_LAYERS.get((self.chip, self.model)) if self.weights is WeightScheme.NATIVE else None
        return config_on_mesh(replace(cfg, num_layers=layers or cfg.num_layers), MeshShape(tensor=self.tensor))

    @property
    def name(self) -> str:
        all_layers = (MODELS | EXPERTS | LARGE)[self.model].num_layers
        layers = "" if self.config.num_layers == all_layers else f" of {self.config.num_layers} layers"
        weights = "" if self.weights is WeightScheme.NATIVE else f"{self.weights} weights, "
        place = self.chip if self.topology is None else f"{self.topology} tensor={self.tensor}"
        return f"{place} {self.model}{layers} {self.kind} step, {weights}{self.kv_dtype} pages"


def whole_steps(chips: tuple[str, ...]) -> Iterator[WholeStep]:
    """Both models, decode and mixed; 8-bit pages with the larger one, and models with experts, on one chip; int8
    weights on some chips and on a mesh: a step takes up to two minutes to compile."""
    for chip in chips:
        for model in MODELS:
            for kind in ProgramKind:
                yield WholeStep(chip=chip, model=model, kind=kind, kv_dtype="bfloat16")
                if chip == "v6e" and model.startswith("llama"):
                    yield WholeStep(chip=chip, model=model, kind=kind, kv_dtype="int8")
        if chip in INT8_CHIPS:
            for kind in ProgramKind:
                yield WholeStep(
                    chip=chip, model="llama-3.1-8b", kind=kind, kv_dtype="bfloat16", weights=WeightScheme.INT8
                )
    if "v6e" in chips:
        for model in EXPERTS:
            for kind in ProgramKind:
                yield WholeStep(chip="v6e", model=model, kind=kind, kv_dtype="bfloat16")
    if "v5e" in chips:
        yield WholeStep(
            chip="v5e",
            model="llama-3.1-70b",
            kind=ProgramKind.DECODE,
            kv_dtype="bfloat16",
            weights=WeightScheme.INT8,
            topology="v5e:4x4",
            tensor=16,
        )


def build_step(step: WholeStep, devices: Sequence[jax.Device] = ()) -> Built:
    """The program of one bucket: 16 decode rows, with 512 prefill tokens where it is mixed; products in bf16, layers as
    the backend of such a chip has them.

    devices: of the chip, or of the mesh; weights then have the layouts that they are served in there.
    """
    cfg, page = step.config, PAGE_TOKENS[step.kv_dtype]
    config = SchedulerConfig(
        num_slots=SLOTS,
        page_size=page,
        num_pages=SLOTS * MOST_TOKENS // page + 1,
        max_context=MOST_TOKENS,
        chunk_tokens=BLOCKS * BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        decode_rows=(SLOTS,),
        prefill_tokens=(BLOCKS * BLOCK_TOKENS,),
    )
    bucket = next(bucket for bucket in config.buckets if bucket.kind is step.kind)
    layout = InputLayout(bucket, config, cfg.vocab_size)
    backend = Backend(
        device=devices[0] if devices else None,
        mesh=None if step.tensor == 1 else make_mesh(MeshShape(tensor=step.tensor), devices),
        kernels=Kernels(implementation=CHIPS[step.chip].implementation, chip=step.chip),
        dtype=np.dtype(jnp.bfloat16),
        weights=step.weights,
        kv_dtype=np.dtype(jnp.dtype(step.kv_dtype)),
        scan_layers=CHIPS[step.chip].implementation is Implementation.TPU,
    )
    weights, pool = weight_shapes(cfg, backend), pool_shapes(cfg, config, backend)
    state = state_shapes(cfg, config, backend)
    program = step_program(cfg, layout, backend, weights, pool, state)
    assert program_name(bucket).startswith(step.kind)
    return Built(
        function=program.function,
        arguments=program.arguments,
        donated=program.donated,
        donated_bytes=device_bytes([program.arguments[i] for i in program.donated]),
        bound_bytes=device_bytes(pool) // cfg.num_layers,
        activation_bytes=activation_bytes(cfg, layout, step.tensor),
        weights=large_weights(weights, step.chip),
        mesh=backend.mesh,
        may_be_copied=tuple(i for i in program.donated if not isinstance(program.arguments[i], KVPool)),
    )


def large_weights(weights: Weights[Any], chip: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of one layer on one device, in every type that a copy could have: a quantized weight may not be dequantized."""
    found, sliced = set(), set()
    for path, leaf in tree_flatten_with_path(weights, is_leaf=lambda x: isinstance(x, GroupQuant))[0]:
        values = leaf.values_KN if isinstance(leaf, GroupQuant) else leaf
        names = [key.name for key in path if isinstance(key, GetAttrKey)]
        shape = part_shape(values)[1 if "layers" in names and isinstance(weights.layers, LayerWeights) else 0 :]
        types = (jnp.int8, jnp.bfloat16, jnp.float32) if isinstance(leaf, GroupQuant) else (leaf.dtype,)
        if leaf.dtype == jnp.bfloat16 and math.prod(shape) >= LEAST_WEIGHT:
            of = sliced if names[-1] == SLICED.get(chip) else found
            of.update((shape, jnp.dtype(dtype)) for dtype in types)
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in sorted(found - sliced, key=str))


def part_shape(x: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """Of what one device has."""
    return x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)


def device_bytes(tree: Any) -> int:
    """Of one device, unpadded."""
    return sum(math.prod(part_shape(x)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def activation_bytes(cfg: ModelConfig, layout: InputLayout, tensor: int) -> int:
    """float32: of each token, three of the feed-forward's width and four of the model's; of each row that is sampled,
    its logits and their weights. tensor: devices that share width and vocabulary."""
    tokens = layout.rows + layout.bucket.prefill_tokens
    sampled = layout.rows + layout.segments
    return 4 * (tokens * (3 * cfg.ffn_width // tensor + 4 * cfg.width) + sampled * 2 * cfg.vocab_size // tensor)
