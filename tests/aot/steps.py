"""Whole steps of real models with the kernels inside, as the runner compiles them, from the shapes of all arguments."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from headrace.model.config import ModelConfig
from headrace.model.published.configurations import published_config
from headrace.model.specs import param_specs
from headrace.pallas_kernels.chips import CHIPS
from headrace.pallas_kernels.types import Implementation, Kernels, KVPool
from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.plan import ProgramKind
from headrace.serving.runner.arrays import pool_shapes, state_shapes
from headrace.serving.runner.backend import Backend
from headrace.serving.runner.inputs import InputLayout
from headrace.serving.runner.programs import program_name, step_program
from headrace.serving.runner.weights import weight_shapes
from scripts.device_steps import LLAMA_8B_2_LAYERS
from tests.aot.matrix import BLOCK_TOKENS, BLOCKS, MOST_TOKENS, Built, size_bytes
from tests.model.tiny import SMOLLM2

MODELS = {
    "smollm2-135m": SMOLLM2,
    "llama-3.1-8b": replace(LLAMA_8B_2_LAYERS, num_layers=32, vocab_size=128_256, max_context=131_072),
}
EXPERTS = {name: published_config(name) for name in ("qwen3-30b-a3b",)}
"""Compiled for v6e."""
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
    chip: str
    model: str
    kind: ProgramKind
    kv_dtype: str

    @property
    def config(self) -> ModelConfig:
        cfg = (MODELS | EXPERTS)[self.model]
        return replace(cfg, num_layers=FITTING_LAYERS.get((self.chip, self.model), cfg.num_layers))

    @property
    def name(self) -> str:
        layers = f" of {self.config.num_layers} layers" if (self.chip, self.model) in FITTING_LAYERS else ""
        return f"{self.chip} {self.model}{layers} {self.kind} step, {self.kv_dtype} pages"


def whole_steps(chips: tuple[str, ...]) -> Iterator[WholeStep]:
    """Both models, decode and mixed; 8-bit pages with the larger one, and models with experts, on one chip: a step
    takes up to two minutes to compile."""
    for chip in chips:
        for model in MODELS:
            for kind in ProgramKind:
                yield WholeStep(chip=chip, model=model, kind=kind, kv_dtype="bfloat16")
                if chip == "v6e" and model.startswith("llama"):
                    yield WholeStep(chip=chip, model=model, kind=kind, kv_dtype="int8")
    if "v6e" in chips:
        for model in EXPERTS:
            for kind in ProgramKind:
                yield WholeStep(chip="v6e", model=model, kind=kind, kv_dtype="bfloat16")


def build_step(step: WholeStep, device: jax.Device | None = None) -> Built:
    """The program of one bucket: 16 decode rows, with 512 prefill tokens where it is mixed; bf16 weights,
    layers as the backend of such a chip has them.

    device: of the chip; weights then have the layouts that they are served in there.
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
        device=device,
        kernels=Kernels(implementation=CHIPS[step.chip].implementation, chip=step.chip),
        dtype=np.dtype(jnp.bfloat16),
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
        donated_bytes=size_bytes([program.arguments[i] for i in program.donated]),
        bound_bytes=size_bytes(pool) // cfg.num_layers,
        activation_bytes=activation_bytes(cfg, layout),
        weights=large_weights(cfg, step.chip),
        may_be_copied=tuple(i for i in program.donated if not isinstance(program.arguments[i], KVPool)),
    )


def large_weights(cfg: ModelConfig, chip: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    specs = [spec for spec in jax.tree.leaves(param_specs(cfg, jnp.bfloat16)) if spec.dtype == jnp.bfloat16]
    sliced = {spec.shape for spec in specs if spec.name.endswith(SLICED.get(chip, "none"))}
    shapes = {spec.shape for spec in specs if math.prod(spec.shape) >= LEAST_WEIGHT} - sliced
    found = {(shape, specs[0].dtype) for shape in shapes}
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in sorted(found, key=str))


def activation_bytes(cfg: ModelConfig, layout: InputLayout) -> int:
    """float32: of each token, three of the feed-forward's width and four of the model's; of each row that is sampled,
    its logits and their weights."""
    tokens = layout.rows + layout.bucket.prefill_tokens
    sampled = layout.rows + layout.segments
    return 4 * (tokens * (3 * cfg.ffn_width + 4 * cfg.width) + sampled * 2 * cfg.vocab_size)
