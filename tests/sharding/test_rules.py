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
from tests.model.tiny import GPT_OSS_TINY, MIXTRAL_TINY, SMOLLM2, TINY


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
        partition(spec, MeshShape(tensor=2), {**RULES, Axis.WIDTH: ("tensor",)})


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


def test_an_axis_that_would_cut_nothing_is_refused() -> None:
    with pytest.raises(MeshError, match="axis expert is 2, and this model has no experts"):
        config_on_mesh(TINY, MeshShape(expert=2))
    assert config_on_mesh(MIXTRAL_TINY, MeshShape(expert=2)) == MIXTRAL_TINY
    with pytest.raises(
        MeshError, match=r"layers\.0\.gate_EDF of shape .*: its axis experts .8. does not divide into 3"
    ):
        config_on_mesh(MIXTRAL_TINY, MeshShape(expert=3))


def test_experts_are_cut_over_two_axes_and_routers_are_whole() -> None:
    layer = partitions(GPT_OSS_TINY, MeshShape(expert=2, tensor=2)).layers[0]
    assert layer.gate_EDF == layer.up_EDF == PartitionSpec("expert", None, "tensor")
    assert layer.down_EFD == PartitionSpec("expert", "tensor", None)
    assert layer.gate_bias_EF == PartitionSpec("expert", "tensor") and layer.down_bias_ED == PartitionSpec(
        "expert", None
    )
    assert layer.router_DE == PartitionSpec(None, None) and layer.router_bias_E == PartitionSpec(None)
    assert layer.sinks_N == layer.q_bias_X == PartitionSpec("tensor") and layer.o_bias_D == PartitionSpec(None)
