"""Planted faults, each of which the checks of ``tpu.py`` must find."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from headrace.pallas_kernels.chips import CHIPS, MIB
from tests.aot.matrix import PAGE_TOKENS, Built, Entry, Operation, array, build
from tests.aot.outcome import Failing

CHIP = "v6e"
LIVE_VALUES = 160
"""Registers of 8 x 128 that a loop carries; a core has 64."""


def vmem_overflow() -> Built:
    """Scratch twice as large as the chip's VMEM."""
    rows = 2 * CHIPS[CHIP].on_chip_bytes // (1024 * 4)

    def kernel(x: Any, out: Any, scratch: Any) -> None:
        scratch[:8] = x[...]
        out[...] = scratch[:8] + scratch[rows - 8 :]

    def call(x: Any) -> Any:
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            scratch_shapes=[pltpu.VMEM((rows, 1024), jnp.float32)],
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=CHIPS[CHIP].on_chip_bytes - 4 * MIB),
        )(x)

    return _plain(call, array((8, 1024), jnp.float32))


def smem_overflow() -> Built:
    """A prefetched page table of 4 MiB; scalar memory has 1."""

    def kernel(table: Any, x: Any, out: Any) -> None:
        out[...] = x[...] + table[0].astype(jnp.float32)

    def call(table: Any, x: Any) -> Any:
        block = pl.BlockSpec((8, 1024), lambda i, table: (0, 0))
        grid = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(1,), in_specs=[block], out_specs=block)
        return pl.pallas_call(kernel, grid_spec=grid, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(table, x)

    return _plain(call, array((MIB,), jnp.int32), array((8, 1024), jnp.float32))


def _write() -> Built:
    entry = Entry(
        chip=CHIP,
        operation=Operation.WRITE,
        dtype="int8",
        head_dim=128,
        kv_heads=8,
        page_tokens=PAGE_TOKENS[CHIPS[CHIP].implementation],
    )
    return build(entry)


def pool_not_donated() -> Built:
    """XLA has to copy the pool before it is written."""
    built = _write()
    return Built(
        function=built.function,
        arguments=built.arguments,
        donated=(),
        donated_bytes=built.donated_bytes,
        bound_bytes=built.bound_bytes,
    )


def old_pool_read() -> Built:
    """One value of the old pool is read after the write, which the write in place would have destroyed."""
    built = _write()

    def call(new: Any, pool: Any, *rest: Any) -> Any:
        written = built.function(new, pool, *rest)
        pages, _ = lax.optimization_barrier((pool.pages_RKWC, written.pages_RKWC[0, 0, 0, 0]))
        return written, pages[1, 0, 0, 0]

    return Built(
        function=call,
        arguments=built.arguments,
        donated=built.donated,
        donated_bytes=built.donated_bytes,
        bound_bytes=built.bound_bytes,
    )


def pool_added_to() -> Built:
    """A one is added to every page: a copy that is not called copy, and that donation alone would let pass."""
    built = _write()

    def call(new: Any, pool: Any, *rest: Any) -> Any:
        written = built.function(new, pool, *rest)
        return written.replace(pages_RKWC=written.pages_RKWC + jnp.int8(1))

    return Built(
        function=call,
        arguments=built.arguments,
        donated=built.donated,
        donated_bytes=built.donated_bytes,
        bound_bytes=built.bound_bytes,
    )


def spill() -> Built:
    """A loop that carries more values than there are registers."""

    def kernel(x: Any, out: Any) -> None:
        def step(_: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(a * b + 1.0 for a, b in zip(values, (*values[1:], values[0]), strict=True))

        values = lax.fori_loop(0, 64, step, tuple(x[i] for i in range(LIVE_VALUES)))
        for i, value in enumerate(values):
            out[i] = value

    def call(x: Any) -> Any:
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="spilling")(x)

    return _plain(call, array((LIVE_VALUES, 8, 128), jnp.float32))


def _plain(call: Callable[..., Any], *arguments: Any) -> Built:
    return Built(function=call, arguments=arguments, donated=(), donated_bytes=0, bound_bytes=1 << 40)


FAULTS: dict[str, tuple[Callable[[], Built], Failing, str]] = {
    "vmem overflow": (vmem_overflow, Failing.COMPILER, "vmem"),
    "smem overflow": (smem_overflow, Failing.COMPILER, "smem"),
    "pool not donated": (pool_not_donated, Failing.COPY, ""),
    "old pool read": (old_pool_read, Failing.COPY, ""),
    "pool added to": (pool_added_to, Failing.COPY, ""),
    "spill": (spill, Failing.SPILL, ""),
}
"""Name -> (what to compile, the check that must fail, a word of its message)."""
