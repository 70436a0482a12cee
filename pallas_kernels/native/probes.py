"""Custom calls that measure the machine and the thread team: a pure read of buffers, and one with nearly no work."""

import jax
import jax.numpy as jnp
import numpy as np

from headrace.pallas_kernels.native.library import load


def stream(*buffers: jax.Array) -> jax.Array:
    """Read all bytes once with all threads of XLA's pool: the machine's limit for whatever must read them.

    buffers: any, each a multiple of 8 bytes. Returns u32 [2], the XOR of their 64-bit words, lower half first.
    """
    load()
    return jax.ffi.ffi_call("HeadraceStream", jax.ShapeDtypeStruct((2,), jnp.uint32))(*buffers)


def nop(x_N: jax.Array, num_items: int) -> tuple[jax.Array, jax.Array]:
    """x + 1, cut into items that the team's threads take.

    x_N: i32. num_items: at least 1; more than N are allowed. Returns: (i32 [N], i32 [1] threads of XLA's pool).
    """
    load()
    out = jax.ShapeDtypeStruct(x_N.shape, jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    y_N, threads = jax.ffi.ffi_call("HeadraceNop", out)(x_N, num_items=np.int32(num_items))
    return y_N, threads
