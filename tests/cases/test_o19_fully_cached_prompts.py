"""O19: a prompt that is all in the prefix cache, of whole pages or not, gives what it gives cold."""

import pytest

from tests.cases import servers
from tests.cases.case_client import Answer, CaseClient
from tests.cases.tiny_model import PAGE, assert_as_oracle, prompt
from tests.live import LiveServer


def ask(client: CaseClient, ids: list[int], num_tokens: int) -> Answer:
    body = {"prompt": ids, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return client.native("completion", body | {"logprobs": 2})


def cached(answer: Answer) -> int:
    num_tokens: int = answer.usage["prompt_tokens_details"]["cached_tokens"]
    return num_tokens


def check(ids: list[int], answer: Answer) -> list[int]:
    assert_as_oracle(ids, answer.token_ids, [entry["logprob"] for entry in answer.logprobs])
    return answer.token_ids


@pytest.mark.parametrize("length", [k * PAGE + d for k in (1, 2, 3, 8) for d in (-1, 0, 1)])
def test_cold_warm_continued_and_cached_by_one_token(tiny_server: LiveServer, length: int) -> None:
    most = (length - 1) // PAGE * PAGE
    ids, by_one, more = prompt(1900 + length, length), prompt(2900 + length, length), 2 * PAGE + 1
    with servers.five_checks(tiny_server), CaseClient(tiny_server.url) as client:
        cold = ask(client, ids, more)
        warm = ask(client, ids, more)
        assert (cached(cold), cached(warm)) == (0, most)
        assert check(ids, cold) == check(ids, warm)
        turn = ids + cold.token_ids
        follow_up = ask(client, turn, more)
        assert cached(follow_up) >= (len(turn) - 1) // PAGE * PAGE - PAGE, "pages of generated tokens are reused"
        check(turn, follow_up)
        assert cached(ask(client, by_one, 1)) == 0
        after_one = ask(client, by_one, more)
        assert cached(after_one) == most
        check(by_one, after_one)
        check(ids + cold.token_ids[:1], ask(client, ids + cold.token_ids[:1], more))


@pytest.mark.parametrize("length", [2 * PAGE, 2 * PAGE + 1])
def test_one_prompt_in_several_requests_of_a_step(tiny_server: LiveServer, length: int) -> None:
    """Four equal prompts in one request, cold and then warm."""
    ids, num_tokens = prompt(3900 + length, length), PAGE + 1
    body = {"prompt": [ids] * 4, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    with servers.five_checks(tiny_server), CaseClient(tiny_server.url) as client:
        for _ in range(2):
            choices = client.post("completion", body | {"return_token_ids": True}).json()["choices"]
            for choice in choices:
                assert_as_oracle(ids, choice["token_ids"], choice["logprobs"]["token_logprobs"])
