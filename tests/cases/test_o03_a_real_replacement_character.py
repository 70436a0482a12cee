"""O03: a model that really writes U+FFFD is heard at once, and nothing of it is lost."""

import pytest

from headrace.model.tokenizer import Tokenizer
from tests.cases.case_client import CaseClient

pytestmark = pytest.mark.usefixtures("checks")

REPLACEMENT_ID = 24211
"""Its three bytes are U+FFFD itself."""
STRAY_IDS = [242, 218]
"""Continuation bytes without a lead byte."""


@pytest.mark.parametrize("forced", [{"allowed_token_ids": [REPLACEMENT_ID]}, {"logit_bias": {REPLACEMENT_ID: 100}}])
def test_each_arrives_with_its_own_step(client: CaseClient, forced: dict[str, object]) -> None:
    body = {"prompt": "x", "temperature": 0, "max_tokens": 5} | forced
    _, events, native = client.everywhere("completion", body)
    assert native.text == 5 * "\N{REPLACEMENT CHARACTER}"
    assert native.token_ids == [REPLACEMENT_ID] * 5
    assert native.finish_reason == "length"
    for answer in (events, native):  # pieces may be merged, but never hold text back
        assert [len(piece) for piece in answer.pieces] == answer.sizes


def test_an_invalid_run_is_heard_at_once(client: CaseClient, tokenizer: Tokenizer) -> None:
    body = {"prompt": "x", "temperature": 0, "max_tokens": 4, "allowed_token_ids": STRAY_IDS}
    _, events, native = client.everywhere("completion", body)
    assert native.text == tokenizer.decode(native.token_ids) == 4 * "\N{REPLACEMENT CHARACTER}"
    for answer in (events, native):
        assert [len(piece) for piece in answer.pieces] == answer.sizes


def test_nothing_is_lost_when_other_tokens_follow(client: CaseClient, tokenizer: Tokenizer) -> None:
    """Whole, cut and broken characters in an order that the seed draws."""
    ids = [REPLACEMENT_ID, *STRAY_IDS, 10813, 28, 504]
    body = {"prompt": "x", "seed": 0, "temperature": 100, "max_tokens": 32, "allowed_token_ids": ids}
    answer = client.everywhere("completion", body)[0]
    assert set(answer.token_ids) == set(ids)
    assert answer.text == tokenizer.decode(answer.token_ids)
