"""O04: a stop string that spans tokens is found, named, and not a character of it leaks."""

import pytest

from headrace.model.tokenizer import Tokenizer
from tests.cases.case_client import CaseClient, at_once

pytestmark = pytest.mark.usefixtures("checks")

ALPHABET = {"prompt": "Here is the English alphabet: ABC", "temperature": 0, "max_tokens": 20}
DEF, GH, I, J = 33203, 23960, 57, 58
EMOJI = {"prompt": "😀" * 12, "temperature": 0, "max_tokens": 20}


SPANNING: list[tuple[object, bool, str, list[int], str]] = [
    (["DEFGHIJ"], False, "", [DEF, GH, I, J], "DEFGHIJ"),
    (["DEFGHIJ"], True, "DEFGHIJ", [DEF, GH, I, J], "DEFGHIJ"),
    ("EFG", False, "D", [DEF, GH], "EFG"),
    ("EFG", True, "DEFG", [DEF, GH], "EFG"),
    (["GHIJK", "GHI"], False, "DEF", [DEF, GH, I], "GHI"),
    (["GHI", "GHIJK"], True, "DEFGHI", [DEF, GH, I], "GHI"),
    (["never", "HIJ", "J"], False, "DEFG", [DEF, GH, I, J], "HIJ"),
]
"""stop, include_stop_str_in_output → text, ids, the string that is named."""


def test_over_several_tokens(client: CaseClient) -> None:
    def check(case: tuple[object, bool, str, list[int], str]) -> None:
        stop, include, text, ids, named = case
        for answer in client.everywhere("completion", ALPHABET | {"stop": stop, "include_stop_str_in_output": include}):
            assert (answer.text, answer.token_ids) == (text, ids)
            assert (answer.finish_reason, answer.stop_reason) == ("stop", named)
            assert answer.usage["completion_tokens"] == len(ids)

    at_once(check, SPANNING)


def test_no_beginning_of_it_is_ever_sent(client: CaseClient) -> None:
    """Held back, let go once it can be no stop string, and held back again."""
    body = ALPHABET | {"stop": ["DEFGHIX", "LMNO"], "max_tokens": 10}
    _, events, native = client.everywhere("completion", body)
    assert native.text == "DEFGHIJK"
    for answer in (events, native):
        sent = ""
        for piece in answer.pieces:
            sent += piece
            assert "DEFGHIJK".startswith(sent)


def test_an_emoji_whose_bytes_come_in_three_tokens(client: CaseClient) -> None:
    for include in (False, True):
        for answer in client.everywhere("completion", EMOJI | {"stop": "😀😀", "include_stop_str_in_output": include}):
            assert answer.text == ("😀😀" if include else "")
            assert (answer.finish_reason, answer.stop_reason, len(answer.token_ids)) == ("stop", "😀😀", 6)


def test_in_the_prompt_alone_it_stops_nothing(client: CaseClient, tokenizer: Tokenizer) -> None:
    """Not even where the prompt holds its first half and the output its second."""
    for answer in client.everywhere("completion", ALPHABET | {"stop": ["English", "ABCDEF"], "max_tokens": 6}):
        assert answer.text == tokenizer.decode(answer.token_ids) == "DEFGHIJKLM"
        assert (answer.finish_reason, answer.stop_reason) == ("length", None)
