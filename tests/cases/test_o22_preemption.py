"""O22, O23: a pool too small for those who run: preempted requests end as if alone, and what never fits is refused."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from headrace.serving.bench.stream_client import StreamClient
from tests.cases import servers
from tests.cases.five_checks import FiveChecks, scrape
from tests.cases.tiny_model import PAGES, assert_as_oracle, prompt
from tests.cases.tiny_streams import assert_same, body, outcome, run
from tests.live import LiveServer

MAX_PREEMPTIONS = 5


@pytest.fixture(autouse=True)
def checks(tiny_server: LiveServer) -> Iterator[FiveChecks]:
    with servers.five_checks(tiny_server) as checks:
        yield checks


async def test_preempted_requests_end_as_if_alone(tiny_server: LiveServer) -> None:
    """Six of 16 to 18 pages in a pool of 49: with penalties, logprobs, stop ids, a seed and a temperature."""
    bodies = [body(prompt(2200 + i, 50 + 7 * i), 200, presence_penalty=1.0) for i in range(6)]
    bodies[2] |= {"temperature": 0.9, "seed": 7, "presence_penalty": 0.5, "frequency_penalty": 0.5, "top_p": 0.9}
    bodies[3] |= {"repetition_penalty": 1.3, "presence_penalty": 0.0, "logit_bias": {"65": 1.5}}
    bodies[4] |= {"min_tokens": 190, "stop_token_ids": list(range(100, 128))}
    alone = [(await run(tiny_server, [body]))[0] for body in bodies]
    assert not any(one.preemptions for one in alone)
    for i in (0, 1, 5):
        assert_as_oracle(bodies[i]["prompt"], alone[i].ids, alone[i].logprobs, presence_penalty=1.0)
    for _ in range(2):
        together = await run(tiny_server, bodies)
        assert sum(one.preemptions for one in together) > 0
        for found, expected in zip(together, alone, strict=True):
            assert found.preemptions <= MAX_PREEMPTIONS
            assert_same(found, expected)


async def test_what_can_never_fit_is_refused_at_once_and_delays_nobody(tiny_server: LiveServer) -> None:
    """O23 a, b: more pages than there are, with room in the context."""
    assert PAGES * 16 < 1002
    async with StreamClient(tiny_server.stream_url) as client:
        running = await client.create("running", "completion", body(prompt(1, 20), 700))
        await running.started.wait()
        too_long = await client.create("a", "completion", body(prompt(2, 1002), 1))
        too_many = await client.create("b", "completion", body(prompt(3, 400), 600))
        behind = await client.create("behind", "completion", body(prompt(4, 20), 5))
        await asyncio.gather(too_long.ended.wait(), too_many.ended.wait(), behind.ended.wait())
        assert not running.ended.is_set()
        await running.ended.wait()
    for history, field in ((too_long, "prompt"), (too_many, "max_tokens")):
        error: Any = history.terminals[0]["error"]
        assert (error["code"], error["param"]) == ("never_fits", field), error
    assert (outcome(behind).usage, outcome(running).usage) == ((20, 5), (20, 700))
    with httpx.Client(base_url=tiny_server.url) as http:
        answer = http.post("/v1/completions", json=body(prompt(3, 400), 600))
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "never_fits")


@pytest.mark.parametrize(
    ("count", "num_prompt", "num_tokens"), [(6, 300, 150), (2, 400, 80), (4, 16, 300)], ids=["c", "d", "all grow"]
)
async def test_a_crowd_ends_with_bounded_preemption(
    tiny_server: LiveServer, count: int, num_prompt: int, num_tokens: int
) -> None:
    """O23 c, d. Two of 400 + 80 tokens need 60% of the pool each."""
    bodies = [body(prompt(2300 + 10 * count + i, num_prompt), num_tokens) for i in range(count)]
    with httpx.Client(base_url=tiny_server.url) as http:
        before = scrape(http)["num_preemptions_total", ""]
        found = await run(tiny_server, bodies)
        counted = scrape(http)["num_preemptions_total", ""] - before
    assert counted == sum(one.preemptions for one in found)
    for one, request in zip(found, bodies, strict=True):
        assert one.preemptions <= MAX_PREEMPTIONS
        assert_as_oracle(request["prompt"], one.ids, one.logprobs)
