"""O40: host work and memory per token do not grow with the answer: stop strings, cut characters, unread text."""

import asyncio
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

import psutil
import pytest

from headrace.serving.bench.stream_client import History, StreamClient
from headrace.serving.edge.generation import Delta
from tests.cases.five_checks import FiveChecks
from tests.live import LiveServer
from tests.serving.edge.test_generation import Bench

STOPS = ("never-there-1", "never-there-2", "néver")
NUM_TOKENS = 4000
OUTPUTS = {
    "text that begins a stop string again and again": b"never-there-never-" * 250,
    "emoji, three bytes late each": "😀é龘".encode() * 500,
    "bytes that are no character": b"\xff\xf0\x9f" * 1500,
}


def lines_run(work: Callable[[], object]) -> int:
    """Lines of the product's Python code that work runs: the same on every machine and under any load."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if "headrace" not in frame.f_globals.get("__name__", ""):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
def test_the_last_tokens_cost_what_the_first_did(output: bytes, is_read: bool) -> None:
    bench = Bench(*STOPS, keep_token_ids=True)

    def tokens(start: int) -> None:
        for at in range(start, start + 500):
            bench.tokens(output[at : at + 1])
            if is_read:
                bench.generation.take()

    costs = [lines_run(lambda start=start: tokens(start)) for start in range(0, NUM_TOKENS, 500)]  # type: ignore[misc]
    assert costs[0] > 500
    assert costs[-1] <= 1.2 * costs[0], costs


def test_unread_text_takes_few_bytes_a_token() -> None:
    bench = Bench(*STOPS, keep_token_ids=True)
    bench.tokens(b"warm-up ")
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(NUM_TOKENS // 8):
            bench.tokens(b"the race")
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    delta = bench.generation.take()
    assert isinstance(delta, Delta) and delta.num_tokens == NUM_TOKENS + 8
    assert held / NUM_TOKENS < 64


async def test_the_edge_spends_the_same_on_the_first_and_the_last_tokens(
    fake_server: LiveServer, fake_checks: FiveChecks
) -> None:
    """Processor time of three streams of 1,500 tokens with stop strings, one of them of pieces of characters."""
    edge = psutil.Process(fake_server.process.pid)
    body = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stop": list(STOPS), "seed": 0}
    pieces = body | {"allowed_token_ids": [10813, 242, 218]}
    spent = [_cpu_seconds(edge)]
    async with StreamClient(fake_server.stream_url) as client:
        histories = [await client.create(f"r{i}", "completion", body if i else pieces) for i in range(3)]
        for mark in range(500, 1501, 500):
            while min(_num_tokens(history) for history in histories) < mark:
                await asyncio.sleep(0.05)
            spent.append(_cpu_seconds(edge))
        await asyncio.gather(*(history.ended.wait() for history in histories))
    fake_checks.watch(*histories)
    parts = [b - a for a, b in zip(spent, spent[1:], strict=False)]
    assert parts[-1] < 2 * max(parts[0], 0.05), parts


def _num_tokens(history: History) -> int:
    return sum(int(frame.get("n", 0)) for _, frame in history.frames)  # type: ignore[call-overload]


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    spent: float = times.user + times.system
    return spent
