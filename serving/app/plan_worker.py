"""A process that compiles one mesh for ``headrace plan``: a job on standard input, its answer in a file.

A process, since a compiler that fails an assertion of its own ends the process that it is in. The programs are those
that would be served, compiled by the compiler of the chip; memory is what that says.
"""

import math
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import msgspec
from jax.errors import JaxRuntimeError

from headrace.model.config import ModelConfig
from headrace.model.config_files import is_gguf, read_config
from headrace.model.on_mesh import config_on_mesh
from headrace.model.published.configurations import PUBLISHED, published_config
from headrace.model.specs import WeightScheme
from headrace.pallas_kernels.chips import Chip, chip_of
from headrace.serving.app.build import DEFAULT_MEMORY_FRACTION, EngineOptions, resolve
from headrace.serving.app.plan_cost import CostModel, stream_numbers
from headrace.serving.app.plan_types import GIB, Compiled, PlanAnswer, PlanJob, PlanRow
from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.errors import ConfigError
from headrace.serving.core.kv_memory import DeviceMemory
from headrace.serving.core.plan import Bucket
from headrace.serving.runner.arrays import pool_shapes, state_shapes
from headrace.serving.runner.backend import Backend, Wishes, choose_backend, find_mesh
from headrace.serving.runner.forms import with_forms
from headrace.serving.runner.inputs import InputLayout
from headrace.serving.runner.memory import known_arguments, measure
from headrace.serving.runner.programs import program_name, step_program
from headrace.serving.runner.weights import backend_specs, weight_shapes
from headrace.sharding.errors import MeshError
from headrace.sharding.mesh_shape import MeshShape, parse_mesh
from headrace.sharding.slices import Slice, parse_slice
from headrace.sharding.topologies import group_along, topology_devices

DECODE_PAGES = 64
"""Of the pool that the decode program is compiled with: its code does not depend on their number."""


def main() -> int:
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=PlanJob)
    Path(sys.argv[1]).write_bytes(msgspec.msgpack.encode(answer(job)))
    return 0


def answer(job: PlanJob) -> PlanAnswer:
    """Compile, and count for each place."""
    slices = [parse_slice(place.topology) for place in job.places]
    shape = parse_mesh(job.mesh)
    try:
        devices = {of: topology_devices(of) for of in slices}
        config = published_config(job.model) if job.model in PUBLISHED else read_config(job.model)
        cfg = config_on_mesh(config, shape)
    except MeshError as error:
        return PlanAnswer(refusal=str(error))
    first = devices[slices[0]]
    chip = chip_of(first[0].device_kind)
    backend = choose_backend(first[0], wishes(job.options, slices[0]), find_mesh(first[0], shape, first))
    found: Compiled | str
    try:
        backend = as_served(backend, job.model)
        work = _Work(job=job, config=config, cfg=cfg, chip=chip, backend=backend)
        found = work.compiled()
    except ConfigError as error:
        found = f"would not start: {error}"
    rows = []
    for of, place in zip(slices, job.places, strict=True):
        row = PlanRow(
            topology=str(of),
            mesh=str(replace(shape, data=place.data)),
            chips=of.num_chips,
            devices=of.num_devices,
            data=place.data,
        )
        rows.append(
            replace(row, misfit=found) if isinstance(found, str) else work.counted(row, found, shape, of, devices[of])
        )
    return PlanAnswer(rows=tuple(rows), weights=weights_text(backend), kv_dtype=backend.kv_dtype.name)


def as_served(backend: Backend, model: str) -> Backend:
    """With the forms that weights of a GGUF file keep, as the engine has them. model: published name or path.

    Raises: ConfigError naming a weight that the mesh cannot cut.
    """
    return backend if model in PUBLISHED or not is_gguf(model) else with_forms(backend, model)


def weights_text(backend: Backend) -> str:
    if backend.weights is not WeightScheme.NATIVE:
        return backend.weights.value
    return f"as the file has them, else {backend.dtype.name}" if backend.forms else backend.dtype.name


def wishes(options: EngineOptions, of: Slice) -> Wishes:
    return Wishes(attention=of.kind.platform, dtype=options.dtype, weights=options.weights, kv_dtype=options.kv_dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """config: of the model. cfg: on the mesh."""

    job: PlanJob
    config: ModelConfig
    cfg: ModelConfig
    chip: Chip
    backend: Backend

    @property
    def limits(self) -> dict[str, Any]:
        fraction = self.job.options.memory_fraction or DEFAULT_MEMORY_FRACTION
        return {"limit_bytes": self.chip.hbm_bytes, "fraction": fraction}

    @property
    def shape(self) -> MeshShape:
        return self.backend.mesh_shape

    def scheduler(self, pages: int) -> SchedulerConfig:
        options = replace(self.job.options, pages=pages, memory_fraction=None)
        return resolve(options, self.cfg, self.backend.kv_format).scheduler

    def compiled(self) -> Compiled | str:
        """Or why it does not fit."""
        # The compiler refuses what is larger than the device, so that is counted first: without padding, then with it.
        why = misfit(self._unpadded()) or misfit(self._padded())
        if why is not None:
            return why
        started_s, code = time.monotonic(), {}

        def look(bucket: Bucket, compiled: jax.stages.Compiled) -> None:
            name = program_name(bucket)
            # XLA:GPU says 0.
            code[name] = int(compiled.memory_analysis().generated_code_size_in_bytes) or None
            if self.job.keep_hlo is not None:
                file = f"{self.job.places[0].topology.replace(':', '-')}-{self.job.mesh}-{name}.txt"
                (Path(self.job.keep_hlo) / file).write_text(compiled.as_text())

        try:
            with ThreadPoolExecutor(1, thread_name_prefix="decode") as beside:
                decode = beside.submit(self._compile_decode, look)
                memory = measure(self.config, self.scheduler(2), self.backend, **self.limits, look=look)
                decode.result()
        except JaxRuntimeError as error:
            return compiler_says(str(error))
        except ConfigError as error:
            return f"does not fit: {error}"
        why = misfit(memory)
        if why is not None:
            return why
        page = self.scheduler(2).page_size
        tokens = (memory.num_pages - 1) * page
        work = self.job.work
        if tokens // page < math.ceil((work.prompt + work.output) / page):
            return f"no request of {work.prompt + work.output} tokens fits into {tokens} tokens of KV"
        return Compiled(
            memory=memory,
            code_bytes=dict(sorted(code.items())),
            tokens=tokens,
            layer_kv_bytes=memory.num_pages * memory.page_bytes * self.shape.stage // self.cfg.num_layers,
            seconds=time.monotonic() - started_s,
            cpu_seconds=time.process_time(),
        )

    def _unpadded(self) -> DeviceMemory:
        scheduler = self.scheduler(2)
        return DeviceMemory(
            weights_bytes=device_bytes(weight_shapes(self.cfg, self.backend)),
            state_bytes=device_bytes(state_shapes(self.cfg, scheduler, self.backend)),
            page_bytes=device_bytes(pool_shapes(self.cfg, scheduler, self.backend)) // 2,
            temporary_bytes=0,
            steps_bytes=0,
            **self.limits,
        )

    def _padded(self) -> DeviceMemory:
        return known_arguments(self.cfg, self.scheduler(2), self.backend, **self.limits)

    def _compile_decode(self, look: Any) -> None:
        """The largest decode program; a mixed one is what ``measure`` compiles."""
        config = self.scheduler(DECODE_PAGES)
        bucket = [bucket for bucket in config.buckets if not bucket.prefill_tokens][-1]
        layout = InputLayout(bucket, config, self.cfg.vocab_size)
        shapes = (
            weight_shapes(self.cfg, self.backend),
            pool_shapes(self.cfg, config, self.backend),
            state_shapes(self.cfg, config, self.backend),
        )
        look(bucket, step_program(self.cfg, layout, self.backend, *shapes).compile(self.backend.device))

    def counted(
        self, row: PlanRow, found: Compiled, shape: MeshShape, of: Slice, devices: Sequence[jax.Device]
    ) -> PlanRow:
        work, options = self.job.work, self.job.options
        scheduler = self.scheduler(2)
        page = scheduler.page_size
        costs = CostModel(
            cfg=self.cfg,
            mesh=shape,
            chip=self.chip,
            specs=backend_specs(self.cfg, self.backend),
            token_bytes=found.memory.page_bytes / page,
            lies=lambda axes: group_along(of, devices, shape, axes),
            rungs=scheduler.decode_rows,
            block_tokens=scheduler.block_tokens,
        )
        most = min(options.num_slots, found.tokens // page // math.ceil((work.prompt + work.output) / page))
        alone = costs.alone(work, options.chunk_tokens)
        return replace(
            row,
            compiled=found,
            alone=alone,
            first_token_s=math.ceil(work.prompt / options.chunk_tokens) * alone.seconds,
            points=tuple(costs.point(streams, work, options.chunk_tokens) for streams in stream_numbers(most)),
        )


def device_bytes(tree: Any) -> int:
    """Of the parts that one device has, unpadded."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def misfit(memory: DeviceMemory) -> str | None:
    """How much is missing for two pages, and what takes most."""
    usable = int(memory.limit_bytes * memory.fraction)
    short = memory.total_bytes(2) - usable
    if short <= 0:
        return None
    parts = {"weights": memory.weights_bytes, "temporaries": memory.temporary_bytes, "state": memory.state_bytes}
    largest = max(parts, key=lambda part: parts[part])
    return (
        f"does not fit: short by {short / GIB:.2f} GiB in {largest}, which take {parts[largest] / GIB:.2f} of the "
        f"{usable / GIB:.2f} GiB to be used of a device"
    )


def compiler_says(message: str) -> str:
    """Why a program was not compiled, from the compiler's message; memory as misfit gives it."""
    line = message.splitlines()[0][:300]
    found = re.search(r"temporaries \(([\d.]+)G\) exceeds available HBM \(([\d.]+)G\)", message)
    if found:
        short = float(found[1]) - float(found[2])
        return f"does not fit: short by {short:.2f} GiB in temporaries, which take {found[1]} of {found[2]} GiB"
    found = re.search(r"[Ee]xceeded hbm capacity by ([\d.]+)([GM])", message)
    if found:
        short = float(found[1]) / (1 if found[2] == "G" else 1024)
        return f"does not fit: short by {short:.2f} GiB in a program with its arguments: {line}"
    return f"was not compiled: {line}"


if __name__ == "__main__":
    raise SystemExit(main())
