"""Planted faults, each of which the checks of ``cuda.py`` must find."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from headrace.pallas_kernels import api
from headrace.pallas_kernels.paged_attention.gpu_decode import GpuDecodeBlocks
from headrace.pallas_kernels.paged_attention.gpu_prefill import GpuPrefillBlocks
from headrace.pallas_kernels.types import Implementation, Kernels
from tests.aot.matrix import Built, Entry, Operation, build
from tests.aot.outcome import Failing

CHIP = "h100"


class _WithBlocks(Entry):
    """An entry whose block sizes are given."""

    __slots__ = ()

    @property
    def kernels(self) -> Kernels:
        return Kernels(implementation=Implementation.GPU, chip=CHIP, blocks=BLOCKS[self.operation])


BLOCKS: dict[Operation, tuple[Hashable, ...]] = {
    Operation.PREFILL: (GpuPrefillBlocks(rows=128, keys=128, num_warps=4, stages=2),),
    Operation.DECODE: (GpuDecodeBlocks(keys=256, splits=2, num_warps=8, stages=7),),
}


def _built(kind: type[Entry], operation: Operation, dtype: str, head_dim: int) -> Built:
    return build(kind(chip=CHIP, operation=operation, dtype=dtype, head_dim=head_dim, kv_heads=8, page_tokens=64))


def pool_not_donated() -> Built:
    """XLA has to copy the pool before it is written."""
    return replace(_built(Entry, Operation.WRITE, "int8", 128), donated=())


def old_pool_read() -> Built:
    """One value of the old pool is read after the write, at a place that only the written pool tells."""
    built = _built(Entry, Operation.WRITE, "int8", 128)

    def call(new: Any, pool: Any, *rest: Any) -> Any:
        written = built.function(new, pool, *rest)
        return written, pool.pages_RKWC[written.pages_RKWC[0, 0, 0, 0].astype(jnp.int32) & 1]

    return replace(built, function=call)


def pool_added_to() -> Built:
    """A one is added to every page: a pass over the pool that is not called copy, and that donation lets pass."""
    built = _built(Entry, Operation.WRITE, "int8", 128)

    def call(new: Any, pool: Any, *rest: Any) -> Any:
        written = built.function(new, pool, *rest)
        return written.replace(pages_RKWC=written.pages_RKWC + jnp.int8(1))

    return replace(built, function=call)


def weight_dequantized() -> Built:
    """The product that XLA makes of group scales: a weight of bfloat16 in memory."""
    built = _built(Entry, Operation.QUANT, "int8g32", 128)

    def call(x: Any, weight: Any) -> Any:
        scale = jnp.repeat(weight.scale_GN, weight.group, axis=0)
        return jnp.dot(x, weight.values_KN.astype(x.dtype) * scale, preferred_element_type=jnp.float32)

    return replace(built, function=call)


def spill() -> Built:
    """Sums and scores of 128 x 128 each, over 4 warps, need 256 registers of a thread; it has 255."""
    return _built(_WithBlocks, Operation.PREFILL, "bf16", 128)


def shared_memory_overflow() -> Built:
    """Three steps of 256 keys and values of 512 bytes each are in flight: 768 KiB."""
    return _built(_WithBlocks, Operation.DECODE, "bf16", 256)


def reference_in_place_of_kernel() -> Built:
    """A silent fallback: right numbers, and no kernel."""
    built = _built(Entry, Operation.QUANT, "int8g32", 128)
    return replace(built, function=lambda x, weight: api.quant_matmul(x, weight, kernels=Kernels()))


FAULTS: dict[str, tuple[Callable[[], Built], Failing, str]] = {
    "pool not donated": (pool_not_donated, Failing.COPY, ""),
    "old pool read": (old_pool_read, Failing.COPY, ""),
    "pool added to": (pool_added_to, Failing.COPY, ""),
    "weight dequantized": (weight_dequantized, Failing.TEMPORARY, ""),
    "spill": (spill, Failing.SPILL, ""),
    "shared memory overflow": (shared_memory_overflow, Failing.COMPILER, "shared memory"),
    "reference in place of a kernel": (reference_in_place_of_kernel, Failing.KERNEL, ""),
}
"""Name -> (what to compile, the check that must fail, a word of its message)."""
