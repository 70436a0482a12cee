"""O39: greedy answers under load: the tokens of a quiet server, unless the two best were closer than the stated gap."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.serving.bench.stream_client import StreamClient
from tests.cases import servers
from tests.cases.five_checks import FiveChecks
from tests.cases.tiny_model import TIGHT, prompt, write_tiny
from tests.cases.tiny_streams import Outcome, assert_same, body, outcome, run
from tests.live import LiveServer

NUM_TOKENS = 64
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 40, 64, 90, 100, 130)


@pytest.fixture(autouse=True, scope="module")
def checks(tiny_server: LiveServer) -> Iterator[FiveChecks]:
    with servers.five_checks(tiny_server) as checks:
        yield checks


def bodies() -> list[dict[str, object]]:
    return [body(prompt(3900 + i, length), NUM_TOKENS) for i, length in enumerate(LENGTHS)]


async def quiet(server: LiveServer) -> list[Outcome]:
    return [(await run(server, [one]))[0] for one in bodies()]


async def test_batches_neighbours_cache_and_preemption_do_not_show(tiny_server: LiveServer) -> None:
    alone = await quiet(tiny_server)
    rng = random.Random(39)
    crowd = [body(prompt(4900 + i, rng.randint(1, 300)), rng.randint(1, 200), temperature=1.0) for i in range(24)]
    for batch in (2, 3, 4, len(LENGTHS)):  # warm from the first time on
        for start in range(0, len(LENGTHS), batch):
            found = await run(tiny_server, bodies()[start : start + batch])
            for one, expected in zip(found, alone[start:], strict=False):
                assert_same(one, expected)
    async with StreamClient(tiny_server.stream_url) as client:
        others = [await client.create(f"c{i}", "completion", other) for i, other in enumerate(crowd[:12])]
        mine = [await client.create(f"m{i}", "completion", one) for i, one in enumerate(bodies())]
        others += [await client.create(f"d{i}", "completion", other) for i, other in enumerate(crowd[12:])]
        await asyncio.gather(*(history.ended.wait() for history in mine + others))
    assert sum(outcome(history).preemptions for history in mine + others) > 0
    for history, expected in zip(mine, alone, strict=True):
        assert_same(outcome(history), expected)


async def test_a_restart_and_repeats_do_not_show(tiny_server: LiveServer, tmp_path: Path) -> None:
    alone = await quiet(tiny_server)
    for _ in range(10):
        (again,) = await run(tiny_server, bodies()[-1:])
        assert_same(again, alone[-1])
    with servers.tiny(tmp_path / "log", write_tiny(tmp_path / "model"), *TIGHT) as restarted:
        for one, expected in zip(await quiet(restarted), alone, strict=True):
            assert_same(one, expected)
