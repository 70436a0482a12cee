"""The links between the chips of a slice, and how long a sum over devices takes on them. JAX-free.

TPUs lie on a grid with a link to each neighbour; a dimension is a ring where the slice has the whole of it. GPUs of one
machine lie around switches, where each has its own link. Bandwidths are of one link in one direction. Sources: "How to
Scale Your Model" (jax-ml.github.io/scaling-book, chapters on TPUs and on sharding) for v5e, v5p, v6e and how sums over
several dimensions share their links; Google Cloud's page on TPU7x, which gives 9.6 Tbit/s for the six links of a chip
in both directions, and six times a link between its two devices; NVIDIA's data sheets of H100 SXM and H200 SXM, which
give 900 GB/s of NVLink in both directions. Nothing here was measured.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from headrace.sharding.errors import MeshError
from headrace.sharding.slices import Slice

HOP_S = 1e-6
"""From chip to chip, however little is sent: a common assumption for both kinds of links."""
POD_EDGE = 16
"""A dimension of v5e or v6e that is as long is a ring."""
CUBE_EDGE = 4
"""v5p and TPU7x are built of cubes of 4 x 4 x 4; slices of whole cubes have rings in all dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipLinks:
    """bytes_per_s: of one link to a neighbour, or of a GPU's link to its switches, one way. inside_bytes_per_s: between
    the devices of one chip, one way; None where a chip is one device."""

    bytes_per_s: float
    inside_bytes_per_s: float | None = None


KINDS_OF_LINKS: Mapping[str, ChipLinks] = MappingProxyType(
    {
        "v5e": ChipLinks(bytes_per_s=45e9),
        "v5p": ChipLinks(bytes_per_s=90e9),
        "v6e": ChipLinks(bytes_per_s=90e9),
        "tpu7x": ChipLinks(bytes_per_s=100e9, inside_bytes_per_s=600e9),
        "h100": ChipLinks(bytes_per_s=450e9),
        "h200": ChipLinks(bytes_per_s=450e9),
    }
)
"""By name of the chip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """A dimension that a group of devices extends along. num: chips along it, or devices inside a chip."""

    num: int
    bytes_per_s: float
    is_ring: bool = False

    @property
    def directions(self) -> int:
        """In which a part of a sum can go round: a line has to come back over its own links."""
        return 2 if self.is_ring else 1

    @property
    def hops(self) -> int:
        """To the farthest."""
        return self.num // 2 if self.is_ring else self.num - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Devices that sum something, and the paths between them. inside: of one chip, which sums first; each of its
    devices then has a share. is_whole: they fill a box; else they count as a line."""

    inside: Path | None = None
    paths: tuple[Path, ...] = ()
    is_whole: bool = True

    def __str__(self) -> str:
        """Such as 4x2, 16r for a ring, 2+2x2 with two devices in each chip."""
        dims = "x".join(f"{path.num}{'r' * path.is_ring}" for path in self.paths) or "1"
        return f"{self.inside.num}+{dims}" if self.inside else dims

    @property
    def num_devices(self) -> int:
        return math.prod(path.num for path in (*self.paths, *((self.inside,) if self.inside else ())))

    def link_bytes(self, size_bytes: float) -> float:
        """That a sum of so many bytes sends over each link between chips, one way."""
        chips = math.prod(path.num for path in self.paths)
        return 2 * (chips - 1) / chips * size_bytes / max(1, sum(path.directions for path in self.paths))

    def all_reduce_s(self, size_bytes: float) -> float:
        """Of a sum: shares are summed and then gathered; every dimension works on a part of them at any time."""
        seconds = 0.0
        if self.inside:
            share = 2 * (self.inside.num - 1) / self.inside.num
            seconds += share * size_bytes / self.inside.bytes_per_s + 2 * self.inside.hops * HOP_S
        if self.paths:
            seconds += self.link_bytes(size_bytes) / self.paths[0].bytes_per_s
            seconds += 2 * sum(path.hops for path in self.paths) * HOP_S
        return seconds

    def send_s(self, size_bytes: float) -> float:
        """From each device to the next along the group."""
        path = self.paths[0] if self.paths else self.inside
        return 0.0 if path is None else size_bytes / path.bytes_per_s + HOP_S


def links_of(chip: str) -> ChipLinks:
    """Raises: MeshError where nothing is known of a chip."""
    if chip not in KINDS_OF_LINKS:
        raise MeshError(f"no link bandwidth is known for {chip}; known: {', '.join(KINDS_OF_LINKS)}")
    return KINDS_OF_LINKS[chip]


def grid_group(of: Slice, places: Sequence[tuple[int, ...]]) -> Group:
    """A group of TPU devices at (x, y, z, device of the chip)."""
    links = links_of(of.chip)
    chips = {place[:-1] for place in places}
    inside = None
    if len(places) > len(chips) and links.inside_bytes_per_s is not None:
        inside = Path(num=len(places) // len(chips), bytes_per_s=links.inside_bytes_per_s)
    extents = [max(along) - min(along) + 1 for along in zip(*chips, strict=True)]
    if math.prod(extents) != len(chips):
        line = Path(num=len(chips), bytes_per_s=links.bytes_per_s)
        return Group(inside=inside, paths=(line,), is_whole=False)
    rings = _rings(of)
    paths = tuple(
        Path(num=extent, bytes_per_s=links.bytes_per_s, is_ring=axis < len(rings) and rings[axis] == extent)
        for axis, extent in enumerate(extents)
        if extent > 1
    )
    return Group(inside=inside, paths=paths)


def switched_group(chip: str, devices: int) -> Group:
    """Any GPUs of one machine."""
    return Group() if devices == 1 else Group(paths=(Path(num=devices, bytes_per_s=links_of(chip).bytes_per_s),))


def _rings(of: Slice) -> tuple[int | None, ...]:
    """Length of each dimension that is a ring."""
    if of.kind.dimensions == 2:
        return tuple(size if size == POD_EDGE else None for size in of.sizes)
    is_cubes = all(size % CUBE_EDGE == 0 for size in of.sizes)
    return tuple(size if is_cubes else None for size in of.sizes)
