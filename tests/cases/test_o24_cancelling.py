"""O24: cancelling queued, finishing or foreign requests touches nothing else and ends each request once."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack

import httpx
import pytest
from websockets.frames import Frame, Opcode

from headrace.serving.bench.stream_client import History, StreamClient
from tests.cases.five_checks import FiveChecks, scrape
from tests.live import LiveServer

NUM_SLOTS = 8
"""Of the fake server."""


@pytest.fixture
def checks(fake_checks: FiveChecks) -> Iterator[FiveChecks]:
    yield fake_checks


def body(num_tokens: int, *, prompt: object = "A", **fields: object) -> dict[str, object]:
    fixed = {"temperature": 0, "seed": 0, "ignore_eos": True, "return_token_ids": True}
    return fixed | {"prompt": prompt, "max_tokens": num_tokens} | fields


def ids_of(history: History) -> list[int]:
    return [i for _, frame in history.of_type("delta") for i in frame["token_ids"]]  # type: ignore[attr-defined]


def end_of(history: History) -> tuple[str, int]:
    """(finish reason, completion tokens) of a stream that ended well."""
    (done,) = history.terminals
    assert done["type"] == "done", done
    return done["choices"][0]["finish_reason"], done["usage"]["completion_tokens"]  # type: ignore[index]


async def test_a_queued_request_that_is_cancelled_or_left_never_runs(
    fake_server: LiveServer, checks: FiveChecks
) -> None:
    with httpx.Client(base_url=fake_server.url) as http:
        before = scrape(http)["engine_generated_tokens_total", ""]
        async with AsyncExitStack() as stack:
            first = await stack.enter_async_context(StreamClient(fake_server.stream_url))
            running = [await first.create(f"a{i}", "completion", body(600)) for i in range(NUM_SLOTS)]
            await asyncio.gather(*(history.started.wait() for history in running))
            second = await stack.enter_async_context(StreamClient(fake_server.stream_url))
            third = await stack.enter_async_context(StreamClient(fake_server.stream_url))
            cancelled = await second.create("b", "completion", body(600))
            left = await third.create("b", "completion", body(600))
            await asyncio.gather(cancelled.started.wait(), left.started.wait())
            await second.cancel("b")
            third.abort()
            await cancelled.ended.wait()
            assert not any(history.ended.is_set() for history in running)
            await asyncio.gather(*(history.ended.wait() for history in running))
        checks.watch(cancelled, *running)
        assert end_of(cancelled) == ("cancelled", 0)
        assert {end_of(history) for history in running} == {("length", 600)}
        assert len({tuple(ids_of(history)) for history in running}) == 1
        assert scrape(http)["engine_generated_tokens_total", ""] - before == NUM_SLOTS * 600


async def test_a_cancel_after_any_number_of_tokens_ends_once_with_true_usage(
    fake_server: LiveServer, checks: FiveChecks
) -> None:
    async with StreamClient(fake_server.stream_url) as client:
        whole = await client.create("whole", "completion", body(20))
        await whole.ended.wait()
        histories = [await cancel_after(client, count) for count in range(23)]
    checks.watch(whole, *histories)
    for history in histories:
        reason, num_tokens = end_of(history)
        assert reason == ("cancelled" if num_tokens < 20 else reason)
        assert len(ids_of(history)) == num_tokens
        assert ids_of(history) == ids_of(whole)[:num_tokens]
    assert end_of(histories[-1]) == ("length", 20), "a cancel after the end changes nothing"
    assert end_of(histories[0])[1] < 20, "a cancel before the first token comes in time"
    assert not client.others, "cancelling twice, or just after the end, is no error"


async def cancel_after(client: StreamClient, num_tokens: int) -> History:
    """Cancel twice once so many tokens (at most all 20) have come."""
    history = await client.create(f"after{num_tokens}", "completion", body(20))
    while len(ids_of(history)) < num_tokens and not history.ended.is_set():
        await asyncio.sleep(0)
    await client.cancel(history.id)
    await client.cancel(history.id)
    await history.ended.wait()
    return history


async def test_a_cancel_during_prefill_frees_everything(fake_server: LiveServer, checks: FiveChecks) -> None:
    """Prompts of up to 15 chunks of 256 tokens, cancelled when they are accepted."""
    async with StreamClient(fake_server.stream_url) as client:
        histories = []
        for number in range(15):
            prompt = [(number * 31 + i) % 1000 + 100 for i in range(256 * (number + 1) - 3)]
            history = await client.create(f"p{number}", "completion", body(50, prompt=prompt))
            await history.started.wait()
            await client.cancel(history.id)
            await history.ended.wait()
            histories.append(history)
    checks.watch(*histories)
    assert all(len(ids_of(history)) == end_of(history)[1] < 50 for history in histories)
    assert end_of(histories[-1])[1] == 0, "15 steps of prefill are longer than the way of a cancel"


async def test_ids_that_are_unknown_or_of_another_connection(fake_server: LiveServer, checks: FiveChecks) -> None:
    async with StreamClient(fake_server.stream_url) as mine, StreamClient(fake_server.stream_url) as other:
        history = await mine.create("r", "completion", body(100))
        await history.started.wait()
        await other.cancel("r")
        await other.cancel("never-seen")
        while len(other.others) < 2:
            await asyncio.sleep(0.005)
        await history.ended.wait()
    checks.watch(history)
    assert end_of(history) == ("length", 100)
    assert [(frame["id"], frame["id_rejected"], frame["error"]["code"]) for frame in other.others] == [  # type: ignore[index]
        (None, "r", "unknown_id"),
        (None, "never-seen", "unknown_id"),
    ]


@pytest.mark.parametrize("with_creates", [False, True])
async def test_all_64_cancelled_in_one_write(fake_server: LiveServer, checks: FiveChecks, with_creates: bool) -> None:
    """with_creates: the same write holds the creates, so that every cancel finds a request in preparation."""
    async with StreamClient(fake_server.stream_url) as client:
        histories = [client.expect(f"r{i}") for i in range(64)]
        creates = [
            {"type": "create", "id": h.id, "endpoint": "completion", "body": body(200, prompt=h.id)} for h in histories
        ]
        cancels = [{"type": "cancel", "id": history.id} for history in histories]
        if with_creates:
            client.write(frames(*creates, *cancels))
        else:
            client.write(frames(*creates))
            await asyncio.gather(*(history.started.wait() for history in histories))
            client.write(frames(*cancels))
        await asyncio.gather(*(history.ended.wait() for history in histories))
    checks.watch(*histories)
    assert {end_of(history)[0] for history in histories} == {"cancelled"}
    assert all(end_of(history)[1] == len(ids_of(history)) for history in histories)
    assert not client.others


def frames(*messages: dict[str, object]) -> bytes:
    return b"".join(Frame(Opcode.TEXT, json.dumps(message).encode()).serialize(mask=True) for message in messages)


@pytest.mark.parametrize("stream", [False, True])
async def test_http_clients_that_leave_cancel_only_their_own(
    fake_server: LiveServer, checks: FiveChecks, stream: bool
) -> None:
    """Some leave while they run, the rest while they wait."""
    async with StreamClient(fake_server.stream_url) as client:
        kept = await client.create("kept", "completion", body(400))
        async with httpx.AsyncClient(base_url=fake_server.url, timeout=60) as http:
            tasks = [
                asyncio.create_task(http.post("/v1/completions", json=body(3000, stream=stream, prompt=str(i))))
                for i in range(2 * NUM_SLOTS)
            ]
            await kept.started.wait()
            while len(ids_of(kept)) < 50:
                await asyncio.sleep(0.005)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await kept.ended.wait()
    checks.watch(kept)
    assert end_of(kept) == ("length", 400)
