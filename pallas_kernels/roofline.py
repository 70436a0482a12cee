"""What a call must move and multiply, and the time that takes at a chip's full rates: a bound, not a forecast."""

from dataclasses import dataclass

import jax.numpy as jnp

from headrace.pallas_kernels.chips import Chip


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """bytes: to and from HBM, each needed byte once. flops: of matrix products, a multiply-add counting two."""

    bytes: int
    flops: int

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(bytes=self.bytes + other.bytes, flops=self.flops + other.flops)


def roofline_s(cost: Cost, chip: Chip) -> float:
    """Seconds that HBM or the matrix units need at least, at the bfloat16 rate."""
    return max(cost.bytes / chip.hbm_bytes_per_s, cost.flops / chip.matmul_bf16_per_s)


def stored_bytes(count: int, dtype: str | jnp.dtype) -> int:
    """Bytes of count values; two 4-bit values share one."""
    bits = 4 if jnp.dtype(dtype) == jnp.int4 else 8 * jnp.dtype(dtype).itemsize
    return -(-count * bits // 8)
