"""Where weights lie on the devices: layers as they come, or each kind stacked over all layers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import PartitionSpec
from jax.tree_util import GetAttrKey, tree_map_with_path

from headrace.model.config import ModelConfig
from headrace.model.on_mesh import partitions
from headrace.model.specs import SCALE_DTYPE, ParamSpec, param_specs
from headrace.model.weights import LayerWeights, Weights
from headrace.pallas_kernels.chips import Chip
from headrace.pallas_kernels.types import GroupQuant, Implementation
from headrace.serving.runner.backend import Backend

DEFAULT_TILE_ROWS = 8
LANES = 128


def weight_shapes(cfg: ModelConfig, backend: Backend) -> Weights[jax.ShapeDtypeStruct]:
    """Shapes, types and places of the weights as ``placing`` leaves them: see stacks. cfg: on the backend's mesh.

    Raises: MeshError naming a tensor that does not divide.
    """
    specs, cuts = param_specs(cfg, backend.dtype, backend.weights), partitions(cfg, backend.mesh_shape)
    stage = "stage" if backend.mesh_shape.stage > 1 else None

    def array(
        shape: tuple[int, ...], dtype: np.dtype, cut: PartitionSpec, count: tuple[int, ...]
    ) -> jax.ShapeDtypeStruct:
        sharding = backend.sharding(PartitionSpec(*(stage for _ in count), *cut))
        return jax.ShapeDtypeStruct((*count, *shape), dtype, sharding=sharding)

    def shape(spec: ParamSpec, cut: PartitionSpec, *, count: tuple[int, ...] = ()) -> jax.ShapeDtypeStruct | GroupQuant:
        if not spec.is_quantized:
            return array(spec.shape, spec.dtype, cut, count)
        # Where the contraction is cut, all devices scale their parts of the sum by the same factors.
        scale_cut = PartitionSpec(*cut[:-2], None, cut[-1])
        return GroupQuant(
            array(spec.shape, np.dtype(np.int8), cut, count),
            array(spec.scale_shape, SCALE_DTYPE, scale_cut, count),
            stands_for=spec.dtype.name,
        )

    def layer(stack: tuple[int, ...]) -> LayerWeights[Any]:
        count = (len(stack),) if is_stacked(backend) else ()
        found: LayerWeights[Any] = jax.tree.map(
            functools.partial(shape, count=count), specs.layers[stack[0]], cuts.layers[stack[0]]
        )
        return found

    layers = tuple(layer(stack) for stack in stacks(cfg, backend))
    others = jax.tree.map(shape, specs.replace(layers=()), cuts.replace(layers=()))
    return laid_out(others.replace(layers=layers[0] if backend.scan_layers else layers), backend.chip)


def is_stacked(backend: Backend) -> bool:
    """Whether weights of layers have a new first axis, cut over stages."""
    return backend.scan_layers or backend.mesh_shape.stage > 1


def stacks(cfg: ModelConfig, backend: Backend) -> tuple[tuple[int, ...], ...]:
    """Which layers lie together in one array of each kind of weight: all, where they are scanned; one from each stage,
    where they are unrolled over stages; else each alone."""
    if backend.scan_layers:
        return (tuple(range(cfg.num_layers)),)
    each = cfg.num_layers // backend.mesh_shape.stage
    return tuple(tuple(range(first, cfg.num_layers, each)) for first in range(each))


def laid_out(shapes: Weights[Any], chip: Chip | None) -> Weights[Any]:
    """Shapes with the layout that steps read them in, where it is not XLA's default: see layout_of."""
    if chip is None or chip.implementation is not Implementation.TPU:
        return shapes

    def formatted(path: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        *_, field, part = ("", *(key.name for key in path if isinstance(key, GetAttrKey)))
        if part == "scale_GN":
            return x
        name = field if part == "values_KN" else part
        layout = layout_of(name, x, chip)
        return x if layout is None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=Format(layout, x.sharding))

    found: Weights[Any] = tree_map_with_path(formatted, shapes)
    return found


def layout_of(name: str, x: jax.ShapeDtypeStruct, chip: Chip) -> Layout | None:
    """Of a field of the weights, of one layer or stacked, on a TPU; None is XLA's default, which makes that axis the
    minor one which needs less padding, and tiles by 8 rows.

    A step whose weights lie otherwise copies them each time. The embedding is read by rows (57 MB were copied in each
    step of SmolLM2). Projections to heads are read by columns on v5p and TPU7x (50 MB per layer of Llama-3.1-8B), and
    in any order elsewhere; int8 is read by rows everywhere. A TPU7x reads bfloat16 in tiles of 16 rows (14 GB), except
    for experts, whose kernel takes tiles of 8 on every chip (19 GB for 12 layers of gpt-oss-20b). That kernel reads
    rows, also where a part of their width would need less padding as columns (1,440 of 2,880: all experts of
    gpt-oss-120b were copied, 57 GiB).
    """
    last = len(x.shape) - 1
    if x.dtype == jnp.int8:
        return Layout(tuple(range(last + 1)))
    letters = name.rsplit("_", 1)[1]
    rows = chip.bfloat16_tile_rows if x.dtype == jnp.bfloat16 else DEFAULT_TILE_ROWS
    is_by_columns = name in ("q_DX", "k_DY", "v_DY")
    last = len(x.shape) - 1
    if letters[0] == "E" and len(letters) == 3:
        return Layout(tuple(range(last + 1)))
    is_default = rows == DEFAULT_TILE_ROWS and not is_by_columns and name != "embed_VD"
    if len(letters) == 1 or letters[0] == "E" or is_default:
        return None
    order = (*range(last - 1), last, last - 1) if is_by_columns else tuple(range(last + 1))
    return Layout(order, None if rows == DEFAULT_TILE_ROWS else ((rows, LANES), (2, 1)))
