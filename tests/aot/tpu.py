"""Compilation for TPUs that are not there, by the compiler that ships with libtpu, and what must hold of the result.

``prepare`` comes first in a process: it sets what libtpu reads once, when it is loaded.
"""

import functools
import os
import shutil
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from headrace.pallas_kernels.chips import CHIPS
from headrace.pallas_kernels.types import KVPool, UnsupportedCase
from headrace.serving.app.plan import COMPILER_VARIABLES
from tests.aot import hlo
from tests.aot.bundles import init_args, read_dump
from tests.aot.matrix import Built
from tests.aot.outcome import Failing, Outcome, failed

TARGET = "tpu_custom_call"


def prepare(dump: Path) -> None:
    """Make libtpu load without a TPU and write its dump to a folder. Call before anything is compiled."""
    os.environ |= {**COMPILER_VARIABLES, "LIBTPU_INIT_ARGS": init_args(dump)}


@functools.cache
def mesh_of(chip: str) -> Mesh:
    """One device of a chip."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip].topology)
    return Mesh(np.array(topology.devices[:1]), ("one",))


def sharding_of(chip: str) -> NamedSharding:
    """All on one device of a chip."""
    return NamedSharding(mesh_of(chip), PartitionSpec())


def compile_for(chip: str, built: Built) -> jax.stages.Compiled:
    """Pools are row-major, and so are the values of weights that our kernels read. They are by default, with two
    exceptions, which XLA turns around for the kernel: the factors of 8-bit pages of fewer than 128 tokens, on all
    chips, and weights of 64 columns on v5p and TPU7x. Who allocates such an array must ask for it. Nobody does yet: the
    runner refuses such pages, and no model that it serves calls these products.

    Raises: what tracing, Mosaic or XLA raise.
    """
    mesh = built.mesh or mesh_of(chip)

    def place(x: jax.ShapeDtypeStruct) -> Sharding:
        return sharding_of(chip) if built.mesh is None else x.sharding

    def row_major(x: jax.ShapeDtypeStruct) -> Format:
        return Format(Layout(tuple(range(len(x.shape)))), place(x))

    def argument(node: Any) -> Any:
        def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            if x.format.layout is not None:
                return x
            is_row_major = isinstance(node, KVPool) or any(x is leaf for leaf in built.row_major)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=row_major(x) if is_row_major else place(x))

        return jax.tree.map(placed, node)

    arguments = jax.tree.map(argument, built.arguments, is_leaf=_is_pool)

    def result(node: Any) -> Any:
        pools = (argument for argument in arguments if _is_pool(argument))
        return jax.tree.map(lambda x: x.format, next(pools)) if _is_pool(node) else None

    # Under the mesh, so that Pallas asks the topology and not this process's CPU what the device can do.
    with jax.set_mesh(mesh):
        results = jax.tree.map(result, jax.eval_shape(built.function, *arguments), is_leaf=_is_pool)
        jitted = jax.jit(built.function, donate_argnums=built.donated, out_shardings=results)
        return jitted.lower(*arguments).compile()


def _is_pool(node: Any) -> bool:
    return isinstance(node, KVPool)


def check(name: str, chip: str, built: Built, dump: Path, *, needs_kernel: bool) -> Outcome:
    """Compile and look. needs_kernel: a program without a kernel of ours is a failure."""
    shutil.rmtree(dump, ignore_errors=True)
    dump.mkdir(parents=True)
    started_s = time.monotonic()
    try:
        compiled = compile_for(chip, built)
    except UnsupportedCase as error:
        return failed(name, started_s, Failing.UNSUPPORTED, error.why)
    except Exception as error:  # whatever the compiler says is the finding
        return failed(name, started_s, Failing.COMPILER, f"{type(error).__name__}: {error}"[:2000])
    seconds = round(time.monotonic() - started_s, 2)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    kernels = read_dump(dump, hlo.kernel_names(text, TARGET))
    temporary, alias = int(memory.temp_size_in_bytes), int(memory.alias_size_in_bytes)
    failures: list[tuple[Failing, str]] = []
    if alias < built.donated_bytes:
        failures.append((Failing.ALIAS, f"{alias} bytes are aliased, {built.donated_bytes} were donated"))
    bound = built.bound_bytes + built.activation_bytes
    if temporary >= bound:
        failures.append((Failing.TEMPORARY, f"temporaries of {temporary} bytes; the bound is {bound}"))
    failures += [(Failing.COPY, text) for text in copies(text, built)]
    failures += [(Failing.SPILL, f"{n}: {k.spills()} spills and fills") for n, k in kernels.items() if k.spills()]
    if needs_kernel and not kernels:
        failures.append((Failing.KERNEL, "no kernel was compiled"))
    return Outcome(
        name=name,
        seconds=seconds,
        failures=tuple(failures),
        temporary_bytes=temporary,
        alias_bytes=alias,
        kernels=kernels,
    )


def copies(text: str, built: Built) -> list[str]:
    """Instructions that make another array of the size and width of a donated one, wherever it lies, or one in HBM like
    a weight or that reaches the bound."""
    return [
        f"{instruction.opcode} makes {instruction.text[:160]}"
        for instruction in hlo.made(text)
        if any(built.is_copy(shape) for shape in instruction.shapes)
    ]
