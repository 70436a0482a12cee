"""O27: gauges are right without traffic after mass cancels; counters add up and never go down."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.frames import Frame, Opcode

from headrace.serving.bench.stream_client import History, StreamClient
from tests.cases import servers
from tests.cases.five_checks import ENDINGS, FiveChecks, scrape, settled
from tests.live import LiveServer

RIGHT_WITHIN_S = 5.0
"""The stated limit is 1 s; a busy machine gets more. What it is about stayed wrong until the next step, so for ever."""
FAILING_STEP = 40


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[LiveServer]:
    """Fails one step."""
    log = tmp_path_factory.mktemp("o27") / "log"
    with servers.fake(log, smollm2_path, fault=f"raise:{FAILING_STEP}", engine={"max_queued_requests": 80}) as server:
        yield server


def body(num_tokens: int, **fields: object) -> dict[str, object]:
    return {"prompt": "x", "max_tokens": num_tokens, "ignore_eos": True, "seed": 0, "return_token_ids": True} | fields


async def test_gauges_come_back_alone_when_64_streams_are_dropped_at_once(
    fake_server: LiveServer, fake_checks: FiveChecks
) -> None:
    with httpx.Client(base_url=fake_server.url) as http:
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(StreamClient(fake_server.stream_url)) for _ in range(8)]
            histories = [await c.create(f"r{i}", "completion", body(3000)) for c in clients for i in range(8)]
            await asyncio.gather(*(history.started.wait() for history in histories))
            while not any(history.of_type("delta") for history in histories):
                await asyncio.sleep(0.01)
            busy = scrape(http)
            assert busy["num_requests_running", ""] + busy["num_requests_waiting", ""] == 64
            assert busy["kv_cache_usage_perc", ""] > 0
            assert busy["ws_streams_active", ""] == 64
            for client in clients:
                client.abort()
        gauges = settled(http, within_s=RIGHT_WITHIN_S)
        assert gauges.is_idle, gauges
        quiet = scrape(http)
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "ws_streams_active"):
            assert quiet[name, ""] == 0, name


async def test_every_accepted_request_ends_in_one_counter_and_tokens_are_the_sum_of_usage(server: LiveServer) -> None:
    """Stop ids, stop strings, length, cancels, a failed step, refusals by value and by a full queue."""
    with httpx.Client(base_url=server.url) as http:
        readings = [scrape(http)]
        stop = asyncio.Event()
        watcher = asyncio.create_task(_watch(http, readings, stop))
        async with StreamClient(server.stream_url) as first, StreamClient(server.stream_url) as second:
            histories = [await first.create(f"r{i}", "completion", _mixed(i)) for i in range(64)]
            for history in histories[3::8]:
                await first.cancel(history.id)
            await asyncio.gather(*(history.ended.wait() for history in histories))
            crowd = [await c.create(f"c{i}", "completion", body(100)) for c in (first, second) for i in range(60)]
            await asyncio.gather(*(history.ended.wait() for history in crowd))
        stop.set()
        await watcher
        assert settled(http).is_idle
        readings.append(scrape(http))
    ends = [_account(history) for history in histories + crowd]
    ended = Counter(end for end, _, _ in ends)
    grown = {key: value - readings[0].get(key, 0.0) for key, value in readings[-1].items()}
    assert min(ended[end] for end in (*ENDINGS, "refused queue_full", "refused invalid_value")) > 0, ended
    for ending in ENDINGS:
        assert grown["request_success_total", ending] == ended[ending], ending
    for code in ("queue_full", "invalid_value"):
        assert grown["requests_refused_total", code] == ended[f"refused {code}"], code
    assert grown["requests_accepted_total", ""] == sum(ended[ending] for ending in ENDINGS)
    assert grown["prompt_tokens_total", ""] == sum(prompt for _, prompt, _ in ends)
    assert grown["generation_tokens_total", ""] == sum(output for _, _, output in ends)
    _assert_counters_only_grow(readings)


def _mixed(i: int) -> dict[str, object]:
    """The third of each eight is cancelled."""
    kinds: tuple[dict[str, object], ...] = (
        body(10),
        body(50, allowed_token_ids=[70], stop_token_ids=[70], min_tokens=3),
        body(50, allowed_token_ids=[504], stop=["TheThe"]),
        body(3000),
        body(0),
        body(30, logprobs=2),
        body(12, prompt=list(range(100, 500))),
        body(300),
    )
    return kinds[i % 8]


def _account(history: History) -> tuple[str, int, int]:
    """(how it ended, prompt tokens, output tokens), as the client saw it."""
    assert not history.faults()
    (terminal,) = history.terminals
    created = history.of_type("created")
    error: Any = terminal.get("error")
    if not created:
        return f"refused {error['code']}", 0, 0
    prompt = len(created[0][1]["prompt_token_ids"][0])  # type: ignore[index]
    output = sum(int(frame["n"]) for _, frame in history.of_type("delta"))  # type: ignore[call-overload]
    if error is not None:
        return "error", prompt, output
    usage: Any = terminal["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, output)
    reason = terminal["choices"][0]["finish_reason"]  # type: ignore[index]
    return "abort" if reason == "cancelled" else str(reason), prompt, output


async def _watch(http: httpx.Client, into: list[dict[tuple[str, str], float]], stop: asyncio.Event) -> None:
    while not stop.is_set():
        into.append(await asyncio.to_thread(scrape, http))


def _assert_counters_only_grow(readings: list[dict[tuple[str, str], float]]) -> None:
    assert len(readings) > 5
    for earlier, later in zip(readings, readings[1:], strict=False):
        for key, value in earlier.items():
            if key[0].endswith("_total"):
                assert 0 <= value <= later[key], key


async def test_nothing_that_a_client_sent_becomes_a_label(fake_server: LiveServer, fake_checks: FiveChecks) -> None:
    canary = "zebra" * 200
    async with StreamClient(fake_server.stream_url) as client:
        for stream_id in ("zebra" * 12, canary):
            create = {"type": "create", "id": stream_id, "endpoint": "completion", "body": body(2, user=canary)}
            client.write(Frame(Opcode.TEXT, json.dumps(create).encode()).serialize(mask=True))
        while len(client.others) < 4:
            await asyncio.sleep(0.005)
    with httpx.Client(base_url=fake_server.url) as http:
        for wrong in (body(2, model=canary), body(2, zebra=1), body(2, stop=[canary]), body(2, priority=canary)):
            assert http.post("/v1/completions", json=wrong).status_code in (400, 404)
        assert http.get(f"/{canary}").status_code == 404
        assert "zebra" not in http.get("/metrics").text
