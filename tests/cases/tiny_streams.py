"""Greedy streams of the tiny model with ids and logprobs, and when two of them are the same."""

import asyncio
from dataclasses import dataclass
from typing import Any

from headrace.serving.bench.stream_client import History, StreamClient
from tests.cases.tiny_model import FLIP_GAP
from tests.live import LiveServer


@dataclass(frozen=True)
class Outcome:
    ids: list[int]
    entries: list[dict[str, Any]]
    text: str
    finish_reason: str
    usage: tuple[int, int]
    preemptions: int

    @property
    def logprobs(self) -> list[float]:
        return [entry["logprob"] for entry in self.entries]


def outcome(history: History) -> Outcome:
    assert not history.faults()
    done: Any = history.terminals[0]
    assert done["type"] == "done", done
    frames: list[Any] = [frame for _, frame in history.of_type("delta")]
    return Outcome(
        ids=[i for frame in frames for i in frame["token_ids"]],
        entries=[entry for frame in frames for entry in frame["logprobs"]],
        text=history.text,
        finish_reason=done["choices"][0]["finish_reason"],
        usage=(done["usage"]["prompt_tokens"], done["usage"]["completion_tokens"]),
        preemptions=done["metrics"]["preemptions"],
    )


def body(ids: list[int], num_tokens: int, **fields: Any) -> dict[str, Any]:
    fixed = {"temperature": 0, "seed": 7, "ignore_eos": True, "return_token_ids": True, "logprobs": 2}
    return fixed | {"prompt": ids, "max_tokens": num_tokens} | fields


async def run(server: LiveServer, bodies: list[dict[str, Any]]) -> list[Outcome]:
    """All at once, on one socket."""
    async with StreamClient(server.stream_url) as client:
        histories = [await client.create(f"r{i}", "completion", body) for i, body in enumerate(bodies)]
        await asyncio.gather(*(history.ended.wait() for history in histories))
    return [outcome(history) for history in histories]


def assert_same(found: Outcome, alone: Outcome) -> None:
    """Up to a near-tie of the two best tokens, behind which greedy texts may part."""
    same = 0
    while same < len(alone.ids) and found.ids[same] == alone.ids[same]:
        same += 1
    assert all(abs(a - b) < FLIP_GAP for a, b in zip(found.logprobs[:same], alone.logprobs[:same], strict=True))
    assert (found.finish_reason, found.usage) == (alone.finish_reason, alone.usage)
    assert len(found.ids) == len(found.entries) == found.usage[1]
    if same < len(alone.ids):
        best, second = (entry["logprob"] for entry in alone.entries[same]["top_logprobs"])
        assert best - second < FLIP_GAP, f"token {same}"
    else:
        assert found.text == alone.text
