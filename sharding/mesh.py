"""Meshes of devices."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from headrace.sharding.errors import MeshError
from headrace.sharding.mesh_shape import MeshShape


def make_mesh(shape: MeshShape, devices: Sequence[jax.Device]) -> Mesh:
    """The first devices, row by row. Raises: MeshError where there are too few."""
    if len(devices) < shape.num_devices:
        kind = devices[0].device_kind if devices else "no device"
        raise MeshError(f"mesh {shape} needs {shape.num_devices} devices; there are {len(devices)} ({kind})")
    sizes = shape.sizes
    chosen = np.array(devices[: shape.num_devices], dtype=object).reshape(tuple(sizes.values()))
    return Mesh(chosen, tuple(sizes))
