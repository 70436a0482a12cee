"""O28: a drain forwards every token of what runs, refuses what is new, ends in time, and leaves the port free."""

import asyncio
import time
from pathlib import Path

import httpx
import psutil
import pytest
import websockets

from headrace.serving.bench.stream_client import StreamClient
from tests.cases import servers
from tests.live import LiveServer

STEP_MS, NUM_TOKENS = 20, 300
"""Six seconds of running streams, in which everything that is refused must have been tried."""
IDLE_LIMIT_S = 10.0
"""The stated limit is 2 s; a busy machine gets more."""


def body(num_tokens: int, **fields: object) -> dict[str, object]:
    return {"prompt": "x", "max_tokens": num_tokens, "ignore_eos": True, "seed": 0} | fields


async def test_a_drain_with_every_kind_of_client_and_a_restart_on_the_same_port(
    tmp_path: Path, smollm2_path: Path
) -> None:
    log = tmp_path / "log"
    server = servers.start_fake(log, servers.fake_options(smollm2_path, step_ms=STEP_MS, drain_s=60.0))
    children = psutil.Process(server.process.pid).children(recursive=True)
    try:
        await drain_under_load(server)
        assert await asyncio.to_thread(server.process.wait, 60) == 0, log.read_text()
        assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        port = int(server.url.rpartition(":")[2])
        server = servers.start_fake(log, servers.fake_options(smollm2_path, port=port))
        started_s = time.monotonic()
        assert await asyncio.to_thread(server.stop) == 0
        assert time.monotonic() - started_s < IDLE_LIMIT_S
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


async def drain_under_load(server: LiveServer) -> None:
    """SIGTERM under six native streams, two HTTP streams and a client that does not read."""
    async with StreamClient(server.stream_url) as client, httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        histories = [await client.create(f"r{i}", "completion", body(NUM_TOKENS)) for i in range(4)]
        detached = await client.create("detached", "completion", body(NUM_TOKENS), detach=True)
        stuck = await StreamClient(server.stream_url).__aenter__()
        await stuck.create("stuck", "completion", body(NUM_TOKENS))
        stuck.stop_reading()
        answers = [
            asyncio.create_task(http.post("/v1/completions", json=body(NUM_TOKENS, stream=True, prompt=str(i))))
            for i in range(2)
        ]
        while not all(history.of_type("delta") for history in histories):
            await asyncio.sleep(0.005)
        server.process.terminate()
        while not [frame for frame in client.others if frame["type"] == "goaway"]:
            await asyncio.sleep(0.005)
        ready = await http.get("/readyz")
        assert (ready.status_code, ready.json()["reason"]) == (503, "draining")
        assert (await http.get("/livez")).status_code == 200
        refused = await http.post("/v1/completions", json=body(1))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        late = await client.create("late", "completion", body(1))
        await late.ended.wait()
        assert late.terminals[0]["error"]["code"] == "shutting_down"  # type: ignore[index]
        with pytest.raises(websockets.InvalidStatus) as caught:
            await StreamClient(server.stream_url).__aenter__()
        assert caught.value.response.status_code == 503
        await asyncio.gather(*(history.ended.wait() for history in (*histories, detached)))
        for answer in await asyncio.gather(*answers):
            assert answer.text.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in answer.text
        while client.close_code is None:
            await asyncio.sleep(0.01)
    for history in (*histories, detached):
        assert not history.faults()
        assert history.terminals[0]["usage"]["completion_tokens"] == NUM_TOKENS, history.terminals  # type: ignore[index]
    assert client.close_code == 1001
    stuck.abort()


async def test_at_the_limit_http_streams_end_typed_too(tmp_path: Path, smollm2_path: Path) -> None:
    """The native ones: tests/e2e. Lost work shows in the exit code."""
    server = servers.start_fake(tmp_path / "log", servers.fake_options(smollm2_path, step_ms=5, drain_s=0.3))
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            async with http.stream("POST", "/v1/completions", json=body(4000, stream=True)) as answer:
                lines = answer.aiter_lines()
                while "data" not in await anext(lines):
                    pass
                server.process.terminate()
                rest = [line async for line in lines if line]
            assert '"code":"shutting_down"' in rest[-2] and rest[-1] == "data: [DONE]"
        assert await asyncio.to_thread(server.process.wait, 30) == 3
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
