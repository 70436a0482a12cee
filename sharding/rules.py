"""From logical axes to a mesh: where each weight is cut."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from jax.sharding import PartitionSpec

from headrace.sharding.axes import Axis
from headrace.sharding.errors import MeshError
from headrace.sharding.mesh_shape import MeshShape

RULES: Mapping[Axis, tuple[str, ...]] = MappingProxyType(
    {
        Axis.VOCAB: ("stage", "tensor"),
        Axis.HEADS: ("tensor",),
        Axis.KV_HEADS: ("tensor",),
        Axis.FFN: ("tensor",),
        Axis.EXPERTS: ("expert",),
        Axis.EXPERT_FFN: ("tensor",),
    }
)
"""Axes that are not here are whole on every device. Layers are cut over stages, which no axis of one weight shows."""
_HEAD_AXES = (Axis.HEADS, Axis.KV_HEADS)


class Cuttable(Protocol):
    """What is asked of a ``model.specs.ParamSpec``."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def logical_axes(self) -> tuple[Axis, ...]: ...
    @property
    def head_dim(self) -> int | None: ...


def partition(weight: Cuttable, mesh: MeshShape, rules: Mapping[Axis, tuple[str, ...]] = RULES) -> PartitionSpec:
    """Mesh axes of a weight's axes.

    Raises: MeshError naming the tensor: two of its axes are cut over one mesh axis, or one does not divide.
    """
    cut: dict[str, Axis] = {}
    entries: list[str | tuple[str, ...] | None] = []
    for size, axis in zip(weight.shape, weight.logical_axes, strict=True):
        over = tuple(name for name in rules.get(axis, ()) if mesh.sizes[name] > 1)
        for name in over:
            if name in cut:
                raise MeshError(f"{weight.name}: axes {cut[name]} and {axis} are both cut over mesh axis {name}")
            cut[name] = axis
        _check_divides(weight, size, axis, " and ".join(over), math.prod(mesh.sizes[name] for name in over))
        entries.append(entry(over))
    return PartitionSpec(*entries)


def entry(over: tuple[str, ...]) -> str | tuple[str, ...] | None:
    """Of a PartitionSpec, for an axis that is cut over these mesh axes."""
    return over if len(over) > 1 else over[0] if over else None


def _check_divides(weight: Cuttable, size: int, axis: Axis, mesh_axis: str, parts: int) -> None:
    unit = weight.head_dim if axis in _HEAD_AXES and weight.head_dim is not None else 1
    if (size // unit) % parts:
        what = f"{size // unit} heads" if unit > 1 else f"{size}"
        fitting = [n for n in range(1, size // unit + 1) if (size // unit) % n == 0 and n <= 2 * parts]
        raise MeshError(
            f"{weight.name} of shape {list(weight.shape)}: its axis {axis} ({what}) does not divide into {parts} parts "
            f"(mesh axis {mesh_axis}); it would into {', '.join(map(str, fitting))}"
        )


def replicated_kv_heads(num_kv_heads: int, tensor: int) -> int:
    """Key heads of the model on a mesh: with more parts than heads each head lies on several devices, side by side.

    Raises: MeshError where the devices cannot be shared out among the heads.
    """
    if num_kv_heads >= tensor:
        return num_kv_heads
    if tensor % num_kv_heads:
        raise MeshError(
            f"k_DY and v_DY: {num_kv_heads} key heads cannot be replicated over {tensor} parts (mesh axis tensor), "
            f"which is not a multiple of them"
        )
    return tensor
