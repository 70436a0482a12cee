"""How many devices lie along each axis of a mesh. JAX-free."""

import math
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

from headrace.sharding.errors import MeshError

MAX_DEVICES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """Devices along each axis, outermost first: neighbours in the last one are the closest.

    data: copies of the model, each with its own sequences. stage: groups of layers. expert: groups of experts. tensor:
    parts of every head, feed-forward and vocabulary axis.

    Raises: MeshError naming the axis and its limit.
    """

    data: int = 1
    stage: int = 1
    expert: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in fields(self):
            value = getattr(self, axis.name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_DEVICES:
                raise MeshError(
                    f"mesh axis {axis.name} is {value!r}; it must be a whole number from 1 to {MAX_DEVICES}"
                )
        if self.num_devices > MAX_DEVICES:
            raise MeshError(f"mesh {self} has {self.num_devices} devices; {MAX_DEVICES} are the most")

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def sizes(self) -> dict[str, int]:
        """By axis, outermost first."""
        return {axis.name: getattr(self, axis.name) for axis in fields(self)}

    def __str__(self) -> str:
        """As ``parse_mesh`` reads it; axes of one device are left out."""
        return ",".join(f"{name}={size}" for name, size in self.sizes.items() if size > 1) or "tensor=1"


def parse_mesh(text: str) -> MeshShape:
    """A mesh from a flag such as ``tensor=8,data=2``, or from the table ``[mesh]`` of a ``.toml`` file.

    Raises: MeshError naming what is wrong and what is known.
    """
    if text.endswith(".toml"):
        return _read_table(Path(text))
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or not value.isascii() or not value.isdigit():
            raise MeshError(f"mesh {text!r}: {part.strip()!r} is not AXIS=NUMBER, such as tensor=8")
        if name in sizes:
            raise MeshError(f"mesh {text!r} gives {name} twice")
        sizes[name] = int(value)
    return _of_sizes(sizes, f"mesh {text!r}")


def _read_table(path: Path) -> MeshShape:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise MeshError(f"mesh file {path}: {error}") from error
    table = document.get("mesh")
    if not isinstance(table, dict):
        raise MeshError(f"mesh file {path} has no table [mesh]")
    return _of_sizes(table, f"mesh file {path}")


def _of_sizes(sizes: dict[str, int], where: str) -> MeshShape:
    known = [axis.name for axis in fields(MeshShape)]
    unknown = [name for name in sizes if name not in known]
    if unknown:
        raise MeshError(f"{where}: axis {unknown[0]!r} is not known; axes are {', '.join(known)}")
    return MeshShape(**sizes)
