"""O06: the smaller the temperature, the closer to greedy; never blank, never NaN, and no neighbour notices."""

import math

import pytest

from tests.cases.case_client import Answer, CaseClient, Json, at_once
from tests.cases.five_checks import CANARY_IDS

pytestmark = pytest.mark.usefixtures("checks")

FRANCE = {"prompt": "The capital of France is", "max_tokens": 8, "seed": 1, "return_token_ids": True, "logprobs": 1}
GREEDY_IN_EFFECT = (0, 1e-30, 1e-9, 1e-6, 1e-5, 1e-4, 1e-3)
NEIGHBOUR = {"prompt": "Once upon a time", "max_tokens": 12, "seed": 7, "temperature": 1, "return_token_ids": True}


def test_all_of_them_are_greedy_or_nearly_so(client: CaseClient) -> None:
    """Four at a time, so that they share steps with each other and with a request at temperature 1."""

    def ask(body: Json) -> Answer:
        return client.native("completion", body)

    alone = ask(NEIGHBOUR)
    bodies = [FRANCE | {"temperature": t, "top_p": p} for t in (*GREEDY_IN_EFFECT, 0.01) for p in (1, 1e-4)]
    neighbour, *answers = at_once(ask, [NEIGHBOUR, *bodies])
    assert neighbour.outcome == alone.outcome
    for body, answer in zip(bodies, answers, strict=True):
        assert all(math.isfinite(entry["logprob"]) for entry in answer.logprobs)
        if body["temperature"] in GREEDY_IN_EFFECT or body["top_p"] < 1:
            assert answer.token_ids == CANARY_IDS, body
        assert answer.text.strip()


def test_they_mix_with_every_other_kind_of_row(client: CaseClient) -> None:
    """Greedy, tiny, and hot rows with cuts and penalties in one step: the greedy ones stay what they are."""
    hot = {"temperature": 2, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.2, "max_tokens": 12}
    bodies = [FRANCE | {"temperature": 1e-5}, FRANCE | hot, FRANCE | {"temperature": 0}, FRANCE | hot | {"seed": 2}]
    answers = at_once(lambda body: client.native("completion", body), bodies)
    assert answers[0].token_ids == answers[2].token_ids == CANARY_IDS
    assert answers[1].token_ids != answers[3].token_ids
