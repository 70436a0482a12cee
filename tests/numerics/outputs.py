"""One shape for what comes out of every door: the Python API, HTTP whole and streamed, the native WebSocket."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from headrace.serving.app.offline import Completion
from headrace.serving.bench.stream_client import History, StreamClient
from tests.cases.case_client import Answer, CaseClient
from tests.numerics.golden import Reference

Endpoint = Literal["chat", "completion"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A greedy continuation. logprobs: of the chosen tokens, as float32 values."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str


def of_completion(completion: Completion) -> Output:
    assert completion.logprobs is not None
    return Output(
        prompt_ids=completion.prompt_token_ids,
        ids=completion.token_ids,
        logprobs=tuple(entry.chosen for entry in completion.logprobs),
        text=completion.text,
    )


def http_whole(url: str, prompts: Sequence[Reference], num_tokens: int) -> list[Output]:
    """All at once, each on a connection of its own."""
    return _over_http(lambda client, *request: client.whole(*request), url, prompts, num_tokens)


def http_streamed(url: str, prompts: Sequence[Reference], num_tokens: int) -> list[Output]:
    """Server-sent events, all at once."""
    return _over_http(lambda client, *request: client.events(*request), url, prompts, num_tokens)


async def websocket(stream_url: str, prompts: Sequence[Reference], num_tokens: int) -> list[Output]:
    """All streams at once on one socket."""
    async with StreamClient(stream_url) as client:
        histories = [
            await client.create(f"p{index}", *_request(prompt, num_tokens)) for index, prompt in enumerate(prompts)
        ]
        for history in histories:
            await history.ended.wait()
    return [_of_history(history) for history in histories]


def _request(prompt: Reference, num_tokens: int) -> tuple[Endpoint, dict[str, Any]]:
    """A chat goes through the template of the server; every other prompt is token ids."""
    body: dict[str, Any] = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    if prompt.messages is not None:
        return "chat", body | {"messages": prompt.messages, "logprobs": True}
    return "completion", body | {"prompt": prompt.prompt_ids, "logprobs": 0}


def _over_http(
    door: Callable[[CaseClient, Endpoint, dict[str, Any]], Answer],
    url: str,
    prompts: Sequence[Reference],
    num_tokens: int,
) -> list[Output]:
    with CaseClient(url) as client, ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: door(client, *_request(prompt, num_tokens)), prompts))
    return [
        Output(
            prompt_ids=tuple(answer.prompt_ids),
            ids=tuple(answer.token_ids),
            logprobs=tuple(value for entry in answer.logprobs for value in _chosen(entry)),
            text=answer.text,
        )
        for answer in answers
    ]


def _chosen(entry: dict[str, Any]) -> list[float]:
    """Of a chat's entry, which is one token, or of a completion's chunk of tokens."""
    return [entry["logprob"]] if "logprob" in entry else entry["token_logprobs"]


def _of_history(history: History) -> Output:
    assert not history.faults()
    [end] = history.terminals
    assert end["type"] == "done", end
    deltas: list[dict[str, Any]] = [frame for _, frame in history.of_type("delta")]
    created: list[dict[str, Any]] = [frame for _, frame in history.of_type("created")]
    [prompt_ids] = created[0]["prompt_token_ids"]
    return Output(
        prompt_ids=tuple(prompt_ids),
        ids=tuple(token for delta in deltas for token in delta["token_ids"]),
        logprobs=tuple(entry["logprob"] for delta in deltas for entry in delta["logprobs"]),
        text=history.text,
    )
