"""Slices by name, groups of devices on their grids, and the time of a sum, by hand."""

from itertools import product

import pytest

from headrace.sharding.errors import MeshError
from headrace.sharding.links import HOP_S, KINDS_OF_LINKS, Group, Path, grid_group, links_of, switched_group
from headrace.sharding.slices import KINDS, parse_slice


def grid(*sizes: int, devices: int = 1) -> list[tuple[int, ...]]:
    return [(*at, device) for at in product(*map(range, sizes)) for device in range(devices)]


def test_slices_by_name() -> None:
    of = parse_slice("tpu7x:2x2x1")
    assert (str(of), of.num_chips, of.num_devices, of.kind.platform) == ("tpu7x:2x2x1", 4, 8, "tpu")
    assert (parse_slice("h100:4").num_devices, parse_slice("h100:4").kind.platform) == (4, "gpu")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("v9:2x2", "chip 'v9' is not known; names are such as v5e:4x4"),
        ("v6e", "behind v6e: comes such as 2x4"),
        ("v6e:2x2x2", "behind v6e: comes such as 2x4"),
        ("v5p:2x2", "such as 2x2x1"),
        ("v6e:2x-1", "such as 2x4"),
        ("v6e:0x4", "such as 2x4"),
        ("h100:2x2", "a number of chips"),
        ("h100:16", "has 16 chips; 8 share the switches of one machine"),
        ("v5e:32x16", "has 512 chips; 256 are the most devices of a mesh"),
        ("tpu7x:4x8x8", "256 chips; 256 are the most devices"),
    ],
)
def test_a_slice_that_is_none_is_named(text: str, says: str) -> None:
    with pytest.raises(MeshError, match=says):
        parse_slice(text)


def test_every_chip_has_links() -> None:
    assert KINDS_OF_LINKS.keys() == KINDS.keys()
    with pytest.raises(MeshError, match="no link bandwidth is known for v4; known: v5e"):
        links_of("v4")


def test_a_line_comes_back_over_its_own_links() -> None:
    line = Group(paths=(Path(num=4, bytes_per_s=1e9),))
    assert line.link_bytes(1e6) == pytest.approx(1.5e6)
    assert line.all_reduce_s(1e6) == pytest.approx(1.5e-3 + 6 * HOP_S)


def test_a_ring_goes_both_ways() -> None:
    ring = Group(paths=(Path(num=16, bytes_per_s=1e9, is_ring=True),))
    assert ring.all_reduce_s(1e6) == pytest.approx(15 / 16 * 1e-3 + 16 * HOP_S)


def test_dimensions_share_a_sum() -> None:
    group = grid_group(parse_slice("v5e:4x4"), grid(4, 4, 1))
    assert (str(group), group.num_devices, group.is_whole) == ("4x4", 16, True)
    assert group.all_reduce_s(1e6) == pytest.approx(15 / 16 * 1e6 / 45e9 + 12 * HOP_S)


@pytest.mark.parametrize(
    ("slice_name", "places", "lies"),
    [
        ("v6e:2x4", grid(2, 4, 1), "2x4"),
        ("v6e:2x4", [(0, 0, 0, 0), (0, 1, 0, 0), (0, 2, 0, 0), (0, 3, 0, 0)], "4"),
        ("v5e:16x16", grid(16, 16, 1), "16rx16r"),
        ("v5e:16x16", grid(4, 16, 1), "4x16r"),
        ("v5p:4x4x4", grid(4, 4, 4), "4rx4rx4r"),
        ("v5p:2x2x1", grid(2, 2, 1), "2x2"),
        ("v5p:4x4x2", grid(4, 4, 2), "4x4x2"),
        ("tpu7x:2x2x1", grid(2, 2, 1, devices=2), "2+2x2"),
        ("tpu7x:2x2x1", grid(1, 1, 1, devices=2), "2+1"),
    ],
)
def test_how_devices_lie(slice_name: str, places: list[tuple[int, ...]], lies: str) -> None:
    group = grid_group(parse_slice(slice_name), places)
    assert (str(group), group.num_devices, group.is_whole) == (lies, len(places), True)


def test_devices_that_fill_no_box_count_as_a_line() -> None:
    group = grid_group(parse_slice("v6e:2x4"), [(0, 0, 0, 0), (1, 1, 0, 0)])
    assert (group.is_whole, str(group)) == (False, "2")


def test_devices_of_a_chip_sum_first() -> None:
    group = grid_group(parse_slice("tpu7x:2x2x1"), grid(2, 2, 1, devices=2))
    inside, between = 1e6 / 600e9 + 2 * HOP_S, 1.5 * 1e6 / 2 / 100e9 + 4 * HOP_S
    assert group.all_reduce_s(1e6) == pytest.approx(inside + between)


def test_gpus_have_a_link_each() -> None:
    assert switched_group("h100", 1).all_reduce_s(1e6) == 0
    assert switched_group("h100", 4).all_reduce_s(1e6) == pytest.approx(1.5 * 1e6 / 450e9 + 6 * HOP_S)
