"""Random weights, for tests and for measuring shapes without a checkpoint."""

import math
import zlib
from typing import Any

import jax
import numpy as np

from headrace.model.config import ModelConfig
from headrace.model.group_quant import quantized
from headrace.model.specs import Init, ParamSpec, WeightScheme, param_specs
from headrace.model.weights import Weights
from headrace.pallas_kernels.types import GroupQuant


def init_weights(
    cfg: ModelConfig,
    seed: int,
    dtype: np.dtype | type = np.float32,
    scheme: WeightScheme = WeightScheme.NATIVE,
) -> Weights[Any]:
    """Host weights drawn from the specs.

    The same seed gives the same bits on every machine and for every order of the tree: each weight has a generator of
    its own, seeded with the seed and its name.

    Args:
      cfg: any valid config. seed: 0 or more. dtype: of the weights; draws are float32, and those of
        quantized weights are quantized as they are.
    """

    def draw(spec: ParamSpec) -> np.ndarray | GroupQuant:
        if spec.init is Init.ONES:
            return np.ones(spec.shape, spec.dtype)
        if spec.init is Init.ZEROS:
            return np.zeros(spec.shape, spec.dtype)
        generator = np.random.Generator(np.random.PCG64([seed, zlib.crc32(spec.name.encode())]))
        x = generator.standard_normal(spec.shape, np.float32) * np.float32(1 / math.sqrt(spec.num_inputs))
        if spec.rounded_to is not None:
            return quantized(x, spec.rounded_to, spec.dtype)
        return x.astype(spec.dtype, copy=False)

    weights: Weights[Any] = jax.tree.map(draw, param_specs(cfg, dtype, scheme))
    return weights
