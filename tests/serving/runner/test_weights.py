"""Weights in the layouts that steps read, on the device that holds them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from headrace.model.decoder import new_pool
from headrace.model.init import init_weights
from headrace.model.weights import Weights
from headrace.pallas_kernels.chips import CHIPS, Chip
from headrace.pallas_kernels.types import Kernels
from headrace.serving.runner.inputs import InputLayout
from headrace.serving.runner.programs import step_program
from headrace.serving.runner.sampling_state import initial_state
from headrace.serving.runner.weights import arranged, laid_out, place, shapes_of
from tests.model.tiny import GPT_OSS_TINY, TINY
from tests.serving.runner.plans import CONFIG

CPU = jax.devices("cpu")[0]
SHARDING = SingleDeviceSharding(CPU)


def shapes(dtype: type) -> Weights[Any]:
    return arranged(shapes_of(init_weights(TINY, 1, dtype)), scan=True)


@pytest.mark.parametrize("chip", [None, CHIPS["h100"]])
def test_only_a_tpu_asks_for_layouts(chip: Chip | None) -> None:
    tree = shapes(jnp.bfloat16)
    assert laid_out(tree, chip, SHARDING) is tree
    assert laid_out(tree, CHIPS["v6e"], None) is tree


def test_the_embedding_is_read_by_rows() -> None:
    tree = laid_out(shapes(jnp.bfloat16), CHIPS["v5e"], SHARDING)
    assert tree.embed_VD.format.layout.major_to_minor == (0, 1)
    assert tree.embed_VD.format.layout.tiling is None
    assert all(x.format.layout is None for x in jax.tree.leaves(tree.replace(embed_VD=None)))


def test_a_tpu7x_reads_bfloat16_in_tiles_of_16_rows() -> None:
    tree = laid_out(shapes(jnp.bfloat16), CHIPS["tpu7x"], SHARDING)
    for x in (tree.embed_VD, tree.layers.q_DX, tree.layers.down_FD):
        assert x.format.layout.tiling == ((16, 128), (2, 1))
        assert x.format.layout.major_to_minor == tuple(range(x.ndim))
    assert tree.final_norm_D.format.layout is None
    assert tree.layers.attn_norm_D.format.layout is None  # float32
    tree = laid_out(shapes(np.float32), CHIPS["tpu7x"], SHARDING)
    assert tree.embed_VD.format.layout.tiling is None and tree.layers.q_DX.format.layout is None


@pytest.mark.parametrize("scan", [False, True])
def test_experts_lie_in_xlas_own_tiles_which_their_kernel_takes(scan: bool) -> None:
    tree = laid_out(
        arranged(shapes_of(init_weights(GPT_OSS_TINY, 1, jnp.bfloat16)), scan=scan), CHIPS["tpu7x"], SHARDING
    )
    layer = tree.layers if scan else tree.layers[1]
    assert all(x.format.layout is None for x in (layer.gate_EDF, layer.up_EDF, layer.down_EFD))
    assert layer.q_DX.format.layout.tiling == ((16, 128), (2, 1))


@pytest.mark.parametrize("scan", [False, True])
def test_placed_weights_are_what_a_step_compiled_for_their_layouts_takes(scan: bool) -> None:
    host = init_weights(TINY, 1)
    layout = InputLayout(CONFIG.buckets[0], CONFIG, TINY.vocab_size)
    results = []
    for chip in (CHIPS["v6e"], None):
        weights = place(host, CPU, scan=scan, chip=chip)
        assert all(x.devices() == {CPU} for x in jax.tree.leaves(weights))
        pool = new_pool(TINY, CONFIG.num_pages, CONFIG.page_size)
        state = initial_state(CONFIG.num_slots, TINY.vocab_size)
        formatted = laid_out(shapes_of(weights), chip, SHARDING)
        assert (formatted.embed_VD.format.layout is None) is (chip is None)
        program = step_program(TINY, layout, Kernels(), formatted, *shapes_of((pool, state)))
        results.append(np.asarray(program.compile(CPU)(weights, pool, state, layout.empty())[2]))
    assert np.array_equal(*results) and results[0].any()
