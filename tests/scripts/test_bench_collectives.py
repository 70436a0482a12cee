"""The collectives that are timed are those that are named, keep their values, and are in the compiled program."""

import re

import jax
import numpy as np
import pytest

from headrace.sharding.mesh import make_mesh
from headrace.sharding.mesh_shape import MeshShape
from scripts.bench_collectives import (
    COLLECTIVES,
    LOOP,
    looped,
    measure,
    memory,
    model_config,
    on_mesh,
    spread,
    weight_bytes_per_device,
    whole_array,
)
from tests.model.tiny import TINY

MESH = make_mesh(MeshShape(tensor=4, expert=2), jax.devices("cpu"))
OPCODES = {
    "nothing": set[str](), "psum": {"all-reduce"}, "pmax": {"all-reduce"}, "all_gather": {"all-gather"},
    "psum_scatter": {"reduce-scatter"}, "ppermute": {"collective-permute"},
}  # fmt: skip


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_loop_exchanges_what_its_name_says_and_equal_values_stay(name: str) -> None:
    x = whole_array((2, 8), MESH)
    compiled = on_mesh(looped(COLLECTIVES[name], "tensor", 4, 3), MESH).lower(x).compile()
    names = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    assert set(re.findall(rf"\s({names})(?:-start)?\(", compiled.as_text())) == OPCODES[name]
    np.testing.assert_allclose(compiled(x), np.ones((2, 8)), rtol=1e-6)


def test_rows_of_the_table() -> None:
    rows = measure(MESH, 10, (1,), copy_per_s=1e9, warmup=1, repeats=2)
    assert [(row.axis, row.devices) for row in rows[:: len(COLLECTIVES)]] == [("expert", 2), ("tensor", 4)]
    assert [row.array_bytes for row in rows] == [40] * len(COLLECTIVES) + [48] * len(COLLECTIVES)  # 10, then 12 columns
    gather = next(row for row in rows if (row.axis, row.collective) == ("tensor", "all_gather"))
    assert gather.p10_us <= gather.median_us <= gather.p90_us
    assert gather.received_gb_per_s == pytest.approx(3 * 48 / gather.median_us / 1e3, abs=6e-4)
    assert rows[0].copy_share is None and rows[0].received_gb_per_s == 0
    assert LOOP > 1


def test_spread() -> None:
    assert spread([float(n) for n in range(11)]) == (5.0, 1.0, 9.0)


def test_memory_and_sizes() -> None:
    assert memory(MESH)["process_peak_rss_bytes"] > 50 << 20
    cut = make_mesh(MeshShape(tensor=2), jax.devices("cpu"))
    whole = weight_bytes_per_device(TINY, make_mesh(MeshShape(), jax.devices("cpu")))
    assert whole / 2 < weight_bytes_per_device(TINY, cut) < whole * 0.52  # norms are whole on each
    assert model_config("llama-3.1-8b").width == 4096
