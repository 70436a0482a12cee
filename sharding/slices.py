"""Names of slices of accelerators, such as v6e:2x4 or h100:4. JAX-free: a compiler may know fewer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from headrace.sharding.errors import MeshError
from headrace.sharding.mesh_shape import MAX_DEVICES


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceKind:
    """platform: whose compiler knows it. dimensions: of a slice's name. devices_per_chip: that JAX shows.
    max_chips: that are joined by what is known here; None = MAX_DEVICES."""

    platform: str
    dimensions: int
    devices_per_chip: int = 1
    max_chips: int | None = None


KINDS: Mapping[str, SliceKind] = MappingProxyType(
    {
        "v5e": SliceKind(platform="tpu", dimensions=2),
        "v5p": SliceKind(platform="tpu", dimensions=3),
        "v6e": SliceKind(platform="tpu", dimensions=2),
        "tpu7x": SliceKind(platform="tpu", dimensions=3, devices_per_chip=2),
        "h100": SliceKind(platform="gpu", dimensions=1, max_chips=8),
        "h200": SliceKind(platform="gpu", dimensions=1, max_chips=8),
    }
)
"""By name of the chip. Eight GPUs share the switches of one machine; what joins machines differs from site to site."""
EXAMPLES = "v5e:4x4, v5p:2x2x1, v6e:2x4, tpu7x:2x2x1, h100:4 and h200:8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """sizes: chips along each dimension."""

    chip: str
    sizes: tuple[int, ...]

    @property
    def kind(self) -> SliceKind:
        return KINDS[self.chip]

    @property
    def num_chips(self) -> int:
        return math.prod(self.sizes)

    @property
    def num_devices(self) -> int:
        """As JAX counts: a TPU7x is two."""
        return self.num_chips * self.kind.devices_per_chip

    def __str__(self) -> str:
        return f"{self.chip}:{'x'.join(map(str, self.sizes))}"


def parse_slice(text: str) -> Slice:
    """Raises: MeshError naming the slice, what is wrong and what is known."""
    chip, _, rest = text.partition(":")
    if chip not in KINDS:
        raise MeshError(f"topology {text!r}: chip {chip!r} is not known; names are such as {EXAMPLES}")
    kind = KINDS[chip]
    parts = rest.split("x")
    if len(parts) != kind.dimensions or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        wanted = {1: "a number of chips", 2: "such as 2x4", 3: "such as 2x2x1"}[kind.dimensions]
        raise MeshError(f"topology {text!r}: behind {chip}: comes {wanted}; names are such as {EXAMPLES}")
    found = Slice(chip=chip, sizes=tuple(map(int, parts)))
    most = kind.max_chips or MAX_DEVICES
    if found.num_chips > most or found.num_devices > MAX_DEVICES:
        why = "share the switches of one machine" if kind.max_chips else "are the most devices of a mesh"
        raise MeshError(f"topology {text!r} has {found.num_chips} chips; {most} {why}")
    return found
