"""O11: scores of prompt tokens do not exist here, so whatever asks for them is refused by name, cold or warm."""

import pytest

from tests.cases.case_client import CaseClient, Json

pytestmark = pytest.mark.usefixtures("checks")

LONG = {"prompt": "one two three four five six seven eight nine ten " * 5, "max_tokens": 1, "temperature": 0}
"""More than three pages of 16 ids."""


def test_they_are_refused_by_name(client: CaseClient) -> None:
    asked: list[tuple[Json, str]] = [
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"echo": True}, "echo"),
        ({"echo": True, "max_tokens": 0}, "echo"),
        ({"echo": True, "logprobs": 1, "top_k": 1}, "echo"),
    ]
    for _ in ("cold", "warm"):
        for fields, param in asked:
            refusal = client.refused_alike("completion", fields | LONG | fields)
            assert (refusal.status, refusal.code, refusal.param) == (400, "unsupported_field", param)
        client.whole("completion", LONG)


def test_no_output_at_all_is_refused_with_the_limit(client: CaseClient) -> None:
    refusal = client.refused_alike("completion", LONG | {"max_tokens": 0})
    assert (refusal.code, refusal.param) == ("invalid_value", "max_tokens")
    assert "at least 1" in refusal.message


def test_logprobs_of_the_output_do_not_depend_on_the_cache_or_the_order(client: CaseClient) -> None:
    """Two prompts with a common prefix, in both orders: each is once cold or half warm and once warm."""
    prefix = "Paris, Oslo, Rome, Bern, Prague, Vienna, Madrid, Lisbon, Dublin, Warsaw, Athens, Sofia, Riga, "
    bodies = [
        {"prompt": prefix + tail, "max_tokens": 3, "temperature": 0, "logprobs": 5} for tail in ("Berlin,", "London,")
    ]
    first, second = [client.native("completion", body) for body in bodies]
    again_second, again_first = [client.native("completion", body) for body in reversed(bodies)]
    for cold, warm in ((first, again_first), (second, again_second)):
        assert warm.usage["prompt_tokens_details"]["cached_tokens"] >= 16
        for one, other in zip(cold.logprobs, warm.logprobs, strict=True):
            assert one["token_id"] == other["token_id"]
            assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
            assert [top["logprob"] for top in one["top_logprobs"]] == pytest.approx(
                [top["logprob"] for top in other["top_logprobs"]], abs=1e-4
            )
