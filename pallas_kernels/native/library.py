"""The shared library of CPU kernels: compiled on first use, loaded, and registered with XLA."""

import ctypes
import functools
from pathlib import Path

import jax

from headrace.pallas_kernels.native.build import built

PLATFORM = "cpu"
TARGETS: tuple[str, ...] = ("headrace_fused_matmul", "headrace_best_column", "headrace_columns")
"""Symbols of FFI handlers; each is registered under its own name."""


@functools.cache
def load() -> Path:
    """Compile the library where need be, load it, and register its handlers; once in each process. Returns its path.

    Raises: BuildError: there is no compiler, or it failed.
    """
    path = built()
    library = ctypes.CDLL(str(path))
    for target in TARGETS:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform=PLATFORM)
    return path
