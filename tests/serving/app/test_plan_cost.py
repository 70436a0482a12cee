"""The bound of a step, by hand."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.model.config import ModelConfig
from headrace.model.on_mesh import config_on_mesh
from headrace.model.published import configurations
from headrace.model.published.configurations import PUBLISHED, published_config
from headrace.model.specs import WeightScheme, param_specs, weight_bytes
from headrace.pallas_kernels.chips import CHIPS
from headrace.serving.app.plan_cost import CostModel, StepShape, stream_numbers
from headrace.serving.app.plan_types import Workload
from headrace.sharding import links
from headrace.sharding.links import Group
from headrace.sharding.mesh_shape import MeshShape

V6E, HALF, ONE = CHIPS["v6e"], np.dtype(np.float16), MeshShape()
BILLIONS = {
    "llama-3.1-8b": 8.03, "llama-3.1-70b": 70.55, "qwen3-8b": 8.19, "qwen3-32b": 32.76, "qwen3-30b-a3b": 30.53,
    "mixtral-8x7b": 46.70, "gpt-oss-20b": 20.91, "gpt-oss-120b": 116.83,
}  # fmt: skip
"""Parameters, as published."""


def costs(
    cfg: ModelConfig,
    mesh: MeshShape = ONE,
    *,
    token_bytes: float = 0,
    scheme: WeightScheme = WeightScheme.NATIVE,
) -> CostModel:
    """On a line of v6e."""
    cfg = config_on_mesh(cfg, mesh)

    def line(axes: Sequence[str]) -> Group:
        num = math.prod(mesh.sizes[axis] for axis in axes)
        return Group(paths=(links.Path(num=num, bytes_per_s=90e9),))

    specs = param_specs(cfg, HALF, scheme)
    return CostModel(cfg=cfg, mesh=mesh, chip=V6E, specs=specs, token_bytes=token_bytes, lies=line)


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
    cost = costs(cfg, token_bytes=131_072).step(StepShape(rows=16, context=1024))
    table = 2 * 128_256 * 4096
    assert cost.weight_bytes == pytest.approx(weight_bytes(cfg, HALF) - table + 2 * 16 * 4096, rel=1e-9)
    assert cost.kv_bytes == 16 * 1024 * 131_072
    assert (cost.exchanges, cost.links_s) == ((), 0)
    assert cost.hbm_s == pytest.approx((cost.weight_bytes + cost.kv_bytes) / 1.64e12)
    products = 2 * 16 * (weight_bytes(cfg, HALF) / 2 - 128_256 * 4096)
    assert cost.flops == pytest.approx(products + 4 * 16 * 1024 * 32 * 4096, rel=1e-3)
    assert (cost.bound, cost.seconds) == ("memory", cost.hbm_s)


def test_four_devices_share_weights_and_products_and_exchange_sums() -> None:
    cfg, shape = published_config("llama-3.1-8b"), StepShape(rows=16, context=1024)
    one, four = (
        costs(cfg, mesh, token_bytes=131_072 / mesh.tensor).step(shape) for mesh in (MeshShape(), MeshShape(tensor=4))
    )
    assert four.weight_bytes == pytest.approx(one.weight_bytes / 4, rel=1e-3)
    assert four.flops == pytest.approx(one.flops / 4, rel=1e-3)
    layers, draw = four.exchanges
    assert (layers.axes, layers.count, layers.size_bytes) == (("tensor",), 1 + 2 * 32, 16 * 4096 * 4)
    assert (draw.axes, draw.count, draw.size_bytes) == (("tensor",), 3, 16 * 4)
    assert layers.link_bytes == pytest.approx(1.5 * 16 * 4096 * 4)
    assert four.links_s == pytest.approx((65 * 1.5 * 16 * 4096 * 4 + 3 * 1.5 * 64) / 90e9 + 68 * 6e-6)
    assert four.seconds == pytest.approx(four.hbm_s + four.links_s)


def test_experts_sum_over_their_own_axes() -> None:
    cfg, shape = published_config("qwen3-30b-a3b"), StepShape(rows=4, context=1)
    axes = {
        str(mesh): [(exchange.axes, exchange.count) for exchange in costs(cfg, mesh).step(shape).exchanges]
        for mesh in (MeshShape(expert=4), MeshShape(tensor=4), MeshShape(expert=2, tensor=2))
    }
    assert axes == {
        "expert=4": [(("expert",), 48)],
        "tensor=4": [(("tensor",), 97), (("tensor",), 3)],
        "expert=2,tensor=2": [(("tensor",), 49), (("expert", "tensor"), 48), (("tensor",), 3)],
    }


def test_stages_read_their_layers_once_for_each_micro_batch() -> None:
    cfg, shape = published_config("llama-3.1-8b"), StepShape(rows=16, context=1024)
    whole = costs(cfg, token_bytes=131_072).step(shape)
    model = replace(costs(cfg, MeshShape(stage=4), token_bytes=131_072 / 4), rungs=(1, 4, 16))
    staged = model.step(shape)
    # 4 micro-batches of 4 rows, 7 ticks; the head is cut over stages too.
    assert (model.ticks(shape).parts, model.ticks(shape).count) == (4, 7)
    head = 2 * 128_256 * 4096
    layers = whole.weight_bytes - head - 2 * 16 * 4096
    assert staged.weight_bytes == pytest.approx(layers / 4 * 7 + head / 4, rel=1e-3)
    assert staged.kv_bytes == whole.kv_bytes / 4
    token = 4096 * 4
    assert [(x.what, x.axes, x.count, x.size_bytes) for x in staged.exchanges] == [
        ("sum", ("stage",), 2, 16 * token),  # the embedding, and what the last stage has of 16 rows
        ("send", ("stage",), 7, 4 * token),
        ("draw", ("stage",), 3, 16 * 4),
    ]
    send = staged.exchanges[1]
    assert send.seconds == pytest.approx(7 * (4 * token / 90e9 + 1e-6))
    # A chunk alone has one decode row, so it is one micro-batch.
    assert model.ticks(StepShape(rows=0, context=512, prompt_tokens=512)).count == 4


def test_stages_and_tensor_parts_cut_the_vocabulary_together() -> None:
    cfg, shape = published_config("llama-3.1-8b"), StepShape(rows=2, context=1)
    mesh = MeshShape(stage=2, tensor=2)
    cost = replace(costs(cfg, mesh), rungs=(2,)).step(shape)
    assert [(x.what, x.axes, x.count) for x in cost.exchanges] == [
        ("sum", ("stage", "tensor"), 1),
        ("sum", ("tensor",), 2 * 16 * 3),
        ("sum", ("stage",), 1),
        ("send", ("stage",), 3),
        ("draw", ("stage", "tensor"), 3),
    ]


def test_int8_weights_are_half_the_bytes_and_their_factors() -> None:
    cfg, shape = published_config("llama-3.1-8b"), StepShape(rows=1, context=1)
    native, int8 = (costs(cfg, scheme=scheme).step(shape) for scheme in (WeightScheme.NATIVE, WeightScheme.INT8))
    columns = 32 * (2 * 4096 + 2 * 1024 + 2 * 14_336 + 4096) + 128_256
    norms, row = 4 * 4096 * 65, 2 * 4096
    assert int8.weight_bytes == pytest.approx((native.weight_bytes - norms - row) / 2 + norms + row + 4 * columns)
    assert int8.flops == native.flops


def test_a_prompt_is_bound_by_products() -> None:
    cfg = published_config("llama-3.1-8b")
    cost = costs(cfg, token_bytes=131_072).step(StepShape(rows=0, context=4096, prompt_tokens=4096))
    assert cost.bound == "products"
    assert cost.flops == pytest.approx(2 * 4096 * 7.0e9, rel=0.1)


def test_a_layer_with_a_window_reads_no_more_than_that() -> None:
    cfg = published_config("gpt-oss-20b")  # 128 tokens in every other layer
    long, short = (costs(cfg, token_bytes=24).step(StepShape(rows=1, context=context)) for context in (4096, 100))
    assert long.kv_bytes == 24 * (4096 + 128) / 2
    assert short.kv_bytes == 24 * 100


@pytest.mark.parametrize(("rows", "share"), [(1, 8 / 128), (16, 1 - (1 - 8 / 128) ** 16), (4096, 1.0)])
def test_a_step_reads_the_experts_that_it_needs(rows: int, share: float) -> None:
    cfg = published_config("qwen3-30b-a3b")
    cost = costs(cfg).step(StepShape(rows=rows, context=1))
    experts = 2 * 48 * 128 * 3 * 2048 * 768
    table = 2 * 151_936 * 2048
    others = weight_bytes(cfg, HALF) - experts - table
    assert cost.weight_bytes == pytest.approx(others + experts * share, rel=2e-3, abs=2 * rows * 2048)
    active = 2 * rows * (others / 2 + experts / 2 * 8 / 128)
    assert cost.flops == pytest.approx(active, rel=1e-2)  # routers are float32, twice the bytes


def test_experts_are_shared_by_two_axes() -> None:
    cfg = published_config("gpt-oss-120b")
    cost = costs(cfg, MeshShape(expert=4, tensor=2)).step(StepShape(rows=512, context=1))
    experts = 2 * 36 * 128 * 3 * 2880 * 2880
    rest = weight_bytes(cfg, HALF) - experts - 2 * 201_088 * 2880
    assert cost.weight_bytes == pytest.approx(experts / 8 + rest / 2, rel=0.01)


def test_tied_embeddings_are_read_for_the_logits() -> None:
    cfg, shape = published_config("llama-3.1-8b"), StepShape(rows=1, context=1)
    tied, untied = (costs(replace(cfg, tied_embeddings=is_tied)).step(shape) for is_tied in (True, False))
    assert tied.weight_bytes == pytest.approx(untied.weight_bytes, rel=1e-5)
    assert tied.flops == pytest.approx(untied.flops)


def test_streams_wait_for_the_prompts_of_others() -> None:
    of = costs(published_config("llama-3.1-8b"))
    work = Workload(prompt=1000, output=100)
    point = of.point(4, work, chunk_tokens=512)
    # 4 prompts of 2 chunks while a stream makes 100 tokens.
    assert point.token_s == pytest.approx((8 * point.mixed.seconds + 92 * point.decode.seconds) / 100)
    assert point.first_token_s == pytest.approx(2 * point.mixed.seconds)
    assert point.tokens_per_s == pytest.approx(4 / point.token_s)
    assert point.decode == of.step(StepShape(rows=4, context=1050))
    crowded = of.point(64, work, chunk_tokens=512)
    assert crowded.token_s == pytest.approx(128 / 100 * crowded.mixed.seconds)
    assert of.alone(work, 512) == of.step(StepShape(rows=0, context=1000, prompt_tokens=512))


@pytest.mark.parametrize(
    ("most", "numbers"), [(1, (1,)), (2, (1, 2)), (16, (1, 2, 4, 8, 16)), (20, (1, 2, 4, 8, 16, 20))]
)
def test_numbers_of_streams(most: int, numbers: Sequence[int]) -> None:
    assert stream_numbers(most) == tuple(numbers)
