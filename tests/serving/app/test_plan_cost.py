"""The bound of a step, by hand."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.model.on_mesh import config_on_mesh
from headrace.model.published import configurations
from headrace.model.published.configurations import PUBLISHED, published_config
from headrace.model.specs import weight_bytes
from headrace.pallas_kernels.chips import CHIPS
from headrace.serving.app.plan_cost import StepShape, step_cost
from headrace.sharding.errors import MeshError
from headrace.sharding.mesh_shape import MeshShape
from headrace.sharding.topologies import Links, links_of

V6E, HALF = CHIPS["v6e"], np.dtype(np.float16)
BILLIONS = {
    "llama-3.1-8b": 8.03, "llama-3.1-70b": 70.55, "qwen3-8b": 8.19, "qwen3-32b": 32.76, "qwen3-30b-a3b": 30.53,
    "mixtral-8x7b": 46.70, "gpt-oss-20b": 20.91, "gpt-oss-120b": 116.83,
}  # fmt: skip
"""Parameters, as published."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_have_the_published_size(name: str) -> None:
    config = published_config(name)
    assert weight_bytes(config, HALF) / 2e9 == pytest.approx(BILLIONS[name], rel=2e-3)


def test_there_is_a_size_for_each() -> None:
    assert BILLIONS.keys() == PUBLISHED.keys()
    folder = Path(configurations.__file__).parent
    assert {path.stem for path in folder.glob("*.json")} == set(PUBLISHED)


def test_a_decode_step_of_one_device_reads_all_weights_but_the_embedding() -> None:
    cfg = published_config("llama-3.1-8b")
    shape = StepShape(rows=16, context=1024)
    cost = step_cost(cfg, MeshShape(), V6E, links_of("v6e"), shape, dtype=HALF, kv_token_bytes=131_072)
    table = 2 * 128_256 * 4096
    assert cost.weight_bytes == pytest.approx(weight_bytes(cfg, HALF) - table + 2 * 16 * 4096, rel=1e-9)
    assert cost.kv_bytes == 16 * 1024 * 131_072
    assert (cost.collectives, cost.links_s) == (0, 0)
    assert cost.hbm_s == pytest.approx((cost.weight_bytes + cost.kv_bytes) / 1.64e12)
    products = 2 * 16 * (weight_bytes(cfg, HALF) / 2 - 128_256 * 4096)
    assert cost.flops == pytest.approx(products + 4 * 16 * 1024 * 32 * 4096, rel=1e-3)
    assert (cost.bound, cost.seconds) == ("memory", cost.hbm_s)


def test_four_devices_share_weights_and_products_and_exchange_sums() -> None:
    cfg = published_config("llama-3.1-8b")
    shape = StepShape(rows=16, context=1024)
    one, four = (
        step_cost(cfg, mesh, V6E, links_of("v6e"), shape, dtype=HALF, kv_token_bytes=131_072 / mesh.tensor)
        for mesh in (MeshShape(), MeshShape(tensor=4))
    )
    assert four.weight_bytes == pytest.approx(one.weight_bytes / 4, rel=1e-3)
    assert four.flops == pytest.approx(one.flops / 4, rel=1e-3)
    assert (four.collectives, four.sum_bytes) == (1 + 2 * 32, 16 * 4096 * 4)
    each = 1.5 * 16 * 4096 * 4 / 90e9 + 6e-6
    assert four.links_s == pytest.approx(65 * each)
    assert four.seconds == pytest.approx(four.hbm_s + four.links_s)


def test_a_prompt_is_bound_by_products() -> None:
    cfg = published_config("llama-3.1-8b")
    shape = StepShape(rows=0, context=4096, prompt_tokens=4096)
    cost = step_cost(cfg, MeshShape(), V6E, links_of("v6e"), shape, dtype=HALF, kv_token_bytes=131_072)
    assert cost.bound == "products"
    assert cost.flops == pytest.approx(2 * 4096 * 7.0e9, rel=0.1)


@pytest.mark.parametrize(("rows", "share"), [(1, 8 / 128), (16, 1 - (1 - 8 / 128) ** 16), (4096, 1.0)])
def test_a_step_reads_the_experts_that_it_needs(rows: int, share: float) -> None:
    cfg = published_config("qwen3-30b-a3b")
    shape = StepShape(rows=rows, context=1)
    cost = step_cost(cfg, MeshShape(), V6E, links_of("v6e"), shape, dtype=HALF, kv_token_bytes=0)
    experts = 2 * 48 * 128 * 3 * 2048 * 768
    table = 2 * 151_936 * 2048
    others = weight_bytes(cfg, HALF) - experts - table
    assert cost.weight_bytes == pytest.approx(others + experts * share, rel=2e-3, abs=2 * rows * 2048)
    active = 2 * rows * (others / 2 + experts / 2 * 8 / 128)
    assert cost.flops == pytest.approx(active, rel=1e-2)  # routers are float32, twice the bytes


def test_experts_are_shared_by_two_axes() -> None:
    cfg = config_on_mesh(published_config("gpt-oss-120b"), MeshShape(expert=4, tensor=2))
    cost = step_cost(
        cfg,
        MeshShape(expert=4, tensor=2),
        V6E,
        links_of("v6e"),
        StepShape(rows=512, context=1),
        dtype=HALF,
        kv_token_bytes=0,
    )
    experts = 2 * 36 * 128 * 3 * 2880 * 2880
    rest = weight_bytes(cfg, HALF) - experts - 2 * 201_088 * 2880
    assert cost.weight_bytes == pytest.approx(experts / 8 + rest / 2, rel=0.01)


def test_links() -> None:
    links = Links(bytes_per_s=1e9, hop_s=1e-6)
    assert links.all_reduce_s(1e6, 1) == 0
    assert links.all_reduce_s(1e6, 4) == pytest.approx(1.5e-3 + 6e-6)
    assert links_of("v5e").bytes_per_s < links_of("v6e").bytes_per_s
    with pytest.raises(MeshError, match="no link bandwidth is known for h100; known: v5e, v5p, v6e, tpu7x"):
        links_of("h100")


def test_tied_embeddings_are_read_for_the_logits() -> None:
    cfg = published_config("llama-3.1-8b")
    shape = StepShape(rows=1, context=1)
    tied, untied = (
        step_cost(
            replace(cfg, tied_embeddings=is_tied),
            MeshShape(),
            V6E,
            links_of("v6e"),
            shape,
            dtype=HALF,
            kv_token_bytes=0,
        )
        for is_tied in (True, False)
    )
    assert tied.weight_bytes == pytest.approx(untied.weight_bytes, rel=1e-5)
    assert tied.flops == pytest.approx(untied.flops)
