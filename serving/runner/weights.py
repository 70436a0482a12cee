"""Weights on their way to the device: layers as they come, or each kind stacked over all layers."""

from typing import Any

import jax
import numpy as np

from headrace.model.weights import LayerWeights, Weights


def arranged(shapes: Weights[Any], *, scan: bool) -> Weights[Any]:
    """Shapes of the weights as ``place`` leaves them; layers are stacked on a new first axis to be scanned."""
    if not scan:
        return shapes
    count = len(shapes.layers)
    first = shapes.layers[0]
    return shapes.replace(layers=jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), first))


def place(weights: Weights[np.ndarray], device: jax.Device | None, *, scan: bool) -> Weights[jax.Array]:
    """Copy host weights to a device, None = JAX's default.

    Layers to be scanned are stacked on the host, one kind of weight at a time: stacked on the device, they would need
    twice its memory.
    """
    if not scan:
        return jax.device_put(weights, device)

    def stack(*leaves: np.ndarray) -> jax.Array:
        return jax.device_put(np.stack(leaves), device)

    layers: LayerWeights[jax.Array] = jax.tree.map(stack, *weights.layers)
    return jax.device_put(weights.replace(layers=()), device).replace(layers=layers)
