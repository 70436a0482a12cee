"""The OpenAI HTTP API through the current SDK, against a real server on a loopback port."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from headrace.serving.core.request import CancelReason
from headrace.serving.edge.service import Service
from tests.serving.edge.fakes import FakeEngine, RunningServer, make_service, open_app

HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def service(engine: FakeEngine) -> Service:
    return make_service(engine)


@pytest.fixture
async def sdk(service: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        RunningServer(open_app(service)) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def test_chat(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(model="fake", messages=HI)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.content == "Hello, world"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (19, 13, 32)
    assert answer.system_fingerprint is not None
    assert answer._request_id is not None
    assert answer.id == "chatcmpl-" + answer._request_id.removeprefix("req_")


async def test_chat_streamed(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(
        model="fake", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "Hello, world"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content
    assert [c.choices[0].delta.role for c in chunks[1:-1]] == [None] * (len(chunks) - 2)
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 13
    assert len({chunk.id for chunk in chunks}) == 1


async def test_completion_whole_and_streamed(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.completions.create(model="fake", prompt="x", max_tokens=5)
    assert (answer.object, answer.choices[0].text) == ("text_completion", "Hello")
    assert answer.choices[0].finish_reason == "length"
    stream = await sdk.completions.create(model="fake", prompt="x", max_tokens=5, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello"
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_prompt_lists(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.completions.create(model="fake", prompt=["x", "yy"], max_tokens=2)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "He"), (1, "He")]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 4)
    stream = await sdk.completions.create(model="fake", prompt=[[1, 2], [3]], max_tokens=2, stream=True)
    texts = {0: "", 1: ""}
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "He", 1: "He"}


async def test_logprobs(sdk: openai.AsyncOpenAI) -> None:
    chat = await sdk.chat.completions.create(model="fake", messages=HI, logprobs=True, top_logprobs=2, max_tokens=2)
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content or []
    assert [(entry.token, entry.bytes, entry.logprob) for entry in content] == [
        ("H", [72], -1.25), ("e", [101], -1.25)
    ]  # fmt: skip
    assert [top.bytes for top in content[0].top_logprobs] == [[0], [1]]
    text = await sdk.completions.create(model="fake", prompt="x", logprobs=1, max_tokens=2)
    logprobs = text.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["H", "e"]
    assert logprobs.text_offset == [0, 1]
    assert logprobs.top_logprobs == [{"\0": -0.5, "H": -1.25}, {"\0": -0.5, "e": -1.25}]


async def test_errors_are_the_sdks_own_types(sdk: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await sdk.chat.completions.create(model="fake", messages=HI, temperature=-1)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.NotFoundError):
        await sdk.chat.completions.create(model="gpt", messages=HI)
    with pytest.raises(openai.NotFoundError):
        await sdk.models.retrieve("gpt")
    engine.die()
    with pytest.raises(openai.InternalServerError) as lost:
        await sdk.chat.completions.create(model="fake", messages=HI)
    assert lost.value.status_code == 503
    assert int(lost.value.response.headers["retry-after"]) >= 1


async def test_a_full_queue_is_a_rate_limit(sdk: openai.AsyncOpenAI, engine: FakeEngine, service: Service) -> None:
    engine.auto = False
    for _ in range(service.config.max_queued_requests // 128):
        await service.start("completion", {"prompt": ["x"] * 128})
    with pytest.raises(openai.RateLimitError) as full:
        await sdk.completions.create(model="fake", prompt="x")
    assert full.value.code == "queue_full"
    assert int(full.value.response.headers["retry-after-ms"]) >= 100


@pytest.mark.parametrize("stream", [False, True])
async def test_a_lost_engine_ends_running_requests(sdk: openai.AsyncOpenAI, engine: FakeEngine, stream: bool) -> None:
    engine.auto = False

    async def ask() -> str:
        answer: Any = await sdk.chat.completions.create(model="fake", messages=HI, stream=stream)
        return "".join([c.choices[0].delta.content async for c in answer]) if stream else answer

    task = asyncio.create_task(ask())
    await engine.submit_seen.wait()
    engine.step()
    engine.die()
    with pytest.raises(openai.APIError) as lost:
        await task
    assert lost.value.code == "engine_lost"


async def test_models(sdk: openai.AsyncOpenAI) -> None:
    models = (await sdk.models.list()).data
    assert [model.id for model in models] == ["fake", "alias"]
    assert (await sdk.models.retrieve("alias")).id == "alias"


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_cancels_at_once(sdk: openai.AsyncOpenAI, engine: FakeEngine, stream: bool) -> None:
    engine.auto = False
    task = asyncio.create_task(sdk.chat.completions.create(model="fake", messages=HI, stream=stream))
    await engine.submit_seen.wait()
    if stream:
        await (await task).response.aclose()
    else:
        task.cancel()
    await engine.cancel_seen.wait()
    assert [reason for _, reason in engine.cancels] == [CancelReason.DISCONNECT]
