"""Weights on their way to the devices: layers as they come, or each kind stacked over all layers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import PartitionSpec
from jax.tree_util import GetAttrKey, tree_map_with_path

from headrace.model.config import ModelConfig
from headrace.model.on_mesh import partitions, repeated_heads
from headrace.model.specs import ParamSpec, param_specs
from headrace.model.weights import LayerWeights, Weights
from headrace.pallas_kernels.chips import Chip
from headrace.pallas_kernels.types import Implementation
from headrace.serving.runner.backend import Backend

DEFAULT_TILE_ROWS = 8
LANES = 128


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
    """Shapes with the layout that steps read them in, where it is not XLA's default: see layout_of."""
    if chip is None or chip.implementation is not Implementation.TPU:
        return shapes

    def formatted(path: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        name = next(key.name for key in reversed(path) if isinstance(key, GetAttrKey))
        layout = layout_of(name, x, chip)
        return x if layout is None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=Format(layout, x.sharding))

    found: Weights[Any] = tree_map_with_path(formatted, shapes)
    return found


def layout_of(name: str, x: jax.ShapeDtypeStruct, chip: Chip) -> Layout | None:
    """Of a field of the weights, of one layer or stacked, on a TPU; None is XLA's default, which makes that axis the
    minor one which needs less padding, and tiles by 8 rows.

    A step whose weights lie otherwise copies them each time. The embedding is read by rows (57 MB were copied in each
    step of SmolLM2). Projections to heads are read by columns on v5p and TPU7x (50 MB per layer of Llama-3.1-8B), and
    in any order elsewhere. A TPU7x reads bfloat16 in tiles of 16 rows (14 GB), except for experts, whose kernel takes
    tiles of 8 on every chip (19 GB for 12 layers of gpt-oss-20b).
    """
    letters = name.rsplit("_", 1)[1]
    rows = chip.bfloat16_tile_rows if x.dtype == jnp.bfloat16 else DEFAULT_TILE_ROWS
    is_by_columns = name in ("q_DX", "k_DY", "v_DY")
    is_default = rows == DEFAULT_TILE_ROWS and not is_by_columns and name != "embed_VD"
    if len(letters) == 1 or letters[0] == "E" or is_default:
        return None
    last = len(x.shape) - 1
    order = (*range(last - 1), last, last - 1) if is_by_columns else tuple(range(last + 1))
    return Layout(order, None if rows == DEFAULT_TILE_ROWS else ((rows, LANES), (2, 1)))


def place(weights: Weights[np.ndarray], cfg: ModelConfig, backend: Backend) -> Weights[jax.Array]:
    """Copy host weights to where ``weight_shapes`` says; cfg: on the backend's mesh.

    Layers to be scanned are stacked on the host, one kind of weight at a time: stacked on the device, they would need
    twice its memory.
    """
    specs, shapes = param_specs(cfg, backend.dtype), weight_shapes(cfg, backend)

    def put(shape: jax.ShapeDtypeStruct, x: np.ndarray) -> jax.Array:
        where = shape.sharding if shape.format.layout is None else shape.format
        if shape.sharding is None or shape.sharding.is_fully_addressable:
            return jax.device_put(x, where)
        # Every host has the whole array. device_put would compare it with the others' over the network.
        return jax.make_array_from_callback(x.shape, where, lambda index: x[index], dtype=x.dtype)

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
