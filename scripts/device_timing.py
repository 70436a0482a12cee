"""Times on a device: seconds per call from the slope over repetitions inside one program, so that dispatch cancels."""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

LOOP_S = 0.02
"""A loop lasts so long at least: its time has to stand out from that of a dispatch."""
MOST_REPEATS = 1 << 20
SAMPLES = 5


def seconds_per_call(step: Callable[[Any, Any], Any], carry: Any, constants: Any = ()) -> float:
    """Median seconds of ``carry = step(carry, constants)``, which must depend on its own result.

    The carry is donated and given back, as a served pool is. Constants are arguments, since XLA would fold arrays that
    a function captures, and they pass a barrier beside the carry, since XLA would move what depends on them alone (a
    gather, a dequantized weight) out of the loop.
    """

    def loop(count: jax.Array, carry: Any, constants: Any) -> Any:
        def body(_: jax.Array, carry: Any) -> Any:
            return step(*lax.optimization_barrier((carry, constants)))

        return lax.fori_loop(0, count, body, carry)

    compiled = jax.jit(loop, donate_argnums=1).lower(jnp.int32(0), carry, constants).compile()

    def timed(count: int) -> float:
        nonlocal carry
        started = time.perf_counter()
        carry = jax.block_until_ready(compiled(jnp.int32(count), carry, constants))
        return time.perf_counter() - started

    timed(1)
    count = 16
    while timed(count) < LOOP_S and count < MOST_REPEATS:
        count *= 4
    return statistics.median((timed(count) - timed(count // 4)) / (count - count // 4) for _ in range(SAMPLES))


def copy_bytes_per_s(num_bytes: int) -> float:
    """Read plus write rate of adding 1 to an array that no cache holds."""
    x = jnp.zeros(num_bytes // 2, jnp.bfloat16)
    return 2 * num_bytes / seconds_per_call(lambda x, _: x + 1, x)


def matmul_per_s(size: int) -> float:
    """bfloat16 operations per second of a square product."""
    x = jnp.full((size, size), 1 / math.sqrt(size), jnp.bfloat16)
    w = jnp.full((size, size), 1 / math.sqrt(size), jnp.bfloat16)
    seconds = seconds_per_call(lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype), x, w)
    return 2 * size**3 / seconds
