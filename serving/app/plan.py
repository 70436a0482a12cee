"""``headrace plan``: what a model would take and do on a slice of TPUs that is not there, one row for each mesh.

The programs are those that would be served, compiled by the compiler of the chip; memory is what that says. Times are
bounds (``plan_cost.py``).
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
from jax.errors import JaxRuntimeError
from rich.console import Console
from rich.table import Table

from headrace.model.config import ModelConfig
from headrace.model.on_mesh import config_on_mesh
from headrace.pallas_kernels.chips import Chip, chip_of
from headrace.pallas_kernels.types import UnsupportedCase
from headrace.serving.app.build import DEFAULT_MEMORY_FRACTION, EngineOptions, resolve
from headrace.serving.app.plan_cost import StepCost, StepShape, step_cost
from headrace.serving.core.errors import ConfigError
from headrace.serving.core.kv_memory import DeviceMemory
from headrace.serving.engine.ports import Progress
from headrace.serving.runner.arrays import pool_shapes, state_shapes
from headrace.serving.runner.backend import Backend, Wishes, choose_backend, find_mesh
from headrace.serving.runner.inputs import InputLayout
from headrace.serving.runner.memory import measure
from headrace.serving.runner.programs import step_program
from headrace.serving.runner.weights import weight_shapes
from headrace.sharding.errors import MeshError
from headrace.sharding.mesh_shape import MeshShape, parse_mesh
from headrace.sharding.topologies import links_of, topology_devices

GIB = 1 << 30
ASSUMPTIONS = (
    "Memory is what the chip's compiler reports for the programs that would be served, of the data sheet's HBM.",
    "Times are bounds: HBM and products at the data sheet's rates, every needed byte read once, nothing waits.",
    "Devices lie on a line along their axis; what they exchange is not hidden, and a hop takes 1 us.",
    "Not known: the host's share of a step, fragments of memory, what a hot chip or a busy network loses.",
)

ROWS = (
    "weights",
    "temporaries",
    "code of the decode program",
    "tokens of KV that fit",
    "streams at once",
    "decode: HBM",
    "decode: products",
    "decode: links",
    "decode step, its bound",
    "decode: FLOPs",
    "decode: bytes of HBM",
    "decode: sums over devices",
    "with a chunk of a prompt",
    "tokens/s of all streams",
    "first token, nobody waiting",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Of each request, in tokens; both at least 1."""

    prompt: int
    output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """Bytes are of one device. misfit: why it does not fit, or None; then the rest is None.

    tokens: that fit into the KV pages. streams: that decode at once. decode, prefill: one step of all streams, without
    and with a chunk of a prompt. first_token_s: of a prompt that waits for nobody.
    """

    mesh: str
    misfit: str | None
    memory: DeviceMemory | None = None
    code_bytes: int | None = None
    tokens: int | None = None
    streams: int | None = None
    decode: StepCost | None = None
    prefill: StepCost | None = None
    first_token_s: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        return None if self.decode is None or self.streams is None else self.streams / self.decode.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    model: str
    topology: str
    chip: str
    dtype: str
    kv_dtype: str
    workload: Workload
    meshes: tuple[MeshPlan, ...]


def make_plan(
    name: str,
    config: ModelConfig,
    options: EngineOptions,
    topology: str,
    meshes: Sequence[str],
    workload: Workload,
    progress: Progress,
) -> Plan:
    """Compile and count. plan_command.COMPILER_VARIABLES must be set before JAX starts.

    Raises: ConfigError naming the flag.
    """
    try:
        shapes = [parse_mesh(mesh) for mesh in meshes]
        devices = topology_devices(topology)
        chip = chip_of(devices[0].device_kind)
    except MeshError as error:
        raise ConfigError(str(error)) from error
    except UnsupportedCase as error:
        raise ConfigError(f"topology {topology!r}: {error.why}") from error
    rows = []
    for done, shape in enumerate(shapes):
        progress(f"compiling for {topology}, {shape}", done, len(shapes))
        rows.append(_plan_mesh(config, options, devices, chip, shape, workload))
    progress("compiled", len(shapes), len(shapes))
    kinds = choose_backend(devices[0], _wishes(options))
    return Plan(
        model=name,
        topology=topology,
        chip=chip.name,
        dtype=kinds.dtype.name,
        kv_dtype=kinds.kv_dtype.name,
        workload=workload,
        meshes=tuple(rows),
    )


def _wishes(options: EngineOptions) -> Wishes:
    return Wishes(attention="tpu", dtype=options.dtype, kv_dtype=options.kv_dtype)


def _plan_mesh(
    config: ModelConfig, options: EngineOptions, devices: Sequence[Any], chip: Chip, shape: MeshShape, work: Workload
) -> MeshPlan:
    mesh = find_mesh(devices[0], shape, devices)
    try:
        cfg = config_on_mesh(config, shape)
    except MeshError as error:
        return MeshPlan(mesh=str(shape), misfit=str(error))
    backend = choose_backend(devices[0], _wishes(options), mesh)
    resolved = resolve(replace(options, pages=2, memory_fraction=None), cfg, backend.kv_format)
    limits = {"limit_bytes": chip.hbm_bytes, "fraction": options.memory_fraction or DEFAULT_MEMORY_FRACTION}
    # The compiler refuses what is larger than the device, so that is counted first, without its padding.
    memory = DeviceMemory(
        weights_bytes=_device_bytes(weight_shapes(cfg, backend)),
        state_bytes=_device_bytes(state_shapes(cfg, resolved.scheduler, backend)),
        page_bytes=_device_bytes(pool_shapes(cfg, resolved.scheduler, backend)) // 2,
        temporary_bytes=0,
        steps_bytes=0,
        **limits,
    )
    why = _misfit(memory)
    if why is None:
        try:
            memory = measure(config, resolved.scheduler, backend, **limits)
            why = _misfit(memory)
        except JaxRuntimeError as error:
            why = f"does not fit: {str(error).splitlines()[0]}"
        except ConfigError as error:
            why = f"does not fit: {error}"
    if why is not None:
        return MeshPlan(mesh=str(shape), misfit=why, memory=memory)
    pages = memory.num_pages - 1
    page = resolved.scheduler.page_size
    most = work.prompt + work.output
    streams = min(options.num_slots, pages // math.ceil(most / page))
    if streams < 1:
        return MeshPlan(mesh=str(shape), misfit=f"no request of {most} tokens fits into {pages * page} tokens of KV")
    costs = [
        step_cost(
            cfg,
            shape,
            chip,
            links_of(chip.name),
            step,
            dtype=backend.dtype,
            kv_token_bytes=memory.page_bytes / page,
        )
        for step in _steps(streams, options.chunk_tokens, work)
    ]
    return MeshPlan(
        mesh=str(shape),
        misfit=None,
        memory=memory,
        code_bytes=_code_bytes(cfg, backend, options),
        tokens=pages * page,
        streams=streams,
        decode=costs[0],
        prefill=costs[1],
        first_token_s=math.ceil(work.prompt / options.chunk_tokens) * costs[2].seconds,
    )


def _device_bytes(tree: Any) -> int:
    """Of the parts that one device has, unpadded."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _misfit(memory: DeviceMemory) -> str | None:
    """How much is missing for two pages, and what takes most."""
    short = memory.total_bytes(2) - int(memory.limit_bytes * memory.fraction)
    if short <= 0:
        return None
    parts = {"weights": memory.weights_bytes, "temporaries": memory.temporary_bytes, "state": memory.state_bytes}
    largest = max(parts, key=lambda part: parts[part])
    return (
        f"does not fit: short by {short / GIB:.2f} GiB in {largest}, which take {parts[largest] / GIB:.2f} of the "
        f"{memory.limit_bytes * memory.fraction / GIB:.2f} GiB to be used of a device"
    )


def _steps(streams: int, chunk_tokens: int, work: Workload) -> tuple[StepShape, StepShape, StepShape]:
    """All streams half through their output; the same with a chunk of a prompt; the chunk alone."""
    middle = work.prompt + work.output // 2
    chunk = min(chunk_tokens, work.prompt)
    return (
        StepShape(rows=streams, context=middle),
        StepShape(rows=streams, context=middle, prompt_tokens=chunk),
        StepShape(rows=0, context=work.prompt, prompt_tokens=chunk),
    )


def _code_bytes(cfg: ModelConfig, backend: Backend, options: EngineOptions) -> int:
    """Of the largest decode program."""
    config = resolve(replace(options, pages=64, memory_fraction=None), cfg, backend.kv_format).scheduler
    bucket = [bucket for bucket in config.buckets if not bucket.prefill_tokens][-1]
    layout = InputLayout(bucket, config, cfg.vocab_size)
    arrays = weight_shapes(cfg, backend), pool_shapes(cfg, config, backend), state_shapes(cfg, config, backend)
    compiled = step_program(cfg, layout, backend, *arrays).compile(backend.device)
    return int(compiled.memory_analysis().generated_code_size_in_bytes)


def print_plan(plan: Plan, console: Console) -> None:
    console.print(
        f"{plan.model} on {plan.topology} ({plan.chip}), weights {plan.dtype}, KV {plan.kv_dtype}, requests of "
        f"{plan.workload.prompt} + {plan.workload.output} tokens; per device and step",
        highlight=False,
    )
    fitting = [row for row in plan.meshes if row.misfit is None]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("mesh")
    for row in fitting:
        table.add_column(row.mesh, justify="right", no_wrap=True)
    for name, *cells in zip(ROWS, *map(_cells, fitting), strict=True):
        table.add_row(name, *cells)
    if fitting:
        console.print(table, highlight=False)
    for row in plan.meshes:
        if row.misfit is not None:
            console.print(f"{row.mesh}: {row.misfit}", highlight=False, style="yellow")
    for line in ASSUMPTIONS:
        console.print(f"* {line}", highlight=False, style="dim")


def _cells(row: MeshPlan) -> tuple[str, ...]:
    assert row.memory is not None and row.decode is not None and row.first_token_s is not None
    assert row.tokens_per_s is not None
    cost = row.decode

    def ms(seconds: float) -> str:
        return f"{1e3 * seconds:.2f} ms"

    prefill = row.prefill
    assert prefill is not None and row.code_bytes is not None
    return (
        f"{row.memory.weights_bytes / GIB:.2f} GiB",
        f"{row.memory.temporary_bytes / 1e6:.0f} MB",
        f"{row.code_bytes / 1e6:.0f} MB",
        f"{row.tokens:,}",
        f"{row.streams}",
        ms(cost.hbm_s),
        ms(cost.products_s),
        ms(cost.links_s),
        f"{ms(cost.seconds)}, {cost.bound}",
        f"{cost.flops / 1e9:,.0f} G",
        f"{(cost.weight_bytes + cost.kv_bytes) / 1e9:.2f} GB",
        f"{cost.collectives} x {cost.sum_bytes / 1e3:.0f} kB",
        f"{ms(prefill.seconds)}, {prefill.bound}",
        f"{row.tokens_per_s:,.0f}",
        ms(row.first_token_s),
    )


def plan_json(plan: Plan) -> str:
    """Everything that is known, with the assumptions."""
    meshes = [asdict(row) | {"tokens_per_s": row.tokens_per_s} for row in plan.meshes]
    return json.dumps(asdict(plan) | {"meshes": meshes, "assumptions": ASSUMPTIONS}, indent=1)
