"""Where weights lie on the devices: layers as they come, or each kind stacked over all layers."""

import functools
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import PartitionSpec
from jax.tree_util import GetAttrKey, tree_map_with_path

from headrace.model.config import ModelConfig
from headrace.model.on_mesh import partitions
from headrace.model.specs import ParamSpec, param_specs
from headrace.model.weights import LayerWeights, Weights
from headrace.pallas_kernels.chips import Chip
from headrace.pallas_kernels.types import GroupQuant, Implementation, TiledQuant
from headrace.serving.runner.backend import Backend, platform_of
from headrace.serving.runner.tiling import is_tiled, tiled_shape
from headrace.sharding.errors import MeshError

DEFAULT_TILE_ROWS = 8
LANES = 128


def weight_shapes(cfg: ModelConfig, backend: Backend) -> Weights[jax.ShapeDtypeStruct]:
    """Shapes, types and places of the weights as ``placing`` leaves them: see stacks. cfg: on the backend's mesh.

    Raises: MeshError naming a tensor that does not divide; UnsupportedCase naming one that CPU kernels have no tiles
    for.
    """
    specs, cuts = backend_specs(cfg, backend), partitions(cfg, backend.mesh_shape)
    stage = "stage" if backend.mesh_shape.stage > 1 else None

    def array(
        shape: tuple[int, ...], dtype: np.dtype, cut: PartitionSpec, count: tuple[int, ...]
    ) -> jax.ShapeDtypeStruct:
        sharding = backend.sharding(PartitionSpec(*(stage for _ in count), *cut))
        return jax.ShapeDtypeStruct((*count, *shape), dtype, sharding=sharding)

    def shape(
        spec: ParamSpec, cut: PartitionSpec, *, count: tuple[int, ...] = ()
    ) -> jax.ShapeDtypeStruct | GroupQuant | TiledQuant:
        form = spec.form
        if form is None:
            return array(spec.shape, spec.dtype, cut, count)
        if is_tiled(spec, backend.kernels):
            _refuse_cut(spec, cut, stage)
            tiles = tiled_shape(spec)
            blocks = tiles.blocks_NGU
            return tiles.replace(blocks_NGU=array(blocks.shape, blocks.dtype, PartitionSpec(), count))
        scale_cut = _scale_cut(spec, cut, backend)
        scale = array(spec.scale_shape, form.scale_dtype, scale_cut, count)
        return GroupQuant(
            array(spec.matrix_shape, form.values_dtype, cut, count),
            scale,
            scale if form.is_affine else None,
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


def backend_specs(cfg: ModelConfig, backend: Backend) -> Weights[ParamSpec]:
    """What a backend has of each weight: values of 4 bits as int8 where XLA:CPU runs products, and scales of float16
    as float32 on GPU and TPU, whose kernels know no float16. Both are exact.

    A program that was compiled ahead (JAX 0.10.2, CPU) refuses arrays of int4: it asks for a layout of 4 bits, and
    theirs says 0.
    """
    specs = param_specs(cfg, backend.dtype, backend.weights, backend.forms)
    is_cpu = backend.device is None or platform_of(backend.device) == "cpu"
    implementation = backend.kernels.implementation
    values = {"values": "int8"} if is_cpu else {}
    scale = {} if is_cpu and implementation in (Implementation.REFERENCE, Implementation.CPU) else {"scale": "float32"}

    def had(spec: ParamSpec) -> ParamSpec:
        # Of CPU kernels only tiles stay as they are: products with experts run by XLA.
        if spec.form is None or is_tiled(spec, backend.kernels):
            return spec
        return replace(spec, form=replace(spec.form, **values, **scale))

    found: Weights[ParamSpec] = jax.tree.map(had, specs)
    return found


def _refuse_cut(spec: ParamSpec, cut: PartitionSpec, stage: str | None) -> None:
    if stage is not None or any(axis is not None for axis in cut):
        raise MeshError(
            f"{spec.name}: in tiles for CPU kernels it is cut over no mesh axis; take --attention reference, or a mesh "
            "of data alone"
        )


def _scale_cut(spec: ParamSpec, cut: PartitionSpec, backend: Backend) -> PartitionSpec:
    """Groups are cut with their values. Of one group over a contraction that is cut, all devices have all factors, by
    which they scale their parts of the sum."""
    assert spec.form is not None
    entry, group = cut[-2], spec.form.group
    if group is None:
        return PartitionSpec(*cut[:-2], None, cut[-1])
    names = () if entry is None else (entry,) if isinstance(entry, str) else entry
    parts = math.prod(backend.mesh_shape.sizes[name] for name in names)
    contraction = spec.matrix_shape[-2]
    if contraction // parts % group:
        raise MeshError(
            f"{spec.name} of shape {list(spec.shape)}: its {contraction // group} groups of {group} inputs do not "
            f"divide into {parts} parts (mesh axis {' and '.join(names)}); --weights bf16 or int8 can be cut so"
        )
    return cut


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
        if part in ("scale_GN", "offset_GN"):
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
    if x.dtype in (jnp.int8, jnp.int4):
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
