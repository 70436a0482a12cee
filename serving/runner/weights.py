"""Weights on their way to the devices: layers as they come, or each kind stacked over all layers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import PartitionSpec

from headrace.model.config import ModelConfig
from headrace.model.on_mesh import partitions, repeated_heads
from headrace.model.specs import ParamSpec, param_specs
from headrace.model.weights import LayerWeights, Weights
from headrace.pallas_kernels.chips import Chip
from headrace.pallas_kernels.types import Implementation
from headrace.serving.runner.backend import Backend

DEFAULT_TILE_ROWS = 8
LANES = 128


def shapes_of(tree: Any) -> Any:
    """The same tree with shapes and types for arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def weight_shapes(cfg: ModelConfig, backend: Backend) -> Weights[jax.ShapeDtypeStruct]:
    """Shapes, types and places of the weights as ``place`` leaves them; layers to be scanned are stacked on a new first
    axis. cfg: on the backend's mesh. Raises: MeshError naming a tensor that does not divide."""
    specs, cuts = param_specs(cfg, backend.dtype), partitions(cfg, backend.mesh_shape)

    def shape(spec: ParamSpec, cut: PartitionSpec, *, count: tuple[int, ...] = ()) -> jax.ShapeDtypeStruct:
        sharding = backend.sharding(PartitionSpec(*(None for _ in count), *cut))
        return jax.ShapeDtypeStruct((*count, *spec.shape), spec.dtype, sharding=sharding)

    if backend.scan_layers:
        layers: LayerWeights[Any] = jax.tree.map(
            lambda spec, cut: shape(spec, cut, count=(len(specs.layers),)), specs.layers[0], cuts.layers[0]
        )
        others = jax.tree.map(shape, specs.replace(layers=()), cuts.replace(layers=()))
        return laid_out(others.replace(layers=layers), backend.chip)
    return laid_out(jax.tree.map(shape, specs, cuts), backend.chip)


def laid_out(shapes: Weights[Any], chip: Chip | None) -> Weights[Any]:
    """Shapes with the layout that steps read them in, where it is not XLA's default.

    A step whose weights lie otherwise copies them each time. By default XLA:TPU makes that axis the minor one which
    needs less padding, and tiles by 8 rows. But the embedding is read by rows (57 MB were copied in each step of
    SmolLM2), and a TPU7x reads bfloat16 in tiles of 16 rows (14 GB were, for Llama-3.1-8B).
    """
    if chip is None or chip.implementation is not Implementation.TPU:
        return shapes
    rows = chip.bfloat16_tile_rows

    def formatted(x: jax.ShapeDtypeStruct, *, is_table: bool = False) -> jax.ShapeDtypeStruct:
        is_tiled = x.dtype == jnp.bfloat16 and rows != DEFAULT_TILE_ROWS
        if len(x.shape) == 1 or not (is_table or is_tiled):
            return x
        tiling = ((rows, LANES), (2, 1)) if is_tiled else None
        layout = Layout(tuple(range(len(x.shape))), tiling)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=Format(layout, x.sharding))

    others: Weights[Any] = jax.tree.map(formatted, shapes)
    return others.replace(embed_VD=formatted(shapes.embed_VD, is_table=True))


def place(weights: Weights[np.ndarray], cfg: ModelConfig, backend: Backend) -> Weights[jax.Array]:
    """Copy host weights to where ``weight_shapes`` says; cfg: on the backend's mesh.

    Layers to be scanned are stacked on the host, one kind of weight at a time: stacked on the device, they would need
    twice its memory.
    """
    specs, shapes = param_specs(cfg, backend.dtype), weight_shapes(cfg, backend)

    def put(shape: jax.ShapeDtypeStruct, x: np.ndarray) -> jax.Array:
        return jax.device_put(x, shape.sharding if shape.format.layout is None else shape.format)

    def put_one(shape: jax.ShapeDtypeStruct, x: np.ndarray, spec: ParamSpec) -> jax.Array:
        return put(shape, repeated_heads(x, spec))

    if not backend.scan_layers:
        return jax.tree.map(put_one, shapes, weights, specs)
    layers: LayerWeights[jax.Array] = jax.tree.map(
        lambda shape, spec, *leaves: put(shape, np.stack([repeated_heads(x, spec) for x in leaves])),
        shapes.layers,
        specs.layers[0],
        *weights.layers,
    )
    without = (tree.replace(layers=()) for tree in (shapes, weights, specs))
    return jax.tree.map(put_one, *without).replace(layers=layers)
