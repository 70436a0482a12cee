"""The programs that copy KV pages to host memory and back, of Llama-3.1-8B, as the runner compiles them."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import jax
import jax.numpy as jnp
import numpy as np

from headrace.model.on_mesh import config_on_mesh
from headrace.serving.core.config import SchedulerConfig
from headrace.serving.runner.arrays import pool_shapes
from headrace.serving.runner.backend import Backend
from headrace.serving.runner.swap import swap_programs
from headrace.sharding.mesh import make_mesh
from headrace.sharding.mesh_shape import MeshShape
from tests.aot.matrix import BLOCK_TOKENS, BLOCKS, MOST_TOKENS, Built
from tests.aot.outcome import Failing, Outcome, failed
from tests.aot.steps import MODELS, PAGE_TOKENS, SLOTS, device_bytes

MESHED = ("v6e", "v6e:2x2", MeshShape(data=2, tensor=2))


class Direction(StrEnum):
    OUT = "out"
    IN = "in"


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """topology: slice of chips, None: one chip."""

    chip: str
    kv_dtype: str
    direction: Direction
    topology: str | None = None
    shape: MeshShape = MeshShape()

    @property
    def name(self) -> str:
        place = self.chip if self.topology is None else f"{self.topology} {self.shape}"
        return f"{place} swap {self.direction}, {self.kv_dtype} pages"


def swaps(chips: Sequence[str]) -> Iterator[Swap]:
    for chip in chips:
        for kv_dtype in PAGE_TOKENS:
            for direction in Direction:
                yield Swap(chip=chip, kv_dtype=kv_dtype, direction=direction)
    chip, topology, shape = MESHED
    if chip in chips:
        for direction in Direction:
            yield Swap(chip=chip, kv_dtype="int8", direction=direction, topology=topology, shape=shape)


def build_swap(swap: Swap, devices: Sequence[jax.Device] = ()) -> Built:
    """devices: of the chip, or of the mesh. A temporary may be as large as what one call copies."""
    page = PAGE_TOKENS[swap.kv_dtype]
    config = SchedulerConfig(
        num_lanes=swap.shape.data,
        num_slots=SLOTS,
        page_size=page,
        num_pages=SLOTS * MOST_TOKENS // page + 1,
        max_context=MOST_TOKENS,
        chunk_tokens=BLOCKS * BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        decode_rows=(SLOTS,),
        prefill_tokens=(BLOCKS * BLOCK_TOKENS,),
        num_swap_pages=SLOTS * MOST_TOKENS // page,
    )
    backend = Backend(
        device=devices[0] if devices else None,
        mesh=None if swap.topology is None else make_mesh(swap.shape, devices),
        dtype=np.dtype(jnp.bfloat16),
        kv_dtype=np.dtype(jnp.dtype(swap.kv_dtype)),
    )
    cfg = config_on_mesh(MODELS["llama-3.1-8b"], swap.shape)
    pool = pool_shapes(cfg, config, backend)
    program = swap_programs(pool, config, backend)[swap.direction is Direction.IN]
    return Built(
        function=program.function,
        arguments=program.arguments,
        donated=program.donated,
        donated_bytes=device_bytes([program.arguments[i] for i in program.donated]),
        bound_bytes=device_bytes(pool) // cfg.num_layers,
        mesh=backend.mesh,
    )


def check(name: str, built: Built, compile_it: Callable[[Built], jax.stages.Compiled]) -> Outcome:
    """A write in place looks like an array that is made, so no instruction is looked for: a copy of the pool would be a
    temporary."""
    started_s = time.monotonic()
    try:
        memory = compile_it(built).memory_analysis()
    except Exception as error:  # whatever the compiler says is the finding
        return failed(name, started_s, Failing.COMPILER, f"{type(error).__name__}: {error}"[:2000])
    temporary, alias = int(memory.temp_size_in_bytes), int(memory.alias_size_in_bytes)
    failures: list[tuple[Failing, str]] = []
    if alias < built.donated_bytes:
        failures.append((Failing.ALIAS, f"{alias} bytes are aliased, {built.donated_bytes} were donated"))
    if temporary >= built.bound_bytes:
        failures.append((Failing.TEMPORARY, f"temporaries of {temporary} bytes; the bound is {built.bound_bytes}"))
    return Outcome(
        name=name,
        seconds=round(time.monotonic() - started_s, 2),
        failures=tuple(failures),
        temporary_bytes=temporary,
        alias_bytes=alias,
    )
