"""O02: a token-id prompt that ends inside a character must not come back in the output."""

import pytest

from headrace.model.tokenizer import Tokenizer
from tests.cases.case_client import CaseClient, at_once

pytestmark = pytest.mark.usefixtures("checks")

HELLO_AND_A_CUT_SMILEY = [19556, 905, 10813, 242]


def test_bytes_that_complete_the_prompts_character_stand_alone(client: CaseClient, tokenizer: Tokenizer) -> None:
    body = {"prompt": HELLO_AND_A_CUT_SMILEY, "temperature": 0, "max_tokens": 4}
    for answer in client.everywhere("completion", body):
        assert answer.prompt_ids == HELLO_AND_A_CUT_SMILEY
        # 222 would complete the prompt's character; the rest is a character of its own.
        assert answer.token_ids == [222, 10813, 242, 222]
        assert answer.text == tokenizer.decode(answer.token_ids) == "\N{REPLACEMENT CHARACTER}😄"


def test_a_word_of_the_prompt_never_appears(client: CaseClient, tokenizer: Tokenizer) -> None:
    """Before every kind of cut: each lead byte and continuation byte that ends one of the 313 broken ids."""
    broken = {}
    for token_id, data in enumerate(tokenizer.token_bytes):
        try:
            data.decode()
        except UnicodeDecodeError:
            broken.setdefault((data[-1], len(data)), token_id)
    assert len(broken) > 30
    canary = tokenizer.encode("Zanzibar quokka")

    def ask(token_id: int) -> None:
        body = {"prompt": [*canary, token_id], "temperature": 0, "max_tokens": 2, "return_token_ids": True}
        answer = client.native("completion", body)
        assert answer.text == tokenizer.decode(answer.token_ids)
        assert "quokka" not in answer.text

    at_once(ask, sorted(broken.values())[::8])
