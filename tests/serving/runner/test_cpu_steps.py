"""Whole steps of the CPU's kernels: logprobs and greedy ids of the oracle, whatever the weights and the layer."""

from dataclasses import replace
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest

from headrace.model import oracle
from headrace.model.config import ModelConfig
from headrace.model.fused_layer import is_fused
from headrace.model.init import init_weights
from headrace.model.load import LoadedModel, load_model
from headrace.model.weights import Weights
from headrace.pallas_kernels.types import Activations
from headrace.serving.core.events import TokenEvent
from headrace.serving.core.request import SamplingParams
from headrace.serving.runner.backend import Backend, Wishes, choose_backend
from headrace.serving.runner.forms import with_forms
from headrace.serving.runner.load import PlacedModel, load_placed, placed
from headrace.serving.runner.runner import JaxRunner
from headrace.sharding.collectives import ONE_DEVICE
from tests.model.tiny import MIXTRAL_TINY, QWEN3_TINY, TINY, write_gguf
from tests.serving.runner.plans import CONFIG, GREEDY, prompt, request, serve

CPU = jax.devices("cpu")[0]
SMALL = replace(CONFIG, page_size=8, num_pages=80, decode_rows=(4,), prefill_tokens=(16,))
CFG = replace(TINY, ffn_width=128)
TOLERANCES = {"exact": 2e-5, "int16": 2e-3}
"""Of a logprob: exact differs in the order of sums."""
LENGTHS = ((1, 9), (2, 21), (3, 4))


def backend_of(path: Path, **wishes: str) -> Backend:
    return with_forms(choose_backend(CPU, Wishes(attention="cpu", **wishes)), path)


def outputs(model: PlacedModel, backend: Backend, params: SamplingParams) -> dict[int, list[TokenEvent]]:
    runner = JaxRunner(model, SMALL, backend=backend)
    runner.warm_up(lambda *_: None)
    asks = [request(n, prompt(seed, length, model.config), params) for n, (seed, length) in enumerate(LENGTHS)]
    events = serve(runner, SMALL, asks)
    runner.close()
    return {n: [e for e in events[n] if isinstance(e, TokenEvent)] for n in events}


def check(model: PlacedModel, backend: Backend, weights: Weights[np.ndarray], tolerance: float) -> None:
    """weights: dequantized."""
    cfg, found = model.config, outputs(model, backend, replace(GREEDY, num_logprobs=20))
    for number, (seed, length) in enumerate(LENGTHS):
        ids, out = prompt(seed, length, cfg), [event.token_id for event in found[number]]
        padded = [*ids, *out, *[0] * (32 - len(ids) - len(out))]
        logprob_SV = np.asarray(jax.nn.log_softmax(oracle.logits_SV(weights, cfg, padded)))[len(ids) - 1 :]
        assert out == logprob_SV[: len(out)].argmax(axis=1).tolist() and len(out) == 8
        for event, logprob_V in zip(found[number], logprob_SV, strict=False):
            assert event.logprobs is not None
            for token, value in event.logprobs.top:
                assert value == pytest.approx(logprob_V[token], abs=tolerance)


@pytest.mark.parametrize("activations", ["exact", "int16"])
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_a_fused_layer_is_the_oracles(tmp_path: Path, kind: str, activations: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", CFG, init_weights(CFG, 3), gguf.GGMLQuantizationType[kind])
    backend = backend_of(path, activations=activations)
    model = load_placed(path, backend)
    assert is_fused(model.weights.layers[0], CFG, backend.kernels, ONE_DEVICE)
    check(model, backend, load_model(path).weights, TOLERANCES[activations])


@pytest.mark.parametrize("cfg", [TINY, QWEN3_TINY, MIXTRAL_TINY], ids=lambda cfg: cfg.family)
def test_other_layers_take_the_general_way(cfg: ModelConfig) -> None:
    """With float weights, norms of queries and keys, and experts."""
    weights = init_weights(cfg, 3)
    backend = choose_backend(CPU, Wishes(attention="cpu"))
    model = placed(LoadedModel(config=cfg, weights=weights, model_hash="0" * 64), backend)
    assert not is_fused(model.weights.layers[0], cfg, backend.kernels, ONE_DEVICE)
    check(model, backend, weights, TOLERANCES["exact"])


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_greedy_ids_are_the_same_with_and_without_logits(tmp_path: Path, kv_dtype: str) -> None:
    """Without logprobs the best id comes from the head's own kernel, and no logits are made."""
    path = write_gguf(tmp_path / "m.gguf", CFG, init_weights(CFG, 3), gguf.GGMLQuantizationType.Q4_1)
    backend = backend_of(path, kv_dtype=kv_dtype)
    model = load_placed(path, backend)
    ids = [
        {n: [event.token_id for event in events] for n, events in outputs(model, backend, params).items()}
        for params in (GREEDY, replace(GREEDY, num_logprobs=1), replace(GREEDY, logit_bias=((5, 0.0),)))
    ]
    assert ids[0] == ids[1] == ids[2] and all(len(of) == 8 for of in ids[0].values())


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_experts_may_be_rounded_too(scheme: str) -> None:
    """They have no tiles: XLA multiplies them, and refuses arrays of 4 bits in programs that were compiled ahead."""
    cfg, weights = MIXTRAL_TINY, init_weights(MIXTRAL_TINY, 3)
    found = []
    for attention in ("reference", "cpu"):
        backend = choose_backend(CPU, Wishes(attention=attention, weights=scheme))
        backend = replace(backend, kernels=replace(backend.kernels, activations=Activations.EXACT))
        model = placed(LoadedModel(config=cfg, weights=weights, model_hash="0" * 64), backend)
        events = outputs(model, backend, GREEDY)
        found.append({n: [event.token_id for event in of] for n, of in events.items()})
    assert found[0] == found[1] and all(len(ids) == 8 for ids in found[0].values())


def test_int8_activations_run_and_are_another_kernel(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", CFG, init_weights(CFG, 3), gguf.GGMLQuantizationType.Q4_1)
    backend = backend_of(path, activations="int8")
    assert backend.kernels.activations is Activations.INT8
    found = outputs(load_placed(path, backend), backend, GREEDY)
    assert all(len(events) == 8 for events in found.values())
