"""What the devices of a mesh are, and what joins them, as far as JAX says."""

from collections.abc import Sequence
from typing import Any

from headrace.serving.engine.messages import Topology
from headrace.serving.runner.backend import DeviceFacts, platform_of


def topology_of(devices: Sequence[DeviceFacts]) -> Topology:
    """Of all devices of a mesh, or of the one that serves; those of other processes included."""
    first = devices[0]
    return Topology(
        platform=platform_of(first),
        device_kind=first.device_kind,
        num_devices=len(devices),
        num_processes=len(_values(devices, "process_index")),
        link=link_of(devices),
    )


def link_of(devices: Sequence[DeviceFacts]) -> str:
    """In words. JAX does not say how GPUs of a host are joined, nor what lies between hosts: then the text says so."""
    if len(devices) == 1:
        return "none"
    platform, num_processes = platform_of(devices[0]), len(_values(devices, "process_index"))
    if platform == "tpu":
        if len(_values(devices, "slice_index")) > 1:
            return "ICI within a slice, data centre network between slices"
        coordinates = _values(devices, "coords")
        return "one chip" if len(coordinates) == 1 and None not in coordinates else "ICI"
    if platform == "gpu":
        return "NVLink or PCIe (not asked)" + (", network between processes" if num_processes > 1 else "")
    if platform == "cpu":
        return "shared memory" if num_processes == 1 else "shared memory, sockets between processes"
    return "not known"


def _values(devices: Sequence[Any], name: str) -> set[object]:
    """Different ones of an attribute that not every platform has; a list, as coordinates are, as a tuple."""
    found = (getattr(device, name, None) for device in devices)
    return {tuple(value) if isinstance(value, list) else value for value in found}
