"""Whole steps in every type and arrangement, against the oracle in float32 on the same weights."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest

from headrace.model import oracle
from headrace.model.init import init_weights
from headrace.model.load import LoadedModel
from headrace.pallas_kernels.types import Implementation, Kernels, UnsupportedCase
from headrace.serving.core.errors import ConfigError
from headrace.serving.core.events import TokenEvent
from headrace.serving.core.plan import SlotRef
from headrace.serving.core.request import FinishReason
from headrace.serving.runner.backend import Backend, Wishes, choose_backend
from headrace.serving.runner.runner import JaxRunner
from tests.model.tiny import TINY
from tests.serving.runner.plans import (
    CONFIG,
    GREEDY,
    MIXED,
    end_of,
    load,
    plan,
    prompt,
    request,
    row,
    segment,
    serve,
    tiny_model,
)

SMALL = replace(CONFIG, num_pages=60, decode_rows=(4,), prefill_tokens=(16,))
PROMPTS = tuple(prompt(n, length) for n, length in ((1, 1), (2, 9), (3, 16), (4, 33)))


@dataclass(frozen=True)
class Case:
    """tolerance: on any of the 20 best logprobs of any position."""

    backend: Backend
    tolerance: float


def on_cpu(**wishes: str) -> Backend:
    return choose_backend(jax.devices()[0], Wishes(attention="reference", **wishes))


CASES = {
    "scanned": Case(replace(on_cpu(), scan_layers=True), 1e-4),
    "bfloat16": Case(on_cpu(dtype="bfloat16"), 0.1),
    "bfloat16, scanned, pages as they are": Case(
        replace(on_cpu(dtype="bfloat16"), scan_layers=True, kv_as_bits=False), 0.1
    ),
    "bfloat16 KV, on the second device": Case(replace(on_cpu(kv_dtype="bfloat16"), device=jax.devices("cpu")[1]), 0.03),
    "int8 KV": Case(on_cpu(kv_dtype="int8"), 0.08),
    "fp8 KV": Case(on_cpu(kv_dtype="fp8"), 0.4),
    "bfloat16, int8 KV": Case(on_cpu(dtype="bfloat16", kv_dtype="int8"), 0.1),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Iterator[tuple[Case, JaxRunner]]:
    found = CASES[request.param]
    weights = init_weights(TINY, 3, found.backend.dtype)
    runner = JaxRunner.of_host(LoadedModel(config=TINY, weights=weights, model_hash=""), SMALL, backend=found.backend)
    runner.warm_up(lambda *_: None)
    yield found, runner
    runner.close()


@functools.cache
def oracle_logprobs(ids: tuple[int, ...]) -> np.ndarray:
    """After the last of ids, from the float32 weights that the other types are rounded from."""
    model = tiny_model()
    padded = [*ids, *[0] * (64 - len(ids))]
    return np.asarray(jax.nn.log_softmax(oracle.logits_SV(model.weights, model.config, padded)[len(ids) - 1]))


def test_logprobs_are_the_oracles_with_poison_in_every_free_page(case: tuple[Case, JaxRunner]) -> None:
    """Prefill in chunks, decode in a batch; every page that a sequence gets was NaN before."""
    wanted, runner = case
    runner.poison_pages(range(1, SMALL.num_pages))
    asks = replace(GREEDY, num_logprobs=20)
    events = serve(runner, SMALL, [request(n, ids, asks, max_tokens=6) for n, ids in enumerate(PROMPTS)])
    worst = 0.0
    for number, ids in enumerate(PROMPTS):
        assert end_of(events[number]).reason is FinishReason.LENGTH
        tokens = [event for event in events[number] if isinstance(event, TokenEvent)]
        assert len(tokens) == 6
        for event in tokens:
            assert event.logprobs is not None
            expected = oracle_logprobs(ids)
            worst = max(worst, *(abs(value - expected[token]) for token, value in event.logprobs.top))
            ids = (*ids, event.token_id)
    assert 0 < worst <= wanted.tolerance


def test_a_poisoned_page_in_use_is_reported(case: tuple[Case, JaxRunner]) -> None:
    _, runner = case
    slot, mate = SlotRef(0, 1), SlotRef(1, 1)
    loads = (load(slot, request(1, PROMPTS[1])), load(mate, request(2, PROMPTS[1])))
    parts = (segment(slot, PROMPTS[1][:8], (1, 2)), segment(mate, PROMPTS[1][:8], (3, 4)))
    runner.collect(runner.dispatch(plan(1, MIXED, loads=loads, prefill=parts)))
    runner.poison_pages([1])
    bucket = SMALL.buckets[0]
    rows = (row(slot, 8, (1, 2, 5)), row(mate, 8, (3, 4, 6)))
    result = runner.collect(runner.dispatch(plan(2, bucket, decode=rows)))
    assert [token.is_finite for token in result.decode] == [False, True]


def test_the_types_are_those_that_were_chosen(case: tuple[Case, JaxRunner]) -> None:
    backend, runner = case[0].backend, case[1]
    layers = runner._weights.layers
    first = layers[0] if isinstance(layers, tuple) else layers
    matrices = (runner._weights.embed_VD, first.q_DX, first.k_DY, first.v_DY, first.o_XD, first.gate_DF, first.down_FD)
    assert {x.dtype for x in matrices} == {backend.dtype}
    assert runner._pool.dtype == backend.kv_dtype
    assert (runner._pool.bits_of is not None) == backend.kv_as_bits
    assert (runner._pool.scale_RK2W is not None) == (backend.kv_dtype.itemsize == 1)
    assert isinstance(layers, tuple) != backend.scan_layers


def test_everything_is_on_the_device_that_was_asked_for(case: tuple[Case, JaxRunner]) -> None:
    """After steps and poisoned pages."""
    wanted, runner = case
    held = jax.tree.leaves((runner._weights, runner._pool, runner._state))
    assert {device for array in held for device in array.devices()} == {wanted.backend.device or jax.devices()[0]}


def test_kernels_that_cannot_run_a_program_end_the_start_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(operation: str, kernels: Kernels) -> object:
        raise UnsupportedCase("pages of 4 tokens; at least 8 are needed")

    monkeypatch.setattr("headrace.pallas_kernels.api._kernel", refusing)
    kernels = Kernels(implementation=Implementation.GPU, chip="h100", interpret=True, blocks=("planted",))
    runner = JaxRunner.of_host(tiny_model(), SMALL, backend=Backend(kernels=kernels))
    words = "--attention gpu cannot run the program (decode|mixed)-4.*: pages of 4 tokens; .*--attention reference"
    with pytest.raises(ConfigError, match=words):
        runner.warm_up(lambda *_: None)
    runner.close()
