"""O05: min_tokens means new tokens, for every stop id, on every path; what cannot be is refused at once."""

import pytest

from tests.cases.case_client import CaseClient, Json

pytestmark = pytest.mark.usefixtures("checks")

END_IDS = {0, 2}
SAY_OK = {"messages": [{"role": "user", "content": "Say ok."}], "temperature": 0}


LONG_SAY_OK = {"messages": [{"role": "user", "content": "ok " * 400 + "Say ok."}], "temperature": 0}


def test_no_end_id_comes_before_the_minimum(client: CaseClient) -> None:
    """Left alone the answer would be shorter. The tokens of a long prompt do not count."""
    limits: Json = {"min_tokens": 20, "max_tokens": 24, "return_token_ids": True}
    answers = [*client.everywhere("chat", SAY_OK | limits), client.native("chat", LONG_SAY_OK | limits)]
    for answer in answers:
        assert 20 <= len(answer.token_ids) <= 24
        assert not END_IDS & set(answer.token_ids[:20])
    assert client.whole("chat", SAY_OK | {"max_tokens": 24}).usage["completion_tokens"] < 20


def test_every_end_id_is_held_off_even_where_nothing_else_is_likely(client: CaseClient) -> None:
    """Only end ids and one other are allowed: the other fills the minimum, then an end id comes."""
    allowed = {"allowed_token_ids": [0, 2, 28], "logit_bias": {"0": 100, "2": 99}}
    body = {"prompt": "ok", "temperature": 0, "min_tokens": 5, "max_tokens": 9} | allowed
    for answer in client.everywhere("completion", body):
        assert answer.token_ids == [28, 28, 28, 28, 28, 0]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", 0)


def test_a_stop_string_counts_only_from_the_minimum_on(client: CaseClient) -> None:
    """In the field table: stop strings too work only after so many tokens."""
    body = {"prompt": "1\n2\n3\n4\n5\n", "temperature": 0, "max_tokens": 40, "stop": ["\n"]}
    at_once, later = client.everywhere("completion", body), client.everywhere("completion", body | {"min_tokens": 8})
    assert at_once[0].usage["completion_tokens"] < 8
    for answer in later:
        assert answer.usage["completion_tokens"] >= 8
        assert answer.text.startswith(at_once[0].text + "\n")
        assert (answer.finish_reason, answer.stop_reason) == ("stop", "\n")


def test_a_minimum_that_cannot_be_reached_is_refused(client: CaseClient) -> None:
    for fields in (
        {"min_tokens": 50, "max_tokens": 10},
        {"min_tokens": 10**9, "max_tokens": None},
        {"min_tokens": 10**9},
        {"min_tokens": 2**63},
        {"min_tokens": -1},
        {"min_tokens": 1, "allowed_token_ids": [0, 2]},
    ):
        refusal = client.refused_alike("chat", SAY_OK | fields)
        assert (refusal.status, refusal.param) == (400, "min_tokens")


def test_the_last_id_of_the_vocabulary_is_not_banned(client: CaseClient) -> None:
    body = SAY_OK | {"ignore_eos": True, "min_tokens": 3, "max_tokens": 3, "logit_bias": {"49151": 100}}
    for answer in client.everywhere("chat", body):
        assert answer.token_ids == [49151] * 3
