"""Weights on their way to the device: layers as they come, or each kind stacked over all layers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding, SingleDeviceSharding
from jax.tree_util import GetAttrKey

from headrace.model.weights import LayerWeights, Weights
from headrace.pallas_kernels.chips import Chip
from headrace.pallas_kernels.types import Implementation

DEFAULT_TILE_ROWS = 8
LANES = 128
READ_BY_KERNELS = frozenset({"gate_EDF", "up_EDF", "down_EFD"})
"""Fields of LayerWeights that no product of XLA reads."""


def shapes_of(tree: Any) -> Any:
    """The same tree with shapes and types for arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def arranged(shapes: Weights[Any], *, scan: bool) -> Weights[Any]:
    """Shapes of the weights as ``place`` leaves them; layers are stacked on a new first axis to be scanned."""
    if not scan:
        return shapes
    count = len(shapes.layers)
    first = shapes.layers[0]
    return shapes.replace(layers=jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), first))


def laid_out(shapes: Weights[Any], chip: Chip | None, sharding: Sharding | None) -> Weights[Any]:
    """Arranged shapes with the layout that steps read them in, where it is not XLA's default.

    A step whose weights lie otherwise copies them each time. By default XLA:TPU makes that axis the minor one which
    needs less padding, and tiles by 8 rows. But the embedding is read by rows (57 MB were copied in each step of
    SmolLM2), and a TPU7x reads bfloat16 in tiles of 16 rows (14 GB were, for Llama-3.1-8B), except for experts, whose
    kernel takes tiles of 8 on every chip (19 GB were, for 12 layers of gpt-oss-20b).
    """
    if chip is None or chip.implementation is not Implementation.TPU or sharding is None:
        return shapes
    rows = chip.bfloat16_tile_rows

    def formatted(path: tuple[Any, ...], x: jax.ShapeDtypeStruct, *, is_table: bool = False) -> jax.ShapeDtypeStruct:
        is_tiled = x.dtype == jnp.bfloat16 and rows != DEFAULT_TILE_ROWS and path[-1].name not in READ_BY_KERNELS
        if len(x.shape) == 1 or not (is_table or is_tiled):
            return x
        tiling = ((rows, LANES), (2, 1)) if is_tiled else None
        layout = Layout(tuple(range(len(x.shape))), tiling)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=Format(layout, sharding))

    others: Weights[Any] = jax.tree_util.tree_map_with_path(formatted, shapes)
    return others.replace(embed_VD=formatted((GetAttrKey("embed_VD"),), shapes.embed_VD, is_table=True))


def place(
    weights: Weights[np.ndarray], device: jax.Device | None, *, scan: bool, chip: Chip | None = None
) -> Weights[jax.Array]:
    """Copy host weights to a device, None = JAX's default, as ``arranged`` and ``laid_out`` say.

    Layers to be scanned are stacked on the host, one kind of weight at a time: stacked on the device, they would need
    twice its memory.
    """
    sharding = None if device is None else SingleDeviceSharding(device)
    shapes = laid_out(arranged(shapes_of(weights), scan=scan), chip, sharding)

    def put(x: np.ndarray, shape: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(x, device if shape.format.layout is None else shape.format)

    if not scan:
        return jax.tree.map(put, weights, shapes)
    layers: LayerWeights[jax.Array] = jax.tree.map(
        lambda shape, *leaves: put(np.stack(leaves), shape), shapes.layers, *weights.layers
    )
    return jax.tree.map(put, weights.replace(layers=()), shapes.replace(layers=())).replace(layers=layers)
