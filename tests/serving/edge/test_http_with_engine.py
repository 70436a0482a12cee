"""HTTP in front of a real engine process (fake runner): mass disconnects, a killed engine, a drain."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import httpx
import openai
import pytest

from headrace.serving.app.build import FakeOptions
from headrace.serving.edge.engine_client import EngineClient
from headrace.serving.edge.service import Service, ServiceConfig
from tests.serving.edge.engine_streams import WAIT_S, launch, running
from tests.serving.edge.fakes import EOS, VOCAB_SIZE, ByteTokenizer, LineTemplate, RunningServer, open_app
from tests.serving.edge.test_metrics import scrape

CONFIG = ServiceConfig(model_names=("fake",), vocab_size=VOCAB_SIZE, eos_ids=(EOS,))
LONG = {"prompt": "x" * 40, "max_tokens": 1500, "ignore_eos": True, "stream": True}


@dataclass(frozen=True, slots=True)
class Stack:
    client: EngineClient
    service: Service
    http: httpx.AsyncClient
    url: str


@asynccontextmanager
async def stack(step_ms: int = 2) -> AsyncIterator[Stack]:
    client = EngineClient(launch(FakeOptions(step_ms=step_ms, vocab_size=VOCAB_SIZE)))
    service = Service(CONFIG, engine=client, tokenizer=ByteTokenizer(), template=LineTemplate())  # type: ignore[arg-type]
    async with (
        running(client),
        RunningServer(open_app(service)) as server,
        httpx.AsyncClient(base_url=server.url) as http,
    ):
        yield Stack(client, service, http, server.url)
    service.close()


async def stream(http: httpx.AsyncClient, stack_: AsyncExitStack) -> AsyncIterator[str]:
    """An answer whose first token has come."""
    answer = await stack_.enter_async_context(http.stream("POST", "/v1/completions", json=LONG, timeout=WAIT_S))
    assert answer.status_code == 200
    lines = answer.aiter_lines()
    async for line in lines:
        if line.startswith("data: "):
            return lines
    raise AssertionError("the stream ended without a token")


async def until_idle(client: EngineClient) -> None:
    """All ended and all pages back: those that a step in flight names come with a frame after the last end."""
    async with asyncio.timeout(WAIT_S):
        while client.in_flight or client.stats.pages_free + client.stats.pages_cached < client.stats.pages_total:
            await asyncio.sleep(0.005)


async def test_gauges_come_back_after_all_clients_left_at_once() -> None:
    async with stack() as s:
        async with AsyncExitStack() as streams:
            answers = await asyncio.gather(*(stream(s.http, streams) for _ in range(8)))
            assert len(answers) == 8
            busy = scrape(s.service)
            assert busy["vllm:num_requests_running"] + busy["vllm:num_requests_waiting"] == 8
            assert busy["vllm:kv_cache_usage_perc"] > 0
        await until_idle(s.client)
        values = scrape(s.service)
        stats = s.client.stats
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.pages_free + stats.pages_cached == stats.pages_total
        assert values["vllm:num_requests_running"] == values["vllm:num_requests_waiting"] == 0
        assert values["vllm:kv_cache_usage_perc"] == 0
        assert values["vllm:request_success_total|abort"] == values["headrace_requests_accepted_total"] == 8


async def test_a_killed_engine_ends_streams_with_a_typed_error_and_readiness() -> None:
    async with stack() as s, AsyncExitStack() as streams:
        lines = await asyncio.gather(*(stream(s.http, streams) for _ in range(4)))
        assert s.client.pid is not None
        os.kill(s.client.pid, signal.SIGKILL)
        for one in lines:
            rest = [line async for line in one if line]
            assert rest[-1] == "data: [DONE]"
            assert '"code":"engine_lost"' in rest[-2]
        ready = await s.http.get("/readyz")
        assert (ready.status_code, ready.json()["engine"]) == (503, "dead")
        refused = await s.http.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        assert scrape(s.service)["headrace_requests_failed_total|engine_lost"] == 4


async def test_a_drain_lets_streams_end_and_cuts_them_at_its_limit() -> None:
    async with stack(step_ms=20) as s, AsyncExitStack() as streams:
        lines = await stream(s.http, streams)
        s.service.drain()
        refused = await s.http.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert await s.client.drain(0.1) == 1
        rest = [line async for line in lines if line]
        assert '"code":"shutting_down"' in rest[-2]


@pytest.mark.parametrize("seed", [1, 7])
async def test_many_requests_through_the_sdk(seed: int) -> None:
    async with stack() as s, openai.AsyncOpenAI(base_url=f"{s.url}/v1", api_key="none", max_retries=0) as sdk:

        async def ask(number: int) -> str:
            answer = await sdk.completions.create(
                model="fake", prompt="abcdefgh" * (1 + number % 5), max_tokens=12, seed=seed, temperature=0
            )
            assert answer.usage is not None
            assert answer.usage.completion_tokens <= 12
            return answer.choices[0].text

        together = await asyncio.gather(*(ask(number) for number in range(40)))
        assert together[:5] == [await ask(number) for number in range(5)]
        assert together[:5] * 8 == together
        values = scrape(s.service)
        assert values["vllm:num_requests_running"] == 0
        assert values["headrace_compiles_after_ready_total"] == 0
