"""Weights in the places and layouts that steps read, on the devices that hold them."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

from headrace.model.init import init_weights
from headrace.model.on_mesh import config_on_mesh
from headrace.model.specs import WeightScheme
from headrace.model.weights import Weights
from headrace.pallas_kernels.chips import CHIPS, Chip
from headrace.serving.runner.arrays import make_pool, make_state, pool_shapes, state_shapes
from headrace.serving.runner.backend import Backend
from headrace.serving.runner.inputs import InputLayout
from headrace.serving.runner.placing import place
from headrace.serving.runner.programs import step_program
from headrace.serving.runner.weights import laid_out, layout_of, weight_shapes
from headrace.sharding.mesh import make_mesh
from headrace.sharding.mesh_shape import MeshShape
from tests.model.tiny import GPT_OSS_TINY, TINY
from tests.serving.runner.plans import CONFIG

CPU = jax.devices("cpu")[0]


def shapes(dtype: type) -> Weights[Any]:
    return weight_shapes(TINY, Backend(device=CPU, dtype=np.dtype(dtype), scan_layers=True))


@pytest.mark.parametrize("chip", [None, CHIPS["h100"]])
def test_only_a_tpu_asks_for_layouts(chip: Chip | None) -> None:
    tree = shapes(jnp.bfloat16)
    assert laid_out(tree, chip) is tree


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e"])
def test_the_embedding_is_read_by_rows_and_projections_by_columns(chip: str) -> None:
    tree = laid_out(shapes(jnp.bfloat16), CHIPS[chip])
    assert tree.embed_VD.format.layout == Layout((0, 1))
    for x in (tree.layers.q_DX, tree.layers.k_DY, tree.layers.v_DY):
        assert x.format.layout == Layout((0, 2, 1))
    assert {x.format.layout for x in (tree.layers.o_XD, tree.layers.gate_DF, tree.layers.attn_norm_D)} == {None}
    one_layer = weight_shapes(TINY, Backend(device=CPU)).layers[0].q_DX
    assert layout_of("q_DX", one_layer, CHIPS[chip]) == Layout((1, 0))


def test_a_tpu7x_reads_bfloat16_in_tiles_of_16_rows() -> None:
    tiles = ((16, 128), (2, 1))
    tree = laid_out(shapes(jnp.bfloat16), CHIPS["tpu7x"])
    assert tree.embed_VD.format.layout == Layout((0, 1), tiles)
    assert tree.layers.q_DX.format.layout == Layout((0, 2, 1), tiles)
    assert tree.layers.down_FD.format.layout == Layout((0, 1, 2), tiles)
    assert tree.final_norm_D.format.layout is None and tree.layers.attn_norm_D.format.layout is None
    tree = laid_out(shapes(np.float32), CHIPS["tpu7x"])
    assert tree.embed_VD.format.layout == Layout((0, 1)) and tree.layers.down_FD.format.layout is None


def test_experts_lie_in_rows_and_xlas_own_tiles_which_their_kernel_takes() -> None:
    backend = Backend(device=CPU, dtype=np.dtype(jnp.bfloat16), scan_layers=True)
    layers = laid_out(weight_shapes(GPT_OSS_TINY, backend), CHIPS["tpu7x"]).layers
    assert {x.format.layout for x in (layers.gate_EDF, layers.down_EFD)} == {Layout((0, 1, 2, 3))}
    assert layers.gate_bias_EF.format.layout is None
    assert layers.o_XD.format.layout == Layout((0, 1, 2), ((16, 128), (2, 1)))


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "tpu7x"])
def test_int8_lies_by_rows_on_every_tpu(chip: str) -> None:
    backend = Backend(device=CPU, dtype=np.dtype(jnp.bfloat16), weights=WeightScheme.INT8, scan_layers=True)
    for cfg, names in ((TINY, ("q_DX", "o_XD", "down_FD")), (GPT_OSS_TINY, ("k_DY", "gate_EDF"))):
        tree = laid_out(weight_shapes(cfg, backend), CHIPS[chip])
        for name in names:
            leaf = getattr(tree.layers, name)
            rank = len(leaf.shape)
            assert leaf.values_KN.format.layout == Layout(tuple(range(rank))) and leaf.scale_GN.format.layout is None
            assert (leaf.values_KN.dtype, leaf.scale_GN.dtype, leaf.dtype) == (np.int8, np.float32, jnp.bfloat16)
            assert leaf.scale_GN.shape == (*leaf.shape[:-2], 1, leaf.shape[-1]) and rank > 2
        assert tree.embed_VD.dtype == jnp.bfloat16


@pytest.mark.parametrize("scan", [False, True])
def test_a_step_compiled_for_layouts_takes_weights_that_lie_so(scan: bool) -> None:
    backend = Backend(device=CPU, scan_layers=scan)
    layout = InputLayout(CONFIG.buckets[0], CONFIG, TINY.vocab_size)
    arrays = pool_shapes(TINY, CONFIG, backend), state_shapes(TINY, CONFIG, backend)
    results = []
    for turned in (True, False):
        weights, wanted = place(init_weights(TINY, 1), TINY, backend), weight_shapes(TINY, backend)
        if turned:
            columns = Format(Layout((1, 0)), SingleDeviceSharding(CPU))
            shape = wanted.embed_VD
            wanted = wanted.replace(embed_VD=jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=columns))
            weights = weights.replace(embed_VD=jax.device_put(weights.embed_VD, columns))
        program = step_program(TINY, layout, backend, wanted, *arrays).compile(CPU)
        pool, state = make_pool(TINY, CONFIG, backend), make_state(TINY, CONFIG, backend)
        results.append(np.asarray(program(weights, pool, state, None, layout.empty())[3]))
    assert np.array_equal(*results) and results[0].any()


@pytest.mark.parametrize("scan", [False, True])
def test_weights_on_a_mesh_are_whole_together_with_key_heads_repeated(scan: bool) -> None:
    cfg = config_on_mesh(TINY, MeshShape(tensor=4))
    mesh = make_mesh(MeshShape(tensor=4), jax.devices("cpu"))
    host = init_weights(TINY, 1)
    weights = place(host, cfg, Backend(device=CPU, mesh=mesh, scan_layers=scan))
    first = weights.layers if scan else weights.layers[0]
    q_DX, k_DY = (np.asarray(x)[0] if scan else np.asarray(x) for x in (first.q_DX, first.k_DY))
    assert np.array_equal(q_DX, host.layers[0].q_DX)
    heads = host.layers[0].k_DY.reshape(64, 2, 16)
    assert np.array_equal(k_DY.reshape(64, 4, 16), heads[:, [0, 0, 1, 1]])
    for x, parts in ((first.q_DX, 4), (first.down_FD, 4), (weights.embed_VD, 4), (weights.final_norm_D, 1)):
        assert len(x.sharding.device_set) == 4
        assert x.size // x.addressable_shards[0].data.size == parts
    assert replace(cfg, num_kv_heads=2) == TINY
