"""Weights of small models that only have to be the same everywhere: by seed and by the name that a file gives them.

NumPy only: the script that records golden files runs where JAX is not, the tests where torch is not.
"""

import hashlib
import math
import zlib
from collections.abc import Mapping

import numpy as np


def draw(seed: int, shapes: Mapping[str, list[int]]) -> dict[str, np.ndarray]:
    """float32 tensors of a Hugging Face file; each has a generator of its own."""
    return {name: _draw(seed, name, tuple(shape)) for name, shape in shapes.items()}


def digest(tensors: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over names and bytes."""
    whole = hashlib.sha256()
    for name in sorted(tensors):
        whole.update(name.encode() + b"\0" + tensors[name].astype("<f4").tobytes())
    return whole.hexdigest()


def _draw(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    generator = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
    x = generator.standard_normal(shape, np.float32)
    if name.endswith("norm.weight"):
        return np.float32(1) + np.float32(0.1) * x
    if name.endswith(("bias", "sinks")):
        return np.float32(0.5) * x
    # The last axis is near enough to the number of inputs. Gates of gpt-oss must reach the limit at which they are cut.
    scale = 4.0 if name.endswith("gate_up_proj") else 1.0
    return np.float32(scale / math.sqrt(shape[-1])) * x
