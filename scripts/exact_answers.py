"""Requests whose answers are compared bit for bit, and the company they are put into: random arrivals, strangers that
ask for other things, some of which are cancelled."""

import asyncio
import hashlib
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from headrace.serving.bench.stream_client import History, StreamClient
from tests.live import LiveServer

LAST_ID = {"tiny": 250}
"""Ids of prompts, where a vocabulary is small; else DEFAULT_LAST_ID."""
DEFAULT_LAST_ID = 40_000
SHARED_TOKENS = 150
"""Of a prefix that some prompts share: more than one chunk."""
NUM_SOCKETS = 4
READY_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All that the server said of the tokens. bits: digest of ids and logprobs; JSON keeps every bit of a float."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    gaps: tuple[float, ...]
    bits: str
    preemptions: int
    cached_tokens: int
    metrics: dict[str, Any]


def asks(model: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Bodies of completions: prompts of 3 to 300 ids, every fourth with a prefix that they share; greedy, drawn with
    seeds, cut, penalized, biased, and with constraints."""
    rng = random.Random(seed)
    last = LAST_ID.get(model, DEFAULT_LAST_ID)
    shared = [rng.randint(10, last) for _ in range(SHARED_TOKENS)]
    found = []
    for index in range(count):
        prompt = [rng.randint(10, last) for _ in range(rng.choice((3, 15, 16, 17, 40, 64, 65, 120, 130, 200, 300)))]
        body: dict[str, Any] = {
            "prompt": (shared if index % 4 == 3 else []) + prompt,
            "max_tokens": rng.choice((8, 16, 24)),
            "logprobs": rng.choice((2, 20)),
            "return_token_ids": True,
            "ignore_eos": True,
        }
        found.append(body | _sampling(rng, index % 5))
    return found


def _sampling(rng: random.Random, kind: int) -> dict[str, Any]:
    seed = {"seed": rng.randrange(2**62)}
    return (
        {"temperature": 0},
        {"temperature": 0.9} | seed,
        {"temperature": 1.1, "top_p": 0.9, "top_k": 40} | seed,
        {"temperature": 0, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
        {"temperature": 0.7, "min_p": 0.05, "presence_penalty": 0.3, "logit_bias": {"42": 1.5}} | seed,
    )[kind]


async def ask(client: StreamClient, id: str, body: dict[str, Any]) -> Answer | None:
    """None: the engine died under it, or was not there."""
    history = await client.create(id, "completion", body)
    await history.ended.wait()
    if history.is_lost or history.terminals[0]["type"] == "error":
        code = "" if history.is_lost else history.terminals[0]["error"]["code"]
        if code not in ("engine_lost", "not_ready"):
            raise AssertionError(f"{id}: {'lost' if history.is_lost else history.terminals[0]['error']}")
        return None
    return _answer(history)


def _answer(history: History) -> Answer:
    assert not history.faults(), history.faults()
    deltas: list[dict[str, Any]] = [frame for _, frame in history.of_type("delta")]
    ids = tuple(token for delta in deltas for token in delta["token_ids"])
    entries = [entry for delta in deltas for entry in delta["logprobs"]]
    end = history.terminals[0]
    said = json.dumps([ids, entries], sort_keys=True)
    values = [entry["logprob"] for entry in entries]
    assert all(float(np.float32(value)) == value for value in values), "a logprob lost bits on its way"
    tops = [[top["logprob"] for top in entry["top_logprobs"]] for entry in entries]
    return Answer(
        ids=ids,
        logprobs=tuple(values),
        gaps=tuple(top[0] - top[1] for top in tops),
        bits=hashlib.sha256(said.encode()).hexdigest(),
        preemptions=end["metrics"]["preemptions"],
        cached_tokens=end["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0),
        metrics=end["metrics"],
    )


async def alone(server: LiveServer, bodies: Sequence[dict[str, Any]], done: Callable[[], None]) -> list[Answer]:
    """One after the other."""
    found = []
    async with StreamClient(server.stream_url) as client:
        for index, body in enumerate(bodies):
            answer = await ask(client, f"a{index}", body)
            assert answer is not None, "the engine died"
            found.append(answer)
            done()
    return found


async def together(
    server: LiveServer, bodies: Sequence[dict[str, Any]], done: Callable[[], None] = lambda: None
) -> tuple[list[Answer], float]:
    """All at once; (answers, seconds)."""
    async with StreamClient(server.stream_url) as client:

        async def one(index: int) -> Answer:
            answer = await ask(client, f"t{index}", bodies[index])
            assert answer is not None, "the engine died"
            done()
            return answer

        started_s = time.monotonic()
        found = await asyncio.gather(*(one(index) for index in range(len(bodies))))
        return found, time.monotonic() - started_s


class Company:
    """All requests in a random order at random times over several sockets, between strangers.

    kill: end the engine with SIGKILL when a third is answered; what it took down is asked again.
    """

    def __init__(self, server: LiveServer, model: str, seed: int, *, strangers: int, spread_s: float) -> None:
        self._server = server
        self._rng = random.Random(seed)
        self._strangers = asks(model, strangers, seed + 1)
        self._spread_s = spread_s
        self.num_cancelled = self.num_died = 0

    async def run(
        self, bodies: Sequence[dict[str, Any]], done: Callable[[], None], *, kill: bool = False
    ) -> list[Answer]:
        answers: dict[int, Answer] = {}
        everyone = [*range(len(bodies)), *(-1 - i for i in range(len(self._strangers)))]
        self._rng.shuffle(everyone)
        delays = sorted(self._rng.uniform(0, self._spread_s) for _ in everyone)
        killed = asyncio.Event()

        async def one(index: int, delay_s: float, cancel_after_s: float | None) -> None:
            await asyncio.sleep(delay_s)
            if index < 0:
                await self._stranger(-1 - index, cancel_after_s)
                return
            while (answer := await self._ask_again(index, bodies[index])) is None:
                self.num_died += 1
            answers[index] = answer
            done()
            if kill and len(answers) >= len(bodies) // 3 and not killed.is_set():
                killed.set()
                self._server.engine.kill()

        cancels = [self._rng.uniform(0.1, 1.5) if self._rng.random() < 0.4 else None for _ in everyone]
        await asyncio.gather(*map(one, everyone, delays, cancels))
        return [answers[index] for index in range(len(bodies))]

    async def _ask_again(self, index: int, body: dict[str, Any]) -> Answer | None:
        await until_ready(self._server)
        async with StreamClient(self._server.stream_url) as client:
            return await ask(client, f"c{index}", body)

    async def _stranger(self, index: int, cancel_after_s: float | None) -> None:
        async with StreamClient(self._server.stream_url) as client:
            history = await client.create(f"s{index}", "completion", self._strangers[index])
            if cancel_after_s is not None:
                self.num_cancelled += 1
                await asyncio.sleep(cancel_after_s)
                await client.cancel(history.id)
            await history.ended.wait()


async def until_ready(server: LiveServer) -> None:
    """Wait for the engine, dead or starting as it may be."""
    end_s = time.monotonic() + READY_LIMIT_S
    async with httpx.AsyncClient() as http:
        while time.monotonic() < end_s:
            if (await http.get(server.url + "/readyz")).status_code == 200:
                return
            await asyncio.sleep(0.2)
    raise AssertionError(f"the server was not ready again within {READY_LIMIT_S:g} s")


def preemption_counts(server: LiveServer) -> dict[str, float]:
    """What /metrics says of preemptions and swap, by name and labels."""
    families = text_string_to_metric_families(httpx.get(server.url + "/metrics").text)
    return {
        sample.name
        + "".join(f" {k}={v}" for k, v in sorted(sample.labels.items()) if k in ("reason", "action")): sample.value
        for family in families
        for sample in family.samples
        if ("preempt" in sample.name or "swap" in sample.name) and sample.value
    }
