"""Devices of slices that are not there, as their compilers describe them, and which of them exchange something.

TPUs come from libtpu by name; GPUs from the CUDA plugin, for the description of one of them in ``targets/``.
"""

from collections.abc import Sequence
from importlib import resources

import jax
import numpy as np
from jax.experimental import topologies

from headrace.sharding.errors import MeshError
from headrace.sharding.links import Group, grid_group, switched_group
from headrace.sharding.mesh_shape import MeshShape
from headrace.sharding.slices import EXAMPLES, Slice

EXTRAS = {"tpu": "tpu", "gpu": "cuda"}
"""Of this package, which bring the compiler of a platform."""


def target_description(chip: str) -> str:
    """What XLA's compiler asks of a GPU."""
    return (resources.files("headrace.sharding.targets") / f"{chip}.txtpb").read_text(encoding="utf-8")


def topology_devices(of: Slice) -> Sequence[jax.Device]:
    """For compiling only. Raises: MeshError naming the slice and the remedy."""
    try:
        if of.kind.platform == "gpu":
            # Devices of one process: XLA takes them for one machine's.
            shape = f"1x1x{of.num_devices}"
            found = topologies.get_topology_desc(
                platform="cuda", topology_name=of.chip, target_config=target_description(of.chip), topology=shape
            )
        elif of.num_chips == 1:
            found = topologies.get_topology_desc(
                platform="tpu", topology_name=str(of), chips_per_host_bounds=(1, 1, 1), num_slices=1
            )
        else:
            found = topologies.get_topology_desc(platform="tpu", topology_name=str(of))
    except Exception as error:  # the compilers have no error of their own for a name that they do not know
        raise MeshError(
            f"topology {str(of)!r}: {str(error).splitlines()[0][:200]}; names are such as {EXAMPLES}, and the compiler "
            f"comes with the {EXTRAS[of.kind.platform]} extra of this package"
        ) from error
    devices: Sequence[jax.Device] = found.devices
    return devices


def group_along(of: Slice, devices: Sequence[jax.Device], mesh: MeshShape, axes: Sequence[str]) -> Group:
    """The first devices of a mesh of these, as ``make_mesh`` lays them, that differ along axes only."""
    sizes = mesh.sizes
    index = np.arange(mesh.num_devices).reshape(tuple(sizes.values()))
    chosen = index[tuple(slice(None) if axis in axes else 0 for axis in sizes)].reshape(-1)
    if of.kind.platform == "gpu":
        return switched_group(of.chip, len(chosen))
    return grid_group(of, [(*devices[i].coords, devices[i].core_on_chip) for i in chosen])
