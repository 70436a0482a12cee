"""O26: a prompt in chunks gives the logits of the whole prompt, whatever the borders fall on."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.serving.bench.stream_client import StreamClient
from tests.cases import servers
from tests.cases.case_client import Answer, CaseClient
from tests.cases.five_checks import FiveChecks
from tests.cases.tiny_model import CHUNK, PAGE, assert_as_oracle, prompt
from tests.cases.tiny_streams import body, outcome, run
from tests.live import LiveServer


@pytest.fixture(autouse=True, scope="module")
def checks(tiny_server: LiveServer) -> Iterator[FiveChecks]:
    with servers.five_checks(tiny_server) as checks:
        yield checks


LENGTHS = sorted(
    {n * CHUNK + d for n in (1, 2, 3) for d in (-1, 0, 1)}
    | {n * PAGE + d for n in (1, 3, 5) for d in (-1, 0, 1)}
    | {10 * CHUNK, 700}
)


@pytest.mark.parametrize("length", LENGTHS)
async def test_lengths_around_chunks_and_pages(tiny_server: LiveServer, length: int) -> None:
    """Alone, and together with a prompt that shares its steps: 32 greedy tokens and their logprobs."""
    alone, other = body(prompt(2600 + length, length), 32), body(prompt(3600 + length, CHUNK + 5), 32)
    found = await run(tiny_server, [alone])
    found += await run(tiny_server, [alone | {"prompt": prompt(4600 + length, length)}, other])
    prompts = [alone["prompt"], prompt(4600 + length, length), other["prompt"]]
    for ids, one in zip(prompts, found, strict=True):
        assert one.usage == (len(ids), 32)
        assert_as_oracle(ids, one.ids, one.logprobs)


@pytest.mark.parametrize("before", range(CHUNK - 4, CHUNK + 1))
def test_a_border_inside_a_character(tiny_server: LiveServer, before: int) -> None:
    """One token per byte: the four of the emoji lie on both sides of the border."""
    text = "x" * before + "😀 and so on"
    with CaseClient(tiny_server.url) as client:
        answer: Answer = client.native("completion", body([], 16) | {"prompt": text})
    assert bytes(answer.prompt_ids) != b"" and len(answer.prompt_ids) == len(text.encode())
    assert_as_oracle(answer.prompt_ids, answer.token_ids, [entry["logprob"] for entry in answer.logprobs])


@pytest.mark.parametrize("warm", [PAGE, 3 * PAGE, 5 * PAGE])
async def test_a_warm_prefix_that_ends_inside_a_chunk(tiny_server: LiveServer, warm: int) -> None:
    ids = prompt(5600 + warm, 150)
    await run(tiny_server, [body(ids[: warm + 1], 1)])
    async with StreamClient(tiny_server.stream_url) as client:
        history = await client.create("r", "completion", body(ids, 32))
        await history.ended.wait()
    usage: Any = history.terminals[0]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == warm
    found = outcome(history)
    assert_as_oracle(ids, found.ids, found.logprobs)


async def test_cancels_between_chunks(tiny_server: LiveServer, checks: FiveChecks) -> None:
    """No token comes before the last chunk; what was computed may be reused and is right."""
    ids = prompt(6600, 750)
    async with StreamClient(tiny_server.stream_url) as client:
        for number in range(6):
            history = await client.create(f"r{number}", "completion", body(ids, 8))
            await history.started.wait()
            await asyncio.sleep(0.003 * number)
            await client.cancel(history.id)
            await history.ended.wait()
            checks.watch(history)
        whole = await client.create("whole", "completion", body(ids, 16))
        await whole.ended.wait()
    found = outcome(whole)
    assert_as_oracle(ids, found.ids, found.logprobs)
