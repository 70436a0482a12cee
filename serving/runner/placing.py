"""Weights into their places, one at a time: the host holds one of them, and a device nothing that is not its own.

A placed leaf is one weight, or a stack of one kind of weight over layers: all of them where layers are scanned; one of
each stage where they are not and a mesh has stages. The first axis of a stack may be cut over a mesh axis. Its devices
are filled side by side: of L layers in S parts, step i brings layers i, i + L/S, i + 2L/S, … to index i of each part.

An array made from host memory may keep using that memory (on CPU it does where alignment allows), so nothing is
written into host memory that was handed over.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from headrace.model.config import ModelConfig
from headrace.model.group_quant import dequantized, quantized, widened
from headrace.model.on_mesh import repeated_heads
from headrace.model.specs import ParamSpec, param_specs
from headrace.model.weights import Weights
from headrace.pallas_kernels.types import GroupQuant, TiledQuant
from headrace.serving.core.errors import ConfigError
from headrace.serving.runner.backend import Backend
from headrace.serving.runner.tiling import tiled
from headrace.serving.runner.weights import backend_specs, is_stacked, stacks, weight_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One weight on its way. spec: of a configuration on the mesh. target: shapes, types and places of what becomes of
    it, a pytree like ``served_form``'s result; with a first axis of one where it goes into a stack."""

    spec: ParamSpec
    target: Any


@dataclass(frozen=True, slots=True)
class Sources:
    """The weights of one placed leaf, in the order of its first axis. Not a pytree: a leaf of one."""

    specs: tuple[ParamSpec, ...]
    is_stack: bool


class Placement:
    """Where every weight goes, and in which order the weights are wanted. cfg: on the backend's mesh."""

    def __init__(self, cfg: ModelConfig, backend: Backend) -> None:
        shapes = weight_shapes(cfg, backend)
        leaves, self._treedef = jax.tree.flatten(_sources(cfg, backend))
        targets = self._treedef.flatten_up_to(shapes)
        self._leaves = [Leaf(of, target) for of, target in zip(leaves, targets, strict=True)]

    @property
    def wanted(self) -> list[Wanted]:
        return [one for leaf in self._leaves for one in leaf.wanted]

    def fill(self, pieces: Iterable[Any]) -> Weights[Any]:
        """All weights in their places, from what was made of each of ``wanted``, in that order."""
        each, inserts = iter(pieces), Inserts()
        weights: Weights[Any] = self._treedef.unflatten([leaf.fill(each, inserts) for leaf in self._leaves])
        for _ in each:  # The end of a stream joins its threads and reports its last weight.
            raise RuntimeError("more weights came than were wanted")
        return weights


def served_form(x: np.ndarray | GroupQuant, one: Wanted) -> Any:
    """What one weight becomes on its way to the devices, on the host: an array, or a pytree of them as the target has
    it. x: as its file's configuration has it, quantized or not yet.

    Raises: ConfigError naming a weight that cannot be rounded.
    """
    spec = one.spec
    if spec.form is not None:
        if not isinstance(x, GroupQuant):
            x = _rounded(x, spec)
        x = widened(x, spec.form)
    elif isinstance(x, GroupQuant):
        values = dequantized(x).astype(spec.dtype, copy=False)
        x = values if spec.is_product else values.T
    served = jax.tree.map(lambda part: repeated_heads(part, spec), x)
    if spec.form is not None and isinstance(one.target, TiledQuant):
        return tiled(served, spec)
    return served


def _rounded(x: np.ndarray, spec: ParamSpec) -> GroupQuant:
    if spec.rounded_to is None:
        raise ConfigError(f"weight {spec.name} is to be {spec.form} as its file has it, and is not quantized there")
    try:
        return quantized(x, spec.rounded_to, spec.dtype)
    except ValueError as error:
        raise ConfigError(f"weight {spec.name}: {error}; take --weights int8, bf16 or native") from error


def put(x: Any, target: Any) -> Any:
    """Host arrays to their devices, each of which gets its own part and no more. Works where some are another
    process's."""

    def put_one(place: jax.ShapeDtypeStruct, host: np.ndarray) -> jax.Array:
        if place.sharding is None:
            return jax.device_put(host.reshape(place.shape))
        shaped = host.reshape(place.shape)
        return jax.make_array_from_callback(place.shape, format_of(place), lambda index: shaped[index], place.dtype)

    return jax.tree.map(put_one, target, x)


def place(weights: Weights[np.ndarray], cfg: ModelConfig, backend: Backend) -> Weights[jax.Array]:
    """Host weights to where ``weight_shapes`` says; cfg: on the backend's mesh."""
    placement = Placement(cfg, backend)
    specs, treedef = jax.tree.flatten(param_specs(cfg))
    by_name = {spec.name: x for spec, x in zip(specs, treedef.flatten_up_to(weights), strict=True)}
    hosts = ((one, jax.tree.map(np.asarray, by_name[one.spec.name])) for one in placement.wanted)
    return placement.fill(put(served_form(x, one), one.target) for one, x in hosts)


def from_host(wanted: Iterable[Wanted], stream: Iterator[tuple[ParamSpec, np.ndarray | GroupQuant]]) -> Iterator[Any]:
    """Pieces for ``Placement.fill`` from ``WeightFiles.stream``, which gives the weights in the same order."""
    for one in wanted:
        spec, x = next(stream)
        if spec.name != one.spec.name:
            raise RuntimeError(f"weight {spec.name} came where {one.spec.name} was wanted")
        ready = [served_form(x, one)]
        del x
        # No name keeps what was handed over: it is free as soon as the devices have it.
        yield put(ready.pop(), one.target)
    for spec, _ in stream:
        raise RuntimeError(f"weight {spec.name} came, and nothing was wanted")


class Leaf:
    """One leaf of the placed weights: a pytree of shapes, and the weights that fill it."""

    def __init__(self, sources: Sources, target: Any) -> None:
        self._target = target
        self._is_stack = sources.is_stack
        first = jax.tree.leaves(target)[0]
        self._steps = _local_rows(first) if sources.is_stack else 1
        self._parts = len(sources.specs) // self._steps
        self.wanted = [
            Wanted(spec=sources.specs[step + part * self._steps], target=self._piece(part))
            for step in range(self._steps)
            for part in range(self._parts)
        ]

    def fill(self, pieces: Iterator[Any], inserts: "Inserts") -> Any:
        rows = (self._row(pieces) for _ in range(self._steps))
        if self._steps == 1:
            return next(rows)
        each = jax.tree.map(inserts.into, self._target)
        stack = jax.tree.map(lambda insert: insert.empty(), each)
        for step, row in enumerate(rows):
            stack = jax.tree.map(lambda insert, s, r, at=step: insert(s, r, at), each, stack, row)
            del row  # Its memory is free before the next one comes.
            jax.block_until_ready(stack)
        return stack

    def _row(self, pieces: Iterator[Any]) -> Any:
        parts = []
        for _ in range(self._parts):
            parts.append(jax.block_until_ready(next(pieces)))
        if self._parts == 1:
            return parts[0]
        return jax.tree.map(lambda place, *of: _side_by_side(place, of, self._parts), self._target, *parts)

    def _piece(self, part: int) -> Any:
        """Shapes and places of one weight: those of the devices that have this part of the stack."""
        if not self._is_stack:
            return self._target

        def one(place: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            sharding: Any = place.sharding
            if self._parts > 1:
                sharding = part_of(sharding, part)
            if place.format.layout is not None:
                sharding = Format(place.format.layout, sharding)
            return jax.ShapeDtypeStruct((1, *place.shape[1:]), place.dtype, sharding=sharding)

        return jax.tree.map(one, self._target)


class _Insert:
    """Writes a row of a stack in place: each device into its own part, at one index."""

    def __init__(self, place: jax.ShapeDtypeStruct) -> None:
        sharding, where = place.sharding, format_of(place)
        insert: Callable[..., jax.Array] = _insert
        if isinstance(sharding, NamedSharding):
            spec = sharding.spec
            insert = jax.shard_map(
                _insert, mesh=sharding.mesh, in_specs=(spec, spec, PartitionSpec()), out_specs=spec, check_vma=False
            )
        self._call = jax.jit(insert, donate_argnums=0, out_shardings=where)
        self.empty = jax.jit(lambda: jnp.zeros(place.shape, place.dtype), out_shardings=where)

    def __call__(self, stack: jax.Array, row: jax.Array, index: int) -> jax.Array:
        return self._call(stack, row, np.int32(index))


class Inserts:
    """Compiled once for all stacks of one shape, type and place."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], _Insert] = {}

    def into(self, place: jax.ShapeDtypeStruct) -> _Insert:
        key = place.shape, place.dtype, format_of(place)
        if key not in self._known:
            self._known[key] = _Insert(place)
        return self._known[key]


def _insert(stack: jax.Array, row: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(stack, row, index, axis=0)


def part_of(sharding: NamedSharding, part: int) -> NamedSharding:
    """On the devices alone that have one part of the first axis, which is cut over one mesh axis."""
    mesh, axis = sharding.mesh, sharding.spec[0]
    number = mesh.axis_names.index(axis)
    devices = np.take(mesh.devices, [part], axis=number)
    return NamedSharding(Mesh(devices, mesh.axis_names), sharding.spec)


def _side_by_side(place: jax.ShapeDtypeStruct, parts: tuple[jax.Array, ...], count: int) -> jax.Array:
    """One row of each part as one array; nothing is copied."""
    shape = (count, *place.shape[1:])
    arrays = [shard.data for part in parts for shard in part.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, place.sharding, arrays)


def format_of(place: jax.ShapeDtypeStruct) -> Sharding | Format | None:
    """The layout too, where one is asked for."""
    return place.sharding if place.format.layout is None else place.format


def _local_rows(place: jax.ShapeDtypeStruct) -> int:
    """Of a stack, on each device."""
    return place.shape[0] if place.sharding is None else place.sharding.shard_shape(place.shape)[0]


def _sources(cfg: ModelConfig, backend: Backend) -> Weights[Sources]:
    """The weights of each placed leaf."""
    specs, are_stacks = backend_specs(cfg, backend), is_stacked(backend)
    placed = tuple(
        jax.tree.map(lambda *of: Sources(of, is_stack=are_stacks), *(specs.layers[index] for index in stack))
        for stack in stacks(cfg, backend)
    )
    rest: Weights[Any] = jax.tree.map(_alone, specs.replace(layers=()))
    return rest.replace(layers=placed[0] if backend.scan_layers else placed)


def _alone(spec: ParamSpec) -> Sources:
    return Sources((spec,), is_stack=False)
