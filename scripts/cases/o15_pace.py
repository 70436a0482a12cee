"""O15: other streams keep their pace while a client sends hostile chats."""

import asyncio
import itertools
import json
import random
import time
from typing import Any

import httpx

from headrace.serving.bench.stream_client import StreamClient
from headrace.serving.bench.workload import WORDS
from scripts.cases.figures import Bounds, Figures, Sizes, change_interval, p99_change, quantile, say, under
from tests.cases.test_o15_templates_from_requests import ENDLESS, HI
from tests.cases.test_o33_blocked_loop import JSON
from tests.live import LiveServer

OPTIONS = ("--context", "1024")
"""The longest chat whose number of messages is accepted does not fit, so that it is refused behind its rendering."""
MAX_PACE_CHANGE = 0.20
WAYS: dict[str, float | None] = {"without": None, "case": 0.25, "flood": 0.0}
"""Way of a run -> seconds between two hostile chats. The bound is for "case", in which each kind comes once in 2 s. A
client that sends one as soon as the last is answered takes a core, as any closed loop would: measured beside it."""


def hostile_chats() -> list[bytes]:
    """All are refused: by their fields, by their number of messages, and the last after it was rendered."""
    turn = {"role": "user", "content": "hi there"}
    bodies: list[dict[str, Any]] = [
        HI | {"chat_template": ENDLESS},
        HI | {"Chat_Template": ENDLESS},
        *(
            HI | {"chat_template_kwargs": arguments}
            for arguments in (
                {"chat_template": ENDLESS},
                {"tokenize": True},
                {"messages": []},
                {"add_generation_prompt": "x"},
            )
        ),
        {"messages": [turn] * 5000},
        {"messages": [turn] * 1024},
    ]
    return [json.dumps(body).encode() for body in bodies]


async def attack(server: LiveServer, every_s: float) -> int:
    """The hostile chats in turn, none before the one ahead of it is answered, until cancelled; how many."""
    count = 0
    async with httpx.AsyncClient(base_url=server.url, timeout=60, headers=JSON) as http:
        try:
            for body in itertools.cycle(hostile_chats()):
                answer = await http.post("/v1/chat/completions", content=body)
                assert answer.status_code == 400, answer.text[:300]
                count += 1
                await asyncio.sleep(every_s)
        except asyncio.CancelledError:
            pass
    return count


async def pace(server: LiveServer, *, every_s: float | None, seed: int) -> tuple[list[float], int]:
    """Milliseconds between two frames of each of 4 streams while all of them generate; how many hostile chats."""
    rng = random.Random(seed)
    body = {"max_tokens": 128, "temperature": 0, "ignore_eos": True}
    async with StreamClient(server.stream_url) as client:
        prompts = (" ".join(rng.choices(WORDS, k=16)) for _ in range(4))
        histories = [await client.create(f"r{i}", "completion", body | {"prompt": p}) for i, p in enumerate(prompts)]
        while not all(history.of_type("delta") for history in histories):
            await asyncio.sleep(0.01)
        start_s = time.monotonic()
        attacker = None if every_s is None else asyncio.create_task(attack(server, every_s))
        await asyncio.gather(*(history.ended.wait() for history in histories))
        end_s = min(history.frames[-1][0] for history in histories)
        count = 0
        if attacker is not None:
            attacker.cancel()
            count = await attacker
    assert not [fault for history in histories for fault in history.faults()]
    gaps = []
    for history in histories:
        at = [at_s for at_s, _ in history.of_type("delta") if start_s <= at_s <= end_s]
        gaps += [(b - a) * 1000 for a, b in zip(at, at[1:], strict=False)]
    return gaps, count


async def keep_pace(server: LiveServer, sizes: Sizes) -> tuple[Figures, Bounds]:
    """Rounds of one run of each way, from round to round in the other order."""
    await pace(server, every_s=0.0, seed=0)
    runs: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    chats = dict.fromkeys(WAYS, 0)
    for number in range(sizes.pairs):
        for way in list(WAYS)[:: 1 if number % 2 else -1]:
            gaps, count = await pace(server, every_s=WAYS[way], seed=1 + number)
            runs[way].append(gaps)
            chats[way] += count
        p99s = ", ".join(f"{way} {quantile(of_way[-1], 0.99):.1f} ms" for way, of_way in runs.items())
        say(f"O15 round {number + 1} of {sizes.pairs}, p99 gap: {p99s}")
    figures: Figures = {"rounds": sizes.pairs}
    for way, of_way in runs.items():
        pairs = list(zip(runs["without"], of_way, strict=True))
        pooled = [gap for run in of_way for gap in run]
        figures[way] = {
            "hostile_chats": chats[way],
            "gap_ms": {f"p{share * 100:g}": round(quantile(pooled, share), 1) for share in (0.5, 0.9, 0.99, 1.0)},
            "p99_ms_of_runs": [round(quantile(run, 0.99), 1) for run in of_way],
            "p99_change": round(p99_change(pairs), 4),
            "p99_change_95%": [round(end, 4) for end in change_interval(pairs)],
        }
    return figures, {"p99 gap, change by hostile chats": under(figures["case"]["p99_change"], MAX_PACE_CHANGE)}
