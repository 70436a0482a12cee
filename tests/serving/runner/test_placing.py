"""Weights that go to their devices one at a time: those of the whole model, which is never on the host."""

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

from headrace.model import weight_files
from headrace.model.errors import ModelFileError
from headrace.model.init import init_weights
from headrace.model.load import load_model
from headrace.model.specs import param_specs
from headrace.model.weights import Weights
from headrace.serving.runner.backend import Backend, find_mesh
from headrace.serving.runner.load import load_placed, placed
from headrace.serving.runner.placing import Inserts, Leaf, Sources, put
from headrace.sharding.mesh import make_mesh
from headrace.sharding.mesh_shape import MeshShape, parse_mesh
from tests.model.test_load_experts import save
from tests.model.tiny import TINY, write_hf

CPU = jax.devices("cpu")[0]


def backend_of(mesh: str, *, scan: bool = False, dtype: type = np.float32) -> Backend:
    return Backend(device=CPU, mesh=find_mesh(CPU, parse_mesh(mesh)), scan_layers=scan, dtype=np.dtype(dtype))


def assert_same(a: Weights[Any], b: Weights[Any]) -> None:
    """Values bit by bit, places and layouts."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape, x.sharding) == (y.dtype, y.shape, y.sharding), path
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), path
        for mine, theirs in zip(x.addressable_shards, y.addressable_shards, strict=True):
            assert mine.device == theirs.device and np.array_equal(mine.data, theirs.data), path


@pytest.mark.parametrize(("mesh", "scan"), [("tensor=1", False), ("tensor=4", False), ("tensor=4", True)])
def test_streamed_weights_are_those_of_the_whole_model(tmp_path: Path, mesh: str, scan: bool) -> None:
    """TINY has two key heads, which four devices have twice."""
    path, calls = write_hf(tmp_path, TINY, init_weights(TINY, 1), num_shards=2), []
    backend = backend_of(mesh, scan=scan, dtype=ml_dtypes.bfloat16)
    streamed = load_placed(path, backend, lambda done, total: calls.append((done, total)))
    host = load_model(path, dtype=ml_dtypes.bfloat16)
    assert_same(streamed.weights, placed(host, backend).weights)
    assert (streamed.config, streamed.model_hash, streamed.digests) == (host.config, host.model_hash, host.digests)
    layers = streamed.weights.layers
    q_DX = [layers.q_DX[i] for i in range(2)] if scan else [layer.q_DX for layer in layers]
    for ours, theirs in zip(q_DX, host.weights.layers, strict=True):
        assert np.array_equal(ours, theirs.q_DX)
    assert len(calls) == len(jax.tree.leaves(param_specs(TINY))) and calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1]


def test_experts_and_halves_of_a_tensor_come_to_their_devices(tmp_path: Path) -> None:
    path, backend = save(tmp_path, "gpt_oss", lambda tensors: None), backend_of("expert=2,tensor=2", scan=True)
    streamed, host = load_placed(path, backend), load_model(path)
    up_LEDF = np.stack([layer.up_EDF for layer in host.weights.layers])
    assert np.array_equal(streamed.weights.layers.up_EDF, up_LEDF) and streamed.model_hash == host.model_hash
    shard = streamed.weights.layers.up_EDF.addressable_shards[3]
    assert np.array_equal(shard.data, up_LEDF[:, up_LEDF.shape[1] // 2 :, :, up_LEDF.shape[3] // 2 :])


def stacked(mesh_shape: MeshShape, rows: int, cut: PartitionSpec, layout: Layout | None = None) -> tuple[Any, Any, Any]:
    """(stack, its rows on the host, its place): a leaf of ``rows`` weights [64, 64], one of each layer."""
    mesh = make_mesh(mesh_shape, jax.devices("cpu"))
    sharding: Any = NamedSharding(mesh, cut)
    specs = tuple(param_specs(TINY).layers[0].o_XD for _ in range(rows))
    place = jax.ShapeDtypeStruct(
        (rows, 64, 64), np.float32, sharding=sharding if layout is None else Format(layout, sharding)
    )
    leaf = Leaf(Sources(specs, is_stack=True), place)
    hosts = np.arange(rows * 64 * 64, dtype=np.float32).reshape(rows, 64, 64)
    per = rows // mesh_shape.stage
    order = [step + part * per for step in range(per) for part in range(mesh_shape.stage)]
    pieces = (put(hosts[row], one.target) for row, one in zip(order, leaf.wanted, strict=True))
    return leaf.fill(pieces, Inserts()), hosts, place


@pytest.mark.parametrize(
    ("shape", "rows", "cut"),
    [
        (MeshShape(stage=2, tensor=2), 6, PartitionSpec("stage", "tensor")),
        (MeshShape(stage=4, tensor=2), 4, PartitionSpec("stage", None, "tensor")),
        (MeshShape(data=2, stage=2), 4, PartitionSpec("stage")),
        (MeshShape(expert=2, tensor=2), 3, PartitionSpec(None, "expert", "tensor")),
    ],
    ids=["scanned stages", "a layer a stage", "data and stages", "no stages"],
)
def test_a_stack_is_filled_in_every_part_at_once(shape: MeshShape, rows: int, cut: PartitionSpec) -> None:
    stack, hosts, place = stacked(shape, rows, cut)
    assert stack.sharding == place.sharding and np.array_equal(stack, hosts)
    for shard in stack.addressable_shards:
        assert np.array_equal(shard.data, hosts[shard.index])


@pytest.mark.parametrize("shape", [MeshShape(tensor=2), MeshShape(stage=2)], ids=str)
def test_a_stack_lies_in_the_layout_that_was_asked_for(shape: MeshShape) -> None:
    cut = PartitionSpec("stage") if shape.stage > 1 else PartitionSpec(None, None, "tensor")
    stack, hosts, _ = stacked(shape, 4, cut, Layout((0, 2, 1)))
    assert stack.format.layout.major_to_minor == (0, 2, 1) and np.array_equal(stack, hosts)


@pytest.mark.parametrize("scan", [False, True])
def test_the_host_never_holds_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scan: bool) -> None:
    """24 matrices of 1 MiB. NumPy holds two while they are read, and, of layers that are not stacked, the eight that
    are cut by rows: there the devices use the memory that they were read into."""
    cfg = replace(TINY, num_layers=8, width=512, ffn_width=512, num_heads=8, num_kv_heads=8, head_dim=2)
    path, backend, calls = write_hf(tmp_path, cfg, init_weights(cfg, 1)), backend_of("tensor=2", scan=scan), []
    monkeypatch.setattr(weight_files, "AHEAD_BYTES", 1 << 20)
    monkeypatch.setattr(weight_files, "BLOCK_BYTES", 1 << 16)

    def progress(done: int, total: int) -> None:
        """Reading config.json takes 64 MiB for a moment."""
        if not calls:
            tracemalloc.reset_peak()
        calls.append(done)

    tracemalloc.start()
    try:
        weights = load_placed(path, backend, progress).weights
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(x.nbytes for x in jax.tree.leaves(weights)) > 24 << 20
    assert peak < (5 << 20) + (0 if scan else 8 << 20), peak


def test_a_fault_late_in_the_files_ends_the_load(tmp_path: Path) -> None:
    weights = init_weights(TINY, 1)
    weights.layers[1].down_FD[0, 0] = np.inf
    with pytest.raises(ModelFileError, match=r"'model\.layers\.1\.mlp\.down_proj\.weight' holds 1 NaN or infinite"):
        load_placed(write_hf(tmp_path, TINY, weights), backend_of("tensor=2"))
