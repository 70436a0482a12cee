"""``headrace bench`` against the real edge with an engine of known answers, by both doors; and against bad servers."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from headrace.serving.bench.closed_loop import Standing, run
from headrace.serving.bench.native_target import NativeTarget
from headrace.serving.bench.openai_target import OpenAITarget
from headrace.serving.bench.targets import BenchError, Server, base_of, contract_of, model_of
from headrace.serving.bench.workload import Workload
from headrace.serving.core.errors import ConfigError
from headrace.serving.engine.messages import Topology
from tests.serving.bench.live import Handler, answers, foreign, invoke, serving
from tests.serving.edge.fakes import FakeEngine, ready

WORK = Workload(streams=3, requests=7, max_tokens=6, prompt_words=5, warmup=1)


def target_of(api: str, server: Server) -> NativeTarget | OpenAITarget:
    return NativeTarget(server, None) if api == "native" else OpenAITarget(server, "fake", WORK.streams)


@pytest.mark.parametrize("api", ["native", "openai"])
async def test_every_request_is_asked_once_and_never_more_than_the_streams_at_a_time(api: str) -> None:
    engine, seen = FakeEngine(auto=False), list[Standing]()
    async with serving(engine) as server, target_of(api, server) as target:
        running = asyncio.create_task(run(WORK, target, seen.append))
        while not running.done():
            ended = len(engine.submitted) - len(engine.live)
            # One warm-up request alone, then all streams, as long as there is something to ask.
            expected = 1 if ended == 0 else min(WORK.streams, 1 + WORK.requests - ended)
            assert len(engine.live) <= expected
            if len(engine.live) == expected:
                engine.step()
            await asyncio.sleep(0.001)
        outcomes = await running
    assert sorted(outcome.index for outcome in outcomes) == list(range(7))
    assert [outcome.error for outcome in outcomes] == [None] * 7
    assert {outcome.output_tokens for outcome in outcomes} == {6}
    prompts = [bytes(request.prompt_ids).decode() for request in engine.submitted]
    assert prompts[0] == WORK.prompt(-1)  # warm-up, which does not count
    assert sorted(prompts[1:]) == sorted(str(WORK.prompt(index)) for index in range(7))
    assert {outcome.prompt_tokens for outcome in outcomes} == {len(prompt) for prompt in prompts[1:]}
    for outcome in outcomes:
        assert outcome.first_s is not None and outcome.sent_s < outcome.first_s <= outcome.ended_s
    if api == "native":
        # The first delta may hold several tokens.
        assert all(0 <= len(outcome.gaps_ms) <= 5 for outcome in outcomes)
    assert seen[0].done == 0 and seen[0].requests == 7


@pytest.mark.parametrize("api", ["native", "openai"])
async def test_refusals_are_counted_by_their_code(api: str) -> None:
    work = Workload(streams=2, requests=3, max_tokens=1, prompt_tokens=4)  # ids that a vocabulary of 260 has not
    async with serving(FakeEngine()) as server, target_of(api, server) as target:
        outcomes = await run(work, target)
    assert [outcome.error for outcome in outcomes] == ["invalid_request"] * 3


@pytest.mark.parametrize("api", ["native", "openai"])
async def test_an_answer_that_does_not_come_is_a_timeout_and_ends_on_the_server(api: str) -> None:
    engine = FakeEngine(auto=False)
    async with serving(engine) as server:
        hasty = Server(base=server.base, limit_s=0.2)
        async with target_of(api, hasty) as target:
            outcomes = await run(Workload(streams=2, requests=2, max_tokens=3, prompt_words=2), target)
        assert [outcome.error for outcome in outcomes] == ["timeout"] * 2
        async with asyncio.timeout(10):
            while engine.live:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("api", ["native", "openai"])
async def test_an_engine_that_dies_shows(api: str) -> None:
    engine = FakeEngine(auto=False)
    async with serving(engine) as server, target_of(api, server) as target:
        running = asyncio.create_task(run(Workload(streams=1, requests=1, max_tokens=3, prompt_words=2), target))
        await engine.submit_seen.wait()
        engine.step()
        engine.die()
        (outcome,) = await running
    assert outcome.error == "engine_lost"


ROLE = 'data: {"choices":[{"index":0,"text":""}]}\n\n'
PIECE = 'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
END = 'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\n'
USAGE = (
    'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":5,'
    '"prompt_tokens_details":{"cached_tokens":3}}}\n\n'
)
DONE = "data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("handler", "error", "tokens"),
    [
        (answers(ROLE + PIECE * 3 + END + USAGE + DONE), None, 5),
        (answers(": note\n\n" + PIECE * 3 + END + DONE), None, 3),
        (answers(PIECE * 2), "no_end", 2),
        (answers(PIECE + 'data: {"error":{"code":"overloaded"}}\n\n'), "overloaded", 1),
        (answers("data: what?\n\n"), "not_openai", 0),
        (answers("data: []\n\n"), "not_openai", 0),
        (answers('{"error":{"code":null,"type":"bad thing"}}', status="400 Bad Request"), "bad_thing", 0),
        (answers("<html>", status="503 Service Unavailable"), "http_503", 0),
        (answers("", status="nonsense"), "connection_lost", 0),
    ],
)
async def test_what_other_servers_answer(handler: Handler, error: str | None, tokens: int) -> None:
    async with foreign(handler) as server, OpenAITarget(server, "m", 1) as target:
        outcome = await target.ask(0, WORK.body(0))
    assert (outcome.error, outcome.output_tokens) == (error, tokens)
    assert (outcome.prompt_tokens, outcome.cached_tokens) == ((9, 3) if tokens == 5 else (0, 0))
    if error is None:
        assert len(outcome.gaps_ms) == 2 and outcome.first_s is not None  # an empty piece is no first token


async def test_a_server_without_a_contract_and_one_that_is_not_there() -> None:
    async with foreign(answers("no", status="404 Not Found", kind="text/plain")) as server:
        assert await contract_of(server) is None
        with pytest.raises(BenchError, match="/v1/models answers 404"):
            await model_of(server)
        with pytest.raises(BenchError, match="takes no stream: .*; see --api"):
            await NativeTarget(server, None).__aenter__()
    async with foreign(answers('{"data":[]}', kind="application/json")) as server:
        assert await contract_of(server) is None
        with pytest.raises(BenchError, match="names no model; give --model"):
            await model_of(server)
    with pytest.raises(BenchError, match="cannot be reached"):
        await contract_of(server)


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h:1", "http://h:1"),
        ("https://h/v1/", "https://h"),
        ("ws://h:8000/v1/stream", "http://h:8000"),
        ("wss://h/x/v1/stream", "https://h/x"),
    ],
)
def test_urls(url: str, base: str) -> None:
    assert base_of(url) == base
    assert Server(base=base).stream_url == base.replace("http", "ws", 1) + "/v1/stream"


@pytest.mark.parametrize("url", ["h:8000", "ftp://h", "http://", "http://user:key@h", "http://h?key=1"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ConfigError, match="is not a server's URL"):
        base_of(url)


async def test_the_command_prints_a_table_and_writes_what_the_figures_belong_to(tmp_path: Path) -> None:
    topology = Topology(platform="tpu", device_kind="TPU v6 lite", num_devices=4, link="ICI")
    engine = FakeEngine(ready_info=ready(mesh="tensor=4", topology=topology))
    file = tmp_path / "bench.json"
    work = ("--streams", "2", "--requests", "4", "--prompt-words", "3", "--max-tokens", "5", "--seed", "9")
    async with serving(engine) as server:
        done = await asyncio.to_thread(invoke, server.base, *work, "--json", str(file), "--slo", "ttft=20s")
        openai = await asyncio.to_thread(invoke, server.base, *work, "--api", "openai")
        failed = await asyncio.to_thread(invoke, server.base, "--requests", "2", "--prompt-tokens", "3")
    assert (done.return_value, openai.return_value, failed.return_value) == (0, 0, 1)
    table = " ".join(done.stdout.split())
    assert "4 requests in 2 streams, prompts of 3 words, 5 new tokens, temperature 0, seed 9; workload" in table
    assert "4 × tpu:TPU v6 lite, mesh tensor=4, link ICI; float32, KV float32, model abababababab" in table
    assert "goodput under ttft ≤ 20000 ms: " in table and "100.0% (51.0% to 100.0%) of 4; missed: nothing" in table
    assert "between tokens" in table and "output tokens/s (20 in" in table
    assert "between pieces of text" in openai.stdout
    assert "2 of 2 failed: 2 invalid_request" in failed.stdout
    found: dict[str, Any] = json.loads(file.read_text())
    assert found["format"] == "headrace-bench/2" and found["loop"] == "closed"
    assert found["server"]["contract"]["topology"]["num_devices"] == 4
    assert found["workload"]["seed"] == 9 and len(found["workload"]["hash"]) == 64
    assert found["figures"]["output_tokens"] == 20 and found["figures"]["failed"] == 0
    assert len(found["requests"]) == 4 and min(one["sent_s"] for one in found["requests"]) == 0
    assert {one["planned_s"] for one in found["requests"]} == {None}


def test_the_command_refuses_before_it_asks(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("\n")
    for arguments, says in (
        (("http://h", "--streams", "0"), "--streams is 0"),
        (("h",), "is not a server's URL"),
        (("http://h", "--json", str(tmp_path / "no" / "file")), "--json .* cannot be written"),
        (("http://h", "--api-key-file", str(key_file)), "its first line is empty"),
    ):
        result = invoke(*arguments)
        with pytest.raises(ConfigError, match=says):
            raise result.exception or AssertionError("not refused")


def test_a_server_that_is_not_there_is_exit_code_1() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    result = invoke(f"http://127.0.0.1:{port}")
    assert result.return_value == 1
    assert "/v1/contract cannot be reached" in result.stderr
