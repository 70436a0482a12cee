"""O08: the repetition penalty counts prompt and output, the other two the output; cached prompts change nothing."""

from collections import Counter

import numpy as np
import pytest

from tests.cases.case_client import Answer, CaseClient, Json, at_once
from tests.cases.conftest import Reference
from tests.cases.five_checks import CANARY_IDS

pytestmark = pytest.mark.usefixtures("checks")

PARIS = {"prompt": "Paris" + " Paris" * 39, "temperature": 0, "max_tokens": 12, "return_token_ids": True}
"""40 ids: two pages of 16 of them can come from the cache."""
PENALTIES = ({"repetition_penalty": 1.3}, {"presence_penalty": 1.5}, {"frequency_penalty": 1.5})


def penalized(logits_V: np.ndarray, body: Json, prompt: list[int], output: list[int]) -> np.ndarray:
    """headrace-sampling/1, in the fewest words."""
    scores_V = logits_V.copy()
    seen = sorted({*prompt, *output})
    rate = body.get("repetition_penalty", 1.0)
    scores_V[seen] = np.where(scores_V[seen] > 0, scores_V[seen] / rate, scores_V[seen] * rate)
    for token_id, count in Counter(output).items():
        scores_V[token_id] -= body.get("presence_penalty", 0) + count * body.get("frequency_penalty", 0)
    return scores_V


def is_the_references_choice(reference: Reference, body: Json, answer: Answer) -> None:
    """Each id is the best under the penalties of what came before it, or within rounding of the best."""
    prompt, output = answer.prompt_ids, answer.token_ids
    rows = reference([*prompt, *output[:-1]])[len(prompt) - 1 :]
    for position, (row_V, token_id) in enumerate(zip(rows, output, strict=True)):
        scores_V = penalized(row_V, body, prompt, output[:position])
        assert scores_V.max() - scores_V[token_id] < 1e-3, position


@pytest.mark.parametrize("fields", PENALTIES, ids=lambda fields: next(iter(fields)))
def test_cold_warm_and_reference_agree(client: CaseClient, reference: Reference, fields: Json) -> None:
    """Cold: a word of its own before the prompt, so that no other test has put it into the cache."""
    body = PARIS | fields | {"prompt": f"{next(iter(fields))} {PARIS['prompt']}"}
    cold = client.whole("completion", body)
    warm = client.native("completion", body)
    assert cold.usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm.usage["prompt_tokens_details"]["cached_tokens"] >= 32
    assert warm.outcome == cold.outcome
    is_the_references_choice(reference, body, cold)


def test_the_first_token_knows_the_prompt(client: CaseClient) -> None:
    """The model would go on with a word of the prompt; the repetition penalty alone talks it out of that at once."""
    body = {"prompt": "one two one two one two one", "temperature": 0, "max_tokens": 1}
    fields = ({}, {"repetition_penalty": 3}, {"presence_penalty": 2}, {"frequency_penalty": 2})
    plain, repetition, *others = at_once(lambda extra: client.whole("completion", body | extra).text, fields)
    assert plain == " two" != repetition
    assert others == [plain, plain]


def test_penalties_of_one_row_leave_the_others_alone(client: CaseClient) -> None:
    france = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 8, "return_token_ids": True}
    hard = {"repetition_penalty": 2, "presence_penalty": 2, "frequency_penalty": 2, "max_tokens": 10}
    answers = at_once(lambda body: client.native("completion", body), [france, france | hard, france, france | hard])
    assert answers[0].token_ids == answers[2].token_ids == CANARY_IDS
    assert answers[1].token_ids == answers[3].token_ids != CANARY_IDS


def test_a_repetition_penalty_that_makes_no_sense_is_refused(client: CaseClient) -> None:
    for value in (0, -0.0, -1, -1.3, 0.001, 1000):
        refusal = client.refused_alike("completion", PARIS | {"repetition_penalty": value})
        assert (refusal.status, refusal.code, refusal.param) == (400, "invalid_value", "repetition_penalty")
