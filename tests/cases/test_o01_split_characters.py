"""O01: a character whose bytes come in several tokens reaches the client whole, in every mode."""

import pytest

from headrace.model.tokenizer import Tokenizer
from tests.cases.case_client import CaseClient, at_once

pytestmark = pytest.mark.usefixtures("checks")

SMILEY = [10813, 242, 218]
THAI = "สวัสดี = สวัสดี\nสวัสดี = สวัสดี\nสวัสดี ="


PROMPTS = {
    "😀 😀 😀 😀 😀 😀": "\n\n#11\n#12",  # digits and marks only
    THAI: " สวัสดี",  # two ids per character
    "1, 1, 2, 3, 5, 8, 13, 21,": " 28, 45, 63,",  # spaces are ids of their own
}
"""Prompt → how the output begins."""


def test_streamed_text_is_one_decode_of_all_ids(client: CaseClient, tokenizer: Tokenizer) -> None:
    def check(prompt: str) -> None:
        answers = client.everywhere("completion", {"prompt": prompt, "temperature": 0, "max_tokens": 24})
        text = answers[0].text
        assert text == tokenizer.decode(answers[0].token_ids)
        assert text.startswith(PROMPTS[prompt])
        assert not [piece for answer in answers for piece in answer.pieces if "\N{REPLACEMENT CHARACTER}" in piece]

    at_once(check, PROMPTS)


def test_a_limit_inside_a_character_cuts_it_alike_everywhere(client: CaseClient, tokenizer: Tokenizer) -> None:
    """Three ids a character: what is left of one is a single U+FFFD, in the last piece."""
    prompt = "😀" * 12

    def cut(max_tokens: int) -> None:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": max_tokens, "return_token_ids": True}
        for answer in (client.whole("completion", body), client.native("completion", body)):
            assert answer.token_ids == (SMILEY * 4)[:max_tokens]
            assert answer.text == tokenizer.decode(answer.token_ids)
            assert answer.text == "😀" * (max_tokens // 3) + "\N{REPLACEMENT CHARACTER}" * (max_tokens % 3 > 0)
            assert "\N{REPLACEMENT CHARACTER}" not in "".join(answer.pieces[:-1])
            assert answer.finish_reason == "length"

    at_once(cut, range(1, 13))
