"""The oracle against facts that do not come from it: published ids of the real model, and laws of the architecture."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.model.config import ModelConfig
from headrace.model.init import init_weights
from headrace.model.load import load_model
from headrace.model.oracle import logits_SV
from headrace.model.weights import Weights
from tests.model.tiny import TINY

FRANCE_PROMPT = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712]
FRANCE_PROMPT += [8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
GOLDEN = Path(__file__).parent.parent / "golden" / "smollm2_135m_greedy.json"
FRANCE_REPLY = [504, 3575, 282, 4649, 314, 7042, 30, 2]
LENGTH = 96
"""Of all prompts of the real model, padded behind, where nothing looks: one program of thirty layers."""


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> tuple[Weights[jax.Array], ModelConfig]:
    model = load_model(smollm2_path)
    return jax.tree.map(jnp.asarray, model.weights), model.config


def test_smollm2_answers_as_the_reference_does(smollm2: tuple[Weights[jax.Array], ModelConfig]) -> None:
    """Ids of transformers in float32 for the chat prompt "What is the capital of France?", greedy."""
    ids = FRANCE_PROMPT + FRANCE_REPLY
    rows = logits_SV(*smollm2, ids + [0] * (LENGTH - len(ids)))
    greedy = np.asarray(rows).argmax(axis=-1)[len(FRANCE_PROMPT) - 1 : len(ids) - 1]
    assert greedy.tolist() == FRANCE_REPLY


def test_smollm2_gives_the_recorded_logprobs(smollm2: tuple[Weights[jax.Array], ModelConfig]) -> None:
    """Teacher-forced over the reference's own ids: a few short prompts.

    Over all 57 prompts of the record the largest difference is 3e-5 (float32, sums in another order).
    """
    prompts = [p for p in json.loads(GOLDEN.read_text())["prompts"] if len(p["prompt_ids"]) <= 48]
    for prompt in prompts[:: len(prompts) // 5]:
        ids, start = prompt["prompt_ids"] + prompt["ids"], len(prompt["prompt_ids"])
        rows = logits_SV(*smollm2, ids[:-1] + [0] * (LENGTH - len(ids) + 1))[start - 1 : len(ids) - 1]
        assert rows.argmax(axis=-1).tolist() == prompt["ids"]
        chosen = np.asarray(jax.nn.log_softmax(rows))[np.arange(len(prompt["ids"])), prompt["ids"]]
        np.testing.assert_allclose(chosen, prompt["logprobs"], rtol=0, atol=2e-4)


def test_a_token_changes_no_earlier_row() -> None:
    weights = init_weights(TINY, seed=1)
    a, b = (np.asarray(logits_SV(weights, TINY, ids)) for ids in ([3, 5, 7, 11, 13], [3, 5, 7, 90, 13]))
    assert np.array_equal(a[:3], b[:3])
    assert (np.abs(a[3:] - b[3:]).max(axis=-1) > 1e-3).all()


def test_tokens_are_told_apart_by_their_distance() -> None:
    """Without positions the last row could not see the order of the tokens before it."""
    weights = init_weights(TINY, seed=1)
    a, b = (np.asarray(logits_SV(weights, TINY, ids))[-1] for ids in ([3, 5, 7, 11], [5, 3, 7, 11]))
    assert np.abs(a - b).max() > 1e-3


def test_an_untied_head_equal_to_the_embedding_gives_the_tied_logits() -> None:
    weights = init_weights(TINY, seed=1)
    untied = weights.replace(head_DV=weights.embed_VD.T)
    a, b = logits_SV(weights, TINY, [1, 2, 3]), logits_SV(untied, replace(TINY, tied_embeddings=False), [1, 2, 3])
    np.testing.assert_allclose(a, b, atol=1e-5)


def test_repeating_key_heads_equals_grouping_them() -> None:
    weights = init_weights(TINY, seed=1)
    group = TINY.num_heads // TINY.num_kv_heads

    def repeated(x_DY: np.ndarray) -> np.ndarray:
        return x_DY.reshape(TINY.width, -1, TINY.head_dim).repeat(group, axis=1).reshape(TINY.width, -1)

    layers = tuple(layer.replace(k_DY=repeated(layer.k_DY), v_DY=repeated(layer.v_DY)) for layer in weights.layers)
    full = replace(TINY, num_kv_heads=TINY.num_heads)
    a, b = logits_SV(weights, TINY, [9, 8, 7, 6]), logits_SV(weights.replace(layers=layers), full, [9, 8, 7, 6])
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("ids", [[], [96], [-1], [1, 1 << 40]])
def test_ids_out_of_range_are_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="ids below 96"):
        logits_SV(init_weights(TINY, seed=1), TINY, ids)
