"""Random weights, for tests and for measuring shapes without a checkpoint."""

import math
import zlib

import jax
import numpy as np

from headrace.model.config import ModelConfig
from headrace.model.specs import Init, ParamSpec, param_specs
from headrace.model.weights import Weights


def init_weights(cfg: ModelConfig, seed: int, dtype: np.dtype | type = np.float32) -> Weights[np.ndarray]:
    """Host weights drawn from the specs.

    The same seed gives the same bits on every machine and for every order of the tree: each weight has a generator of
    its own, seeded with the seed and its name.

    Args:
      cfg: any valid config. seed: 0 or more. dtype: of the weights; draws are float32.
    """

    def draw(spec: ParamSpec) -> np.ndarray:
        if spec.init is Init.ONES:
            return np.ones(spec.shape, spec.dtype)
        if spec.init is Init.ZEROS:
            return np.zeros(spec.shape, spec.dtype)
        generator = np.random.Generator(np.random.PCG64([seed, zlib.crc32(spec.name.encode())]))
        x = generator.standard_normal(spec.shape, np.float32) * np.float32(1 / math.sqrt(spec.num_inputs))
        return x.astype(spec.dtype, copy=False)

    weights: Weights[np.ndarray] = jax.tree.map(draw, param_specs(cfg, dtype))
    return weights
