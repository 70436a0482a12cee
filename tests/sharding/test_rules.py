"""Where weights are cut, and what cannot be cut."""

from dataclasses import replace

import jax
import pytest
from jax.sharding import PartitionSpec

from headrace.model.on_mesh import config_on_mesh, partitions
from headrace.model.specs import param_specs
from headrace.sharding.axes import Axis
from headrace.sharding.errors import MeshError
from headrace.sharding.mesh_shape import MeshShape
from headrace.sharding.rules import RULES, partition, replicated_kv_heads
from tests.model.tiny import SMOLLM2, TINY


def test_smollm2_over_three_devices() -> None:
    cuts = partitions(SMOLLM2, MeshShape(tensor=3))
    assert cuts.embed_VD == PartitionSpec("tensor", None) and cuts.final_norm_D == PartitionSpec(None)
    layer = cuts.layers[29]
    assert layer.q_DX == layer.k_DY == layer.v_DY == layer.gate_DF == layer.up_DF == PartitionSpec(None, "tensor")
    assert layer.o_XD == layer.down_FD == PartitionSpec("tensor", None)


def test_an_axis_of_one_device_cuts_nothing() -> None:
    for cut in jax.tree.leaves(partitions(TINY, MeshShape(data=4))):
        assert set(cut) == {None}


def test_two_axes_of_a_tensor_are_not_cut_over_one_axis_of_the_mesh() -> None:
    spec = param_specs(TINY).layers[0].gate_DF
    with pytest.raises(MeshError, match=r"layers\.0\.gate_DF: axes width and ffn are both cut over mesh axis tensor"):
        partition(spec, MeshShape(tensor=2), {**RULES, Axis.WIDTH: "tensor"})


def test_heads_are_not_cut_in_two() -> None:
    """The width of all heads divides, their number does not."""
    spec = param_specs(replace(TINY, num_heads=6)).layers[0].q_DX
    assert spec.shape == (64, 96)
    with pytest.raises(MeshError, match="heads .6 heads. does not divide into 4 parts .*; it would into 1, 2, 3, 6"):
        partition(spec, MeshShape(tensor=4))


@pytest.mark.parametrize(("heads", "tensor", "expected"), [(8, 1, 8), (8, 8, 8), (8, 2, 8), (2, 8, 8), (1, 4, 4)])
def test_key_heads_are_repeated_where_devices_outnumber_them(heads: int, tensor: int, expected: int) -> None:
    assert replicated_kv_heads(heads, tensor) == expected


def test_key_heads_that_cannot_be_shared_out_are_refused_by_name() -> None:
    with pytest.raises(MeshError, match="k_DY and v_DY: 3 key heads cannot be replicated over 4 parts"):
        replicated_kv_heads(3, 4)
    with pytest.raises(MeshError, match="q_DX: 6 query heads do not divide into 4 parts"):
        config_on_mesh(replace(TINY, num_heads=6, num_kv_heads=2), MeshShape(tensor=4))
