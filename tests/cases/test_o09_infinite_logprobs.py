"""O09: masks and cuts make candidates impossible; the answer stays JSON and the chosen logprob finite."""

import math

import pytest

from tests.cases.case_client import CaseClient, Json, at_once

pytestmark = pytest.mark.usefixtures("checks")

FRANCE = {"prompt": "The capital of France is", "max_tokens": 3}
ASK_FRANCE = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 3}
PARIS, THE = 7042, 504
CUTS: list[Json] = [
    {"temperature": 0, "allowed_token_ids": [264]},
    {"temperature": 1, "seed": 1, "top_p": 0.01},
    {"temperature": 1, "seed": 1, "top_k": 1},
    {"temperature": 0, "logit_bias": {PARIS: -100, THE: -100}},
    {"temperature": 0, "logit_bias": {264: 100}},
    {"temperature": 1, "seed": 1, "min_p": 1},
    {"temperature": 0, "allowed_token_ids": [0, 2, 264], "min_tokens": 3},
]


def test_the_answer_parses_in_every_mode(client: CaseClient) -> None:
    """The client reads strict JSON only. Logprobs are the model's own, before masks, so nothing in them is infinite."""
    at_once(lambda cut: all_is_finite(client, cut), CUTS)


def all_is_finite(client: CaseClient, cut: Json) -> None:
    for answer in client.everywhere("completion", FRANCE | cut | {"logprobs": 5}):
        numbers = [value for entry in answer.logprobs for value in numbers_in(entry)]
        assert numbers
        assert all(math.isfinite(number) for number in numbers)
    chat = ASK_FRANCE | cut | {"logprobs": True, "top_logprobs": 5, "return_token_ids": True}
    answer = client.events("chat", chat)
    for entry, token_id in zip(answer.logprobs, answer.token_ids, strict=True):
        assert entry["token_id"] == token_id
        assert -100 < entry["logprob"] <= 0
        assert len(entry["top_logprobs"]) == 5


def numbers_in(entry: Json) -> list[float]:
    """Logprobs of the native shape, or of the completions shape."""
    if "token_logprobs" in entry:
        return [*entry["token_logprobs"], *(value for top in entry["top_logprobs"] for value in top.values())]
    return [entry["logprob"], *(top["logprob"] for top in entry["top_logprobs"])]
