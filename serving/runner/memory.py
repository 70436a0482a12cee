"""What a device's memory will be used for, from the compiler and before anything is allocated.

Arguments are measured on a program that takes them and does nothing, so that padded layouts count as they are;
temporaries on the largest step, with half of the pages that would fit without temporaries: a pool of a realistic size,
and certainly not more than the device has. With kernels temporaries hardly depend on the number of pages (2% on v6e:
decision 28). The plain XLA of the reference may copy the pool: XLA:CPU computes in float32 what it has no narrow floats
for, XLA:TPU scatters into a copy of 8-bit pools. So its temporaries are measured with two numbers of pages, and on the
smallest step too, where XLA unrolls loops and then fuses otherwise.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from headrace.model.config import ModelConfig
from headrace.model.on_mesh import config_on_mesh
from headrace.pallas_kernels.types import Implementation
from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.errors import ConfigError
from headrace.serving.core.kv_memory import DeviceMemory
from headrace.serving.core.plan import Bucket
from headrace.serving.runner.arrays import pool_shapes, state_shapes
from headrace.serving.runner.backend import Backend, describe_device, platform_of
from headrace.serving.runner.expert_counts import count_shapes
from headrace.serving.runner.inputs import InputLayout
from headrace.serving.runner.programs import step_program
from headrace.serving.runner.swap import swap_shape
from headrace.serving.runner.warmup import Program
from headrace.serving.runner.weights import weight_shapes

SAMPLE_PAGES = 8
"""Pages that are measured together, and divided by: a single one could get a layout of its own."""
Look = Callable[[Bucket, jax.stages.Compiled], None]


def _nothing(bucket: Bucket, compiled: jax.stages.Compiled) -> None:
    """Look at nothing."""


def free_bytes(devices: Sequence[jax.Device]) -> int | None:
    """What may be allocated now on each of a mesh's devices: JAX's own limit less what is allocated, or a share of the
    free memory where they are CPUs. None: one does not say."""
    if platform_of(devices[0]) == "cpu":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(devices)
    known = [device.memory_stats() or {} for device in devices]
    if any("bytes_limit" not in stats for stats in known):
        return None
    return min(int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0)) for stats in known)


def limit_of(devices: Sequence[jax.Device]) -> int:
    """``free_bytes``. Raises: ConfigError where a device does not say."""
    free = free_bytes(devices)
    if free is None:
        raise ConfigError(
            f"--memory-fraction: {describe_device(devices[0])} does not say how much memory it has; give --kv-memory"
        )
    return free


def check_pages(cfg: ModelConfig, config: SchedulerConfig, backend: Backend, *, limit_bytes: int) -> None:
    """Refuse a number of pages that was given and cannot fit, before minutes of compiling. Nothing is compiled that
    takes time, so temporaries are not counted.

    Raises: ConfigError with the sum.
    """
    known = known_arguments(
        config_on_mesh(cfg, backend.mesh_shape), config, backend, limit_bytes=limit_bytes, fraction=1.0
    )
    if known.total_bytes(config.num_pages) > limit_bytes:
        most = max((limit_bytes - known.fixed_bytes) // known.page_bytes, 0)
        raise ConfigError(
            f"{config.num_pages:,} KV pages take {config.num_pages * known.page_bytes:,}; of {limit_bytes:,} bytes "
            f"weights take {known.weights_bytes:,} and sampling state {known.state_bytes:,}: room for {most:,} pages. "
            f"Give less as --pages or --kv-memory, or neither: --memory-fraction finds what fits"
        )


def measure(
    cfg: ModelConfig,
    config: SchedulerConfig,
    backend: Backend,
    *,
    limit_bytes: int,
    fraction: float,
    look: Look = _nothing,
) -> DeviceMemory:
    """What the engine of this model and these buckets takes, on each device; config.num_pages is not looked at, and
    nothing is placed on a device. look: gets each step that is compiled for it.

    Raises: ConfigError naming --attention where its kernels cannot run the largest step.
    """
    cfg = config_on_mesh(cfg, backend.mesh_shape)
    known = known_arguments(cfg, config, backend, limit_bytes=limit_bytes, fraction=fraction)
    placed, state = weight_shapes(cfg, backend), state_shapes(cfg, config, backend)

    def program(bucket: Bucket, pages: int) -> _Sizes:
        layout = InputLayout(bucket, config, cfg.vocab_size)
        pool = pool_shapes(cfg, replace(config, num_pages=pages), backend)
        return _sizes(step_program(cfg, layout, backend, placed, pool, state), backend, bucket, look)

    pages = max(known.num_pages // 2, 4)
    largest = program(config.buckets[-1], pages)
    lines = [(largest.temporary, 0)]
    if backend.kernels.implementation is Implementation.REFERENCE:
        few = pages // 2
        first, last = config.buckets[0], config.buckets[-1]
        lines = [
            _line(program(last, few).temporary, few, largest.temporary, pages),
            _line(program(first, few).temporary, few, program(first, pages).temporary, pages),
        ]
    return replace(
        known,
        temporary_bytes=max(fixed for fixed, _ in lines),
        page_temporary_bytes=max(growth for _, growth in lines),
        steps_bytes=config.max_steps_in_flight * (largest.packed + largest.results)
        + _swap_bytes(cfg, known, config, backend),
    )


def _swap_bytes(cfg: ModelConfig, known: DeviceMemory, config: SchedulerConfig, backend: Backend) -> int:
    """Of pages on their way to host memory or back; where the device is the host, of the swap space itself too."""
    if not config.num_swap_pages:
        return 0
    sized = replace(config, num_pages=known.num_pages)
    pages = swap_shape(pool_shapes(cfg, sized, backend), sized).staged_pages(sized)
    if backend.device is None or platform_of(backend.device) == "cpu":
        pages += config.num_swap_pages
    return pages * known.page_bytes


def known_arguments(
    cfg: ModelConfig, config: SchedulerConfig, backend: Backend, *, limit_bytes: int, fraction: float
) -> DeviceMemory:
    """What lives from start to end; temporaries and steps are 0, and nothing is compiled that takes time. cfg: on the
    backend's mesh."""
    sample = pool_shapes(cfg, replace(config, num_pages=SAMPLE_PAGES), backend)
    return DeviceMemory(
        limit_bytes=limit_bytes,
        fraction=fraction,
        weights_bytes=argument_bytes(weight_shapes(cfg, backend), backend),
        state_bytes=argument_bytes((state_shapes(cfg, config, backend), count_shapes(cfg, backend)), backend),
        temporary_bytes=0,
        steps_bytes=0,
        page_bytes=-(-argument_bytes(sample, backend) // SAMPLE_PAGES),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Bytes of one compiled step: temporaries, packed inputs, results that are not a donated argument."""

    temporary: int
    packed: int
    results: int


def _sizes(program: Program, backend: Backend, bucket: Bucket, look: Look) -> _Sizes:
    compiled = program.compile(backend.device)
    look(bucket, compiled)
    found = compiled.memory_analysis()
    return _Sizes(
        temporary=int(found.temp_size_in_bytes),
        packed=argument_bytes(program.arguments[-1], backend),
        results=max(int(found.output_size_in_bytes - found.alias_size_in_bytes), 0),
    )


def _line(less: int, few: int, more: int, pages: int) -> tuple[int, int]:
    """(bytes of no page, bytes of each page) through two measurements."""
    growth = max(0, -(-(more - less) // (pages - few)))
    return max(less - growth * few, more - growth * pages, 0), growth


def argument_bytes(tree: Any, backend: Backend) -> int:
    """Bytes of arrays of these shapes on the device, in the layout that programs get them in."""
    nothing = Program(function=lambda _: 0, donated=(), arguments=(tree,), keep_unused=True)
    return int(nothing.compile(backend.device).memory_analysis().argument_size_in_bytes)
