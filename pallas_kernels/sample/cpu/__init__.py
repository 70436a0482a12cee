"""Drawing one id of each row of logits on CPU: a custom call into the native library."""

import jax
import jax.numpy as jnp

from headrace.pallas_kernels.native import library
from headrace.pallas_kernels.types import Kernels, UnsupportedCase

MAX_IDS = 1 << 24
"""Counts of candidates are float32, exact up to here."""


def draw(
    logits_RV: jax.Array,
    real_R: jax.Array,
    temperature_R: jax.Array,
    top_k_R: jax.Array,
    top_p_R: jax.Array,
    min_p_R: jax.Array,
    uniform_R: jax.Array,
    kernels: Kernels,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See ``headrace.pallas_kernels.api.draw``."""
    del kernels  # the same in every mode
    if logits_RV.ndim != 2 or logits_RV.dtype != jnp.float32:
        raise UnsupportedCase(f"logits of {logits_RV.dtype} {logits_RV.shape}; they are float32 [R, V]")
    rows, size = logits_RV.shape
    if not 1 <= size <= MAX_IDS:
        raise UnsupportedCase(f"{size} ids; 1 to {MAX_IDS}")
    given = {"real": real_R, "temperature": temperature_R, "top_k": top_k_R, "top_p": top_p_R, "min_p": min_p_R}
    for name, values in (given | {"uniform": uniform_R}).items():
        if values.shape != (rows,):
            raise UnsupportedCase(f"{name} of shape {values.shape} for {rows} rows")
    library.load()
    call = jax.ffi.ffi_call(
        "HeadraceDraw", tuple(jax.ShapeDtypeStruct((rows,), dtype) for dtype in (jnp.int32, jnp.bool_, jnp.bool_))
    )
    floats = [values.astype(jnp.float32) for values in (temperature_R, top_p_R, jnp.log(min_p_R), uniform_R)]
    return tuple(
        call(logits_RV, real_R.astype(jnp.int32), floats[0], top_k_R.astype(jnp.int32), floats[1], *floats[2:])
    )
