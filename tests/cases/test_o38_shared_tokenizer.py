"""O38: one tokenizer for all threads: under load every request has the ids that it has alone, and none fails."""

import asyncio
from pathlib import Path

import pytest

from headrace.model.chat_template import load_chat_template
from headrace.model.tokenizer import load_tokenizer
from headrace.serving.bench.stream_client import History, StreamClient
from tests.cases.five_checks import FiveChecks
from tests.live import LiveServer

TEXTS = (
    "How much is 17 times 23?",
    "😀 👨‍👩‍👧‍👦 สวัสดี žluťoučký kůň",
    "<|im_start|>system\nno control tokens here<|im_end|>",
    "The river turns the mill wheel. " * 400,
    "x" * 5000,
    "\n\n 2 \t\t",
)


def chat(i: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{i} {TEXTS[i % len(TEXTS)]}"}]


def raw(i: int) -> str:
    return f"{i} {TEXTS[i % len(TEXTS)]}"


def bodies(i: int) -> list[tuple[str, dict[str, object]]]:
    """A chat, a completion and a list of prompts, each with all that needs the tokenizer."""
    common = {
        "max_tokens": 2, "ignore_eos": True, "stop": ["never-there", "é"], "logit_bias": {"42": 1.5, "43": -2},
        "return_token_ids": True, "logprobs": 2, "seed": 0,
    }  # fmt: skip
    return [
        ("chat", common | {"messages": chat(i), "logprobs": True, "top_logprobs": 2}),
        ("completion", common | {"prompt": raw(i)}),
        ("completion", common | {"prompt": [raw(i), raw(i + 1)]}),
    ]


@pytest.fixture(scope="module")
def expected(smollm2_path: Path) -> list[list[list[list[int]]]]:
    """Prompt ids per connection, request and choice, from one thread."""
    tokenizer, template = load_tokenizer(smollm2_path), load_chat_template(smollm2_path)
    assert template is not None
    texts = [tokenizer.encode(raw(i), allow_special=True) for i in range(51)]
    return [[[list(template.render_ids(tokenizer, chat(i)))], [texts[i]], [texts[i], texts[i + 1]]] for i in range(50)]


async def test_fifty_connections_at_once_have_the_ids_of_one(
    fake_server: LiveServer, fake_checks: FiveChecks, expected: list[list[list[list[int]]]]
) -> None:
    clients = [await StreamClient(fake_server.stream_url).__aenter__() for _ in range(50)]

    async def ask(client: StreamClient, i: int) -> list[History]:
        return [await client.create(f"r{n}", endpoint, body) for n, (endpoint, body) in enumerate(bodies(i))]

    asked = await asyncio.gather(*(ask(client, i) for i, client in enumerate(clients)))
    histories = [history for of_client in asked for history in of_client]
    await asyncio.gather(*(history.ended.wait() for history in histories))
    await asyncio.gather(*(client.__aexit__() for client in clients))
    fake_checks.watch(*histories)
    assert {history.terminals[0]["type"] for history in histories} == {"done"}
    found = [[history.frames[0][1]["prompt_token_ids"] for history in of_client] for of_client in asked]
    assert found == expected
