"""Models with experts, windows and sinks through the runner: the oracle's ids, with nothing compiled after READY."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from headrace.model import oracle
from headrace.model.config import ModelConfig
from headrace.model.init import init_weights
from headrace.model.load import LoadedModel
from headrace.serving.runner.backend import Backend
from headrace.serving.runner.runner import JaxRunner
from tests.model.tiny import GPT_OSS_TINY, QWEN3_MOE_TINY
from tests.serving.runner.plans import CONFIG, ids_of, prompt, request, serve

SMALL = replace(CONFIG, num_pages=60, decode_rows=(4,), prefill_tokens=(16,))
PROMPTS = tuple(prompt(n, length) for n, length in ((1, 1), (2, 9), (3, 16), (4, 33)))


def model(cfg: ModelConfig) -> LoadedModel:
    """Random, biases and sinks included."""
    rng = np.random.default_rng(8)
    weights = jax.tree.map(
        lambda x: x if x.any() else rng.standard_normal(x.shape).astype(x.dtype), init_weights(cfg, 3)
    )
    return LoadedModel(config=cfg, weights=weights, model_hash="")


@pytest.mark.parametrize(
    ("cfg", "scan"),
    [
        pytest.param(QWEN3_MOE_TINY, False, marks=pytest.mark.slow),
        (QWEN3_MOE_TINY, True),
        (GPT_OSS_TINY, False),
        pytest.param(GPT_OSS_TINY, True, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "family", value),
)
def test_greedy_ids_are_the_oracles(cfg: ModelConfig, scan: bool) -> None:
    loaded = model(cfg)
    runner = JaxRunner.of_host(loaded, SMALL, backend=Backend(scan_layers=scan))
    runner.warm_up(lambda *_: None)
    runner.poison_pages(range(1, SMALL.num_pages))
    assert runner.expert_tokens() == ((0,) * cfg.num_experts,) * cfg.num_layers  # warm-up runs padding
    events = serve(runner, SMALL, [request(n, ids, max_tokens=6) for n, ids in enumerate(PROMPTS)])
    counts = runner.expert_tokens()
    runner.close()
    assert counts is not None
    # Every prompt and all but the last sampled token, each to as many experts in every layer.
    num_run = sum(len(ids) + 5 for ids in PROMPTS) * cfg.experts_per_token
    assert [sum(layer) for layer in counts] == [num_run] * cfg.num_layers
    assert all(0 <= count <= num_run for layer in counts for count in layer)
    for number, ids in enumerate(PROMPTS):
        found = ids_of(events[number])
        assert len(found) == 6
        whole = [*ids, *found]
        logits_SV = np.asarray(oracle.logits_SV(loaded.weights, cfg, [*whole, *[0] * (64 - len(whole))]))
        assert logits_SV[len(ids) - 1 : len(whole) - 1].argmax(axis=-1).tolist() == found
