"""What is recorded of a mesh's devices: never more than JAX says."""

from dataclasses import dataclass

import jax
import pytest

from headrace.serving.engine.messages import Topology
from headrace.serving.runner.topology import link_of, topology_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """coords, slice_index: None where the platform has none, as attributes that are missing."""

    platform: str
    device_kind: str = "kind"
    process_index: int = 0
    coords: list[int] | None = None
    slice_index: int | None = None


def tpus(*places: tuple[list[int], int]) -> list[Device]:
    return [Device(platform="tpu", coords=coords, slice_index=index) for coords, index in places]


@pytest.mark.parametrize(
    ("devices", "link"),
    [
        ([Device(platform="cuda")], "none"),
        ([Device(platform="cpu")] * 8, "shared memory"),
        ([Device(platform="cpu", process_index=i) for i in range(2)], "shared memory, sockets between processes"),
        ([Device(platform="cuda")] * 4, "NVLink or PCIe (not asked)"),
        (
            [Device(platform="gpu", process_index=i) for i in range(2)],
            "NVLink or PCIe (not asked), network between processes",
        ),
        (tpus(([0, 0, 0], 0), ([1, 0, 0], 0)), "ICI"),
        (tpus(([0, 0, 0], 0), ([0, 0, 0], 0)), "one chip"),
        (tpus(([0, 0, 0], 0), ([0, 0, 0], 1)), "ICI within a slice, data centre network between slices"),
        ([Device(platform="tpu")] * 2, "ICI"),
        ([Device(platform="npu")] * 2, "not known"),
    ],
    ids=str,
)
def test_links(devices: list[Device], link: str) -> None:
    assert link_of(devices) == link


def test_devices_here() -> None:
    found = topology_of(jax.devices("cpu")[:4])
    assert found == Topology(platform="cpu", device_kind="cpu", num_devices=4, num_processes=1, link="shared memory")
    assert found.device == "cpu:cpu"
