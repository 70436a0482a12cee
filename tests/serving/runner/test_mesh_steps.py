"""The runner on meshes of CPU devices: the tokens and logprobs of one device, and the collectives that were meant."""

import collections
import functools
import re
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest

from headrace.model.config import ModelConfig
from headrace.model.init import init_weights
from headrace.model.load import LoadedModel
from headrace.model.on_mesh import config_on_mesh
from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.errors import ConfigError
from headrace.serving.core.events import TokenEvent
from headrace.serving.core.request import SamplingParams
from headrace.serving.runner.arrays import pool_shapes, state_shapes
from headrace.serving.runner.backend import Backend, find_mesh
from headrace.serving.runner.inputs import InputLayout
from headrace.serving.runner.programs import step_program
from headrace.serving.runner.runner import JaxRunner
from headrace.serving.runner.weights import weight_shapes
from headrace.sharding.errors import MeshError
from headrace.sharding.mesh_shape import parse_mesh
from tests.model.tiny import TINY
from tests.serving.runner.plans import CONFIG, prompt, request, serve

CPU = jax.devices("cpu")[0]
SMALL = replace(CONFIG, num_pages=80, decode_rows=(4,), prefill_tokens=(16,))
WIDE = replace(TINY, num_heads=8, num_kv_heads=2, head_dim=8, ffn_width=96, vocab_size=192)
"""8 query and 2 key heads; 24 ids on each of 8 devices, which is no multiple of the 64 lanes of a draw."""
NINE = replace(TINY, num_heads=9, num_kv_heads=3, head_dim=16, width=48, vocab_size=96)
"""The heads of SmolLM2."""
TOLERANCE = 2e-5
"""Largest difference of two logprobs; sums over heads, widths and ids are sums of partial sums."""
PROMPTS = tuple(prompt(seed, length) for seed, length in ((1, 9), (2, 21), (3, 4), (4, 30)))
ASKS = (
    SamplingParams(temperature=0.0, num_logprobs=20),
    SamplingParams(temperature=0.9, top_p=0.8, seed=7, num_logprobs=5),
    SamplingParams(temperature=1.3, top_k=9, min_p=0.02, seed=1 << 40, repetition_penalty=1.2, num_logprobs=3),
    SamplingParams(temperature=0.0, logit_bias=((5, 3.0), (95, 2.0)), frequency_penalty=0.5, num_logprobs=20),
)


@dataclass(frozen=True, slots=True)
class Case:
    cfg: ModelConfig
    mesh: str
    scan: bool = False


CASES = (
    Case(NINE, "tensor=3"),
    pytest.param(Case(NINE, "tensor=3", scan=True), marks=pytest.mark.slow),
    pytest.param(Case(WIDE, "tensor=2"), marks=pytest.mark.slow),
    pytest.param(Case(WIDE, "tensor=4"), marks=pytest.mark.slow),
    pytest.param(Case(replace(WIDE, tied_embeddings=False), "tensor=4", scan=True), marks=pytest.mark.slow),
    pytest.param(Case(WIDE, "tensor=8"), marks=pytest.mark.slow),
    Case(replace(WIDE, num_layers=4), "data=2,stage=2,tensor=2"),
    pytest.param(Case(NINE, "data=2"), marks=pytest.mark.slow),
    pytest.param(Case(NINE, "data=2,tensor=3"), marks=pytest.mark.slow),
    pytest.param(Case(NINE, "stage=2"), marks=pytest.mark.slow),
    pytest.param(Case(NINE, "stage=2,tensor=3"), marks=pytest.mark.slow),
    pytest.param(Case(replace(NINE, num_layers=6), "stage=3", scan=True), marks=pytest.mark.slow),
    pytest.param(Case(replace(NINE, num_layers=4), "data=2,stage=2", scan=True), marks=pytest.mark.slow),
)


def backend_of(mesh: str, *, scan: bool = False) -> Backend:
    return Backend(device=CPU, mesh=find_mesh(CPU, parse_mesh(mesh)), scan_layers=scan)


def config_of(mesh: str) -> SchedulerConfig:
    """Four slots in all."""
    lanes = parse_mesh(mesh).data
    return replace(SMALL, num_lanes=lanes, num_slots=4 // lanes, decode_rows=(4 // lanes,))


@functools.cache
def answers(case: Case) -> dict[int, list[TokenEvent]]:
    """Four requests of different kinds, in chunks and batches."""
    model, config = LoadedModel(config=case.cfg, weights=init_weights(case.cfg, 3), model_hash=""), config_of(case.mesh)
    runner = JaxRunner.of_host(model, config, backend=backend_of(case.mesh, scan=case.scan))
    runner.warm_up(lambda *_: None)
    runner.poison_pages([page for page in range(config.num_lanes * config.num_pages) if page % config.num_pages])
    requests = [request(n, ids, asks) for n, (ids, asks) in enumerate(zip(PROMPTS, ASKS, strict=True))]
    events = serve(runner, config, requests)
    runner.close()
    return {n: [event for event in found if isinstance(event, TokenEvent)] for n, found in events.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.cfg.num_heads} heads, {case.mesh}, {case.scan}")
def test_a_mesh_gives_the_tokens_and_logprobs_of_one_device(case: Case) -> None:
    expected, found = answers(replace(case, mesh="tensor=1")), answers(case)
    for number in expected:
        assert [event.token_id for event in found[number]] == [event.token_id for event in expected[number]]
        assert len(found[number]) == 8
        for ours, theirs in zip(found[number], expected[number], strict=True):
            assert ours.logprobs is not None and theirs.logprobs is not None
            assert ours.logprobs.rank == theirs.logprobs.rank
            assert ours.logprobs.chosen == pytest.approx(theirs.logprobs.chosen, abs=TOLERANCE)
            assert [token for token, _ in ours.logprobs.top] == [token for token, _ in theirs.logprobs.top]
            values = [[value for _, value in logprobs.top] for logprobs in (ours.logprobs, theirs.logprobs)]
            np.testing.assert_allclose(*values, atol=TOLERANCE, rtol=0)


SAMPLER = {
    "all-reduce": (
        "s32[R]",  # greedy: the lowest id that has the largest logit
        "s32[R]",  # the same after penalties and masks
        "s32[R]", "f32[R]", "f32[R],f32[R]",  # a cut: candidates above it, their mass; the mass of all, a floor
        "f32[R,32]", "f32[R,C]",  # a draw: mass of each lane, weights of one lane
        "f32[R]", "f32[R],f32[R]", "s32[R]",  # largest edited logit; logprobs: total and chosen, rank
        "f32[R]", "f32[R]",  # largest logit; whether all are finite
    ),
    "all-gather": ("f32[R,60]", "s32[R,60]"),  # the 20 best of each device
}  # fmt: skip
"""All that the sampler exchanges, most of it in branches that greedy rows do not take; R rows, 3 devices. XLA combines
neighbours. No logits: they would be f32[R,96]."""


def collectives(cfg: ModelConfig, mesh: str, *, scan: bool, bucket: int) -> dict[str, list[str]]:
    """Shapes by opcode in one compiled step; a layout is not part of a shape."""
    backend, config = backend_of(mesh, scan=scan), config_of(mesh)
    cfg = config_on_mesh(cfg, backend.mesh_shape)
    layout = InputLayout(config.buckets[bucket], config, cfg.vocab_size)
    weights, pool = weight_shapes(cfg, backend), pool_shapes(cfg, config, backend)
    program = step_program(cfg, layout, backend, weights, pool, state_shapes(cfg, config, backend))
    found = collections.defaultdict(list)
    names = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|ragged-all-to-all"
    for line in program.compile(CPU).as_text().splitlines():
        match = re.match(rf"\s+(?:ROOT )?%?[\w.-]+ = (.*?) ({names})(?:-start)?\(", line)
        if match:
            found[match[2]].append(",".join(re.findall(r"[a-z]+\d+\[[\d,]*\]", match[1])))
    return {name: sorted(shapes) for name, shapes in found.items()}


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("bucket", [pytest.param(0, marks=pytest.mark.slow), -1])
def test_devices_exchange_what_is_in_the_table_and_nothing_else(scan: bool, bucket: int) -> None:
    tokens, rows = ((4, 4), (4 + 16, 4 + 2))[bucket]
    of_model = 1 + 2 * (1 if scan else NINE.num_layers)  # the embedding; attention and feed-forward of each layer
    lanes = {shape: shape.replace("R", str(rows)).replace("C", "4") for of in SAMPLER.values() for shape in of}
    expected = {name: sorted(lanes[shape] for shape in shapes) for name, shapes in SAMPLER.items()}
    expected["all-reduce"] = sorted([*expected["all-reduce"], *[f"f32[{tokens},{NINE.width}]"] * of_model])
    assert collectives(NINE, "tensor=3", scan=scan, bucket=bucket) == expected
    assert collectives(NINE, "tensor=1", scan=scan, bucket=bucket) == {}


def test_lanes_and_stages_exchange_what_is_in_the_table_and_nothing_else() -> None:
    """Two micro-batches of half the tokens each. Of the sampler only what any vocabulary on two devices exchanges."""
    found = collectives(NINE, "data=2,stage=2", scan=False, bucket=-1)
    rows, tokens, width = 2 + 2, 2 + 16, NINE.width
    assert found.pop("collective-permute") == [f"f32[{tokens // 2},{width}]"]  # from stage to stage, in a loop
    assert found.pop("all-gather") == sorted([f"f32[{rows},40]", f"s32[{rows},40]", f"s32[{2 * rows},{4 + 2 * 20}]"])
    sums = found.pop("all-reduce")
    assert sorted(shape for shape in sums if shape.startswith("f32") and f",{width}]" in shape) == sorted(
        [f"f32[{tokens},{width}]", f"f32[{rows},{width}]"]  # the embedding; hidden states of the last stage
    )
    assert len(sums) - 2 == len(SAMPLER["all-reduce"]) and not found
    assert collectives(NINE, "data=2", scan=False, bucket=-1) == {"all-gather": [f"s32[{2 * rows},{4 + 2 * 20}]"]}


@pytest.mark.parametrize(
    ("change", "mesh", "words"),
    [
        ({"num_layers": 3}, "stage=2", r"layers: 3 do not divide into 2 stages .mesh axis stage."),
        (
            {"num_layers": 6, "sliding_window": 8, "window_pattern": (True, False)},
            "stage=2",
            r"layers: 6 in periods of 2 do not divide into 2 stages",
        ),
        ({"vocab_size": 98}, "stage=2,tensor=3", r"embed_VD .* .98. does not divide into 6 parts .mesh axis stage and"),
        ({}, "tensor=2", r"layers.0.q_DX of shape .*: its axis heads .9 heads. does not divide into 2 .* into 1, 3"),
        ({"num_heads": 8, "num_kv_heads": 2}, "tensor=3", "k_DY and v_DY: 2 key heads cannot be replicated over 3"),
        ({"vocab_size": 97}, "tensor=3", "embed_VD of shape .*: its axis vocab .97. does not divide into 3 parts"),
        (
            {"ffn_width": 100},
            "tensor=3",
            r"layers.0.gate_DF of shape \[48, 100\]: its axis ffn .100. .*into 1, 2, 4, 5",
        ),
    ],
)
def test_a_shape_that_does_not_divide_is_refused_with_the_tensors_name(
    change: dict[str, int], mesh: str, words: str
) -> None:
    with pytest.raises(MeshError, match=words):
        config_on_mesh(replace(NINE, **change), parse_mesh(mesh))


def test_a_mesh_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="--mesh: mesh tensor=9 needs 9 devices; there are 8"):
        find_mesh(CPU, parse_mesh("tensor=9"))
    assert find_mesh(CPU, parse_mesh("tensor=1")) is None
