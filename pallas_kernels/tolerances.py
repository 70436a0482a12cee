"""How far a kernel may be from its reference: stated once, for tests and for the check on a device.

The reference computes in float32 from the very values that the kernel reads, so only the kernel's own rounding counts:
products of bfloat16 (8 bits of mantissa, 2^-9 each way), a probability rounded to bfloat16 before it meets a value,
and a bfloat16 result. Errors are relative to the largest magnitude of the result.
"""

import jax.numpy as jnp
import numpy as np

OF_COMPUTE_DTYPE = {jnp.dtype(jnp.float32): 2e-5, jnp.dtype(jnp.bfloat16): 1.6e-2}
"""By the type of the kernel's products: that of the activations (queries)."""


def relative_error(out: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference over the largest expected magnitude. NaN where either holds one."""
    out, expected = np.asarray(out, np.float64), np.asarray(expected, np.float64)
    if not out.size:
        return 0.0
    return float(np.abs(out - expected).max() / max(np.abs(expected).max(), 1e-30))


def tolerance(compute_dtype: jnp.dtype) -> float:
    """Bound on relative_error."""
    return OF_COMPUTE_DTYPE[jnp.dtype(compute_dtype)]
