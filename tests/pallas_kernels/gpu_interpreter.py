"""GPU kernels in Pallas' plain interpreter, as their tests use it."""

from headrace.pallas_kernels.types import Implementation, Kernels

GPU = Kernels(implementation=Implementation.GPU, chip="h100", interpret=True)
FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""For jax.jit: these programs run for milliseconds, and half of their seconds of compilation go into optimization."""
