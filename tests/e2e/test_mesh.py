"""Real servers whose model is cut over devices of a CPU: on every mesh the answers of one device."""

import asyncio
import functools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from safetensors.numpy import save_file

from headrace.model.init import init_weights
from tests.cases.tiny_model import CONFIG, SEED, VOCAB_SIZE
from tests.golden import random_weights
from tests.live import LiveServer, start_server
from tests.model.test_tokenizer_files import byte_level
from tests.model.tiny import write_hf, write_json

Answers = list[tuple[list[int], list[float]]]
MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]
FAMILIES = Path(__file__).parents[1] / "golden" / "families"
LOGPROB_TOLERANCE = 2e-5
"""As between one device and a mesh in one process; sums are of partial sums."""
VOCABULARY = VOCAB_SIZE + 5
"""A multiple of 8; the tokenizer names fewer."""
PROMPTS = ("a", "one two three four five six seven", "xyz" * 30, "the rest of it")


@pytest.mark.parametrize(
    "mesh",
    [
        "tensor=3",
        *(
            pytest.param(mesh, marks=pytest.mark.slow)
            for mesh in ("stage=2", "data=2", "data=2,tensor=3", "stage=2,tensor=3")
        ),
    ],
)
def test_a_mesh_answers_as_one_device_does(mesh: str, tmp_path: Path) -> None:
    # Few programs, of thirty layers each; every lane has a stream.
    streams = "2" if "data=2" in mesh else "1"
    options = ("--max-streams", streams, "--context", "256", "--chunk-tokens", "64")
    server = start_server(tmp_path / "log", "smollm2-135m", *options, "--device", "cpu", "--mesh", mesh)
    try:
        answers = asyncio.run(_ask_at_once(server))
    finally:
        code = server.stop()
    assert answers == ["The capital of France is Paris."] * 3 and code == 0
    assert f"mesh {mesh}" in server.log.read_text()


async def _ask_at_once(server: LiveServer) -> list[str]:
    """Three streams of one question, so that every lane has one."""

    async def ask(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(
            model="smollm2-135m", messages=MESSAGES, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        return list(await asyncio.gather(ask(client), ask(client), ask(client)))


WITH_EXPERTS = ("expert=4", "expert=2,tensor=2", "data=2,expert=2")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Answers]:
    """What a server of a family's model on one device answers."""

    @functools.cache
    def answers(family: str) -> Answers:
        folder = tmp_path_factory.mktemp(family)
        return _completions(_write(family, folder / "model"), "tensor=1", folder)

    return answers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        *(("llama", mesh) for mesh in ("tensor=2", "tensor=4", "tensor=8")),
        *((family, mesh) for family in ("mixtral", "qwen3_moe", "gpt_oss") for mesh in WITH_EXPERTS),
    ],
)
def test_a_random_model_answers_as_on_one_device(
    family: str, mesh: str, tmp_path: Path, alone: Callable[[str], Answers]
) -> None:
    expected = alone(family)
    found = _completions(_write(family, tmp_path / "model"), mesh, tmp_path)
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=LOGPROB_TOLERANCE)


def _write(family: str, directory: Path) -> Path:
    """A model directory with one token per byte."""
    directory.mkdir()
    if family == "llama":
        cfg = replace(CONFIG, num_heads=8, num_kv_heads=2, head_dim=8, vocab_size=VOCABULARY)
        write_hf(directory, cfg, init_weights(cfg, SEED))
    else:
        record = json.loads((FAMILIES / f"{family}.json").read_text())
        shapes = record["shapes"] | {
            name: [VOCABULARY, record["config"]["hidden_size"]]
            for name in ("model.embed_tokens.weight", "lm_head.weight")
        }
        save_file(random_weights.draw(record["seed"], shapes), directory / "model.safetensors")
        write_json(directory / "config.json", record["config"] | {"vocab_size": VOCABULARY})
    (directory / "tokenizer.json").write_text(json.dumps(byte_level()))
    return directory


def _completions(model: Path, mesh: str, tmp_path: Path) -> Answers:
    """Ids and logprobs of greedy answers, asked for at once; they may not end before their length."""
    options = ("--max-streams", "4", "--context", "128", "--page-size", "16", "--chunk-tokens", "32")
    server = start_server(tmp_path / f"{mesh}.log", str(model), *options, "--device", "cpu", "--mesh", mesh)
    try:
        found = asyncio.run(_complete_at_once(server, model.name))
    finally:
        code = server.stop()
    assert code == 0
    return found


async def _complete_at_once(server: LiveServer, name: str) -> Answers:
    async def ask(client: openai.AsyncOpenAI, text: str) -> tuple[list[int], list[float]]:
        done = await client.completions.create(
            model=name,
            prompt=text,
            temperature=0,
            max_tokens=12,
            logprobs=1,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        choice: Any = done.choices[0]
        return choice.token_ids, choice.logprobs.token_logprobs

    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        return list(await asyncio.gather(*(ask(client, text) for text in PROMPTS)))


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("tensor=2", "--mesh tensor=2: layers.0.q_DX of shape [576, 576]: its axis heads (9 heads) does not divide"),
        ("tensors=2", "--mesh: mesh 'tensors=2': axis 'tensors' is not known"),
        ("stage=4", "--mesh stage=4: layers: 30 do not divide into 4 stages (mesh axis stage)"),
    ],
)
def test_a_mesh_that_cannot_be_ends_the_start_by_name(mesh: str, words: str) -> None:
    command = [sys.executable, "-m", "headrace", "serve", "smollm2-135m", "--port", "0", "--mesh", mesh]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and words in " ".join(done.stderr.split()), done.stderr
