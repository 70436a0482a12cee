"""Slices of accelerators that are not there, as their compiler describes them, and the links between their chips.

Bandwidths are of one link in one direction. Sources: "How to Scale Your Model" (jax-ml.github.io/scaling-book, chapter
on TPUs) for v5e, v5p and v6e; Google Cloud's page on TPU7x, which gives 9.6 Tbit/s for the six links of a chip in both
directions. Nothing here was measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import jax
from jax.experimental import topologies

from headrace.sharding.errors import MeshError

LINK_BYTES_PER_S: Mapping[str, float] = MappingProxyType({"v5e": 45e9, "v5p": 90e9, "v6e": 90e9, "tpu7x": 100e9})
"""By name of the chip."""
HOP_S = 1e-6
"""From chip to chip, however little is sent: a common assumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Between neighbours along a mesh axis."""

    bytes_per_s: float
    hop_s: float = HOP_S

    def all_reduce_s(self, size_bytes: float, devices: int) -> float:
        """A line of devices, which every slice has along an axis; a ring would take half as long."""
        if devices == 1:
            return 0.0
        share = 2 * (devices - 1) / devices
        return share * size_bytes / self.bytes_per_s + 2 * (devices - 1) * self.hop_s


def links_of(chip: str) -> Links:
    """Raises: MeshError where nothing is known of a chip."""
    if chip not in LINK_BYTES_PER_S:
        raise MeshError(f"no link bandwidth is known for {chip}; known: {', '.join(LINK_BYTES_PER_S)}")
    return Links(bytes_per_s=LINK_BYTES_PER_S[chip])


def topology_devices(name: str) -> Sequence[jax.Device]:
    """Devices of a slice such as v6e:2x2, for compiling only. Raises: MeshError naming the topology and the remedy."""
    try:
        devices: Sequence[jax.Device] = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    except Exception as error:  # libtpu has no error of its own for a name that it does not know
        raise MeshError(
            f"topology {name!r}: {str(error).splitlines()[0][:200]}; names are such as v5e:4x4, v5p:2x2x1, v6e:2x2 and "
            f"tpu7x:2x2x1, and the compiler comes with the tpu extra of this package"
        ) from error
    return devices
