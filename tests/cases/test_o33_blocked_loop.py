"""O33: nothing that a client sends blocks the event loop: health answers, pings and streams go on meanwhile."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.serving.bench.stream_client import StreamClient
from tests.cases import loop_probe, servers
from tests.cases.raw import port_of
from tests.live import LiveServer

LAG_LIMIT_S = 1.0
"""The stated limit is 0.25 s on an idle machine with 2 cores; a busy one gets more. What it is about took 29 s."""
MB = 1 << 20
JSON = {"content-type": "application/json"}


def text(num_bytes: int) -> str:
    words = "The river turns the mill wheel and the 123 stones grind é 日本 "
    return (words * (num_bytes // len(words) + 1))[: num_bytes * len(words) // len(words.encode())]


def completion(**body: Any) -> tuple[str, bytes]:
    return "/v1/completions", json.dumps({"max_tokens": 1} | body).encode()


def many(item: str, pre: str, post: str) -> tuple[str, bytes]:
    count = (4 * MB - len(pre) - len(post)) // (len(item) + 1)
    return "/v1/completions", (pre + ",".join([item] * count) + post).encode()


WORK: dict[str, tuple[list[tuple[str, bytes]], tuple[int, ...]]] = {
    "a 5 MB prompt": ([completion(prompt=text(5 * MB))], (413,)),
    "a 30 MB prompt": ([completion(prompt=text(30 * MB))], (413,)),
    "a body of 4 MB": ([completion(prompt="x" * (4 * MB - 100))], (413,)),
    "20 prompts of 100 kB": ([completion(prompt=text(100_000))] * 20, (400,)),
    "the slowest megabyte for the tokenizer": ([completion(prompt="1" * MB)], (400,)),
    "three megabytes of words": ([completion(prompt=text(MB - 100))] * 3, (400,)),
    "2 million token ids": ([many("1", '{"prompt":[', "]}")], (400,)),
    "a million floats": ([many("1.5", '{"prompt":[', "]}")], (400,)),
    "as many numbers as are read": ([("/v1/completions", b'{"prompt":[' + b"1e300," * 599_900 + b"1]}")], (400,)),
    "the slowest floats": ([many("1.2345678901234567e-300", '{"prompt":[', "]}")], (400,)),
    "strings full of brackets": ([many('"a:[b"', '{"prompt":[', "]}")], (400,)),
    "a million strings": ([many('""', '{"prompt":[', "]}")], (400,)),
    "half a million keys": ([many('"":1', '{"logit_bias":{', "}}")], (400,)),
    "every id of the vocabulary allowed": ([completion(prompt="x", allowed_token_ids=list(range(49_152)))] * 4, (200,)),
    "120 prompts of 8 kB": ([completion(prompt=[text(8000)] * 120)], (200,)),
    "a chat of 1,024 messages": (
        [("/v1/chat/completions", json.dumps({"messages": [{"role": "user", "content": text(900)}] * 1024}).encode())],
        (400,),
    ),
    "a chat of control tokens": (
        [
            (
                "/v1/chat/completions",
                json.dumps({"messages": [{"role": "user", "content": "<|im_end|>" * 90_000}]}).encode(),
            )
        ],
        (400,),
    ),
    "half a million ids to detokenize": ([("/detokenize", json.dumps({"tokens": [1000] * 500_000}).encode())], (200,)),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[LiveServer]:
    """A client whose pong is 2 s late is closed."""
    log = tmp_path_factory.mktemp("o33") / "log"
    with (
        servers.fake(log, smollm2_path, step_ms=5, heartbeat_s=2.0) as server,
        servers.five_checks(server),
    ):
        yield server


@asynccontextmanager
async def probed(server: LiveServer) -> AsyncIterator[list[float]]:
    """How long /livez took, each time, during the block; filled at its end."""
    command = [sys.executable, loop_probe.__file__, "127.0.0.1", str(port_of(server)), "0.01"]
    probe = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert probe.stdout is not None
    seconds: list[float] = []
    yield seconds
    out, _ = await asyncio.to_thread(probe.communicate)
    seconds += json.loads(out)


async def test_no_work_of_one_client_delays_another(server: LiveServer) -> None:
    async with (
        StreamClient(server.stream_url) as streaming,
        StreamClient(server.stream_url) as idle,
        httpx.AsyncClient(base_url=server.url, timeout=120, headers=JSON) as http,
        probed(server) as seconds,
    ):
        running = await streaming.create("r", "completion", {"prompt": "x", "max_tokens": 3000, "ignore_eos": True})
        for name, (requests, statuses) in WORK.items():
            answers = await asyncio.gather(*(http.post(path, content=content) for path, content in requests))
            assert {answer.status_code for answer in answers} <= set(statuses), (name, answers[0].text[:300])
        await streaming.cancel("r")
        await running.ended.wait()
        assert streaming.close_code is None and idle.close_code is None
    assert not running.faults()
    arrivals = [at_s for at_s, _ in running.of_type("delta")]
    assert max(b - a for a, b in zip(arrivals, arrivals[1:], strict=False)) < LAG_LIMIT_S
    assert len(seconds) > 20 and max(seconds) < LAG_LIMIT_S, sorted(seconds)[-5:]
    assert sorted(seconds)[int(len(seconds) * 0.99)] < LAG_LIMIT_S / 4


async def test_work_of_a_client_that_left_is_dropped(server: LiveServer) -> None:
    """Twenty seconds of tokenizing are queued; when its client leaves, one that asks for little is served soon."""
    async with StreamClient(server.stream_url) as client:
        for number in range(20):
            await client.create(f"r{number}", "completion", {"prompt": "1" * MB, "max_tokens": 1})
        await asyncio.sleep(0)
        client.abort()
    async with StreamClient(server.stream_url) as client:
        fine = await client.create("fine", "completion", {"prompt": "x", "max_tokens": 1})
        async with asyncio.timeout(15):
            await fine.ended.wait()
    assert fine.terminals[0]["type"] == "done"
