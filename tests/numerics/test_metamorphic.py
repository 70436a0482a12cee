"""One prompt, many ways through the engine, one answer: that of transformers (see test_golden).

Four prompts here; scripts/check_metamorphic.py has twelve and more ways.
"""

import json
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import pytest

from headrace import LLM
from headrace.model.load import load_model
from headrace.model.tokenizer import load_tokenizer
from headrace.serving.app.offline import Completion
from tests.live import LiveServer
from tests.numerics import hf_directory, outputs
from tests.numerics.golden import TOLERANCE_OF, find_flips, references
from tests.numerics.outputs import Output

NINE_PAGES, THAI, JAPANESE, CHAT = PROMPTS = tuple(references()[index] for index in (48, 11, 13, 21))
NUM_TOKENS = 24
PAGE_SIZE = 16
TINY = {"num_slots": 4, "context": 256, "chunk_tokens": 16, "page_size": PAGE_SIZE, "pages": 16}
"""Fifteen pages, of which the first prompt takes nine, and all of them twenty with their outputs. Prompts are prefilled
page by page."""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=["reference", "auto"])
def llm(request: pytest.FixtureRequest, smollm2_path: Path) -> LLM:
    """Of the reference, and of what runs here by default."""
    return LLM(str(smollm2_path), attention=request.param, **TINY)


def generate(llm: LLM, *prompts: Sequence[int]) -> list[Completion]:
    return llm.generate(prompts, max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0, num_logprobs=0)


def assert_as_transformers(found: Sequence[Output], activations: str) -> None:
    """activations: of the engine that found it, which say how near its logprobs have to be."""
    flips = find_flips(
        [output.ids for output in found],
        [prompt.ids for prompt in PROMPTS],
        [prompt.gaps for prompt in PROMPTS],
        num_tokens=NUM_TOKENS,
    )
    assert all(flip.is_near_tie for flip in flips), flips
    positions = {flip.prompt: flip.position for flip in flips}
    for index, (output, prompt) in enumerate(zip(found, PROMPTS, strict=True)):
        assert output.prompt_ids == prompt.prompt_ids
        assert len(output.logprobs) == NUM_TOKENS
        same = positions.get(index, NUM_TOKENS)
        assert output.logprobs[:same] == pytest.approx(prompt.logprobs[:same], abs=TOLERANCE_OF[activations])


def test_alone_with_a_cold_and_a_warm_prefix_cache(llm: LLM) -> None:
    cold: list[Completion] = []
    warm: list[Completion] = []
    for prompt in PROMPTS:
        for completions in (cold, warm):
            completions += generate(llm, prompt.prompt_ids)
    assert [completion.usage.cached_tokens for completion in cold] == [0] * len(PROMPTS)
    # Whole pages, but for the last token, which has to run.
    whole_pages = [(len(prompt.prompt_ids) - 1) // PAGE_SIZE * PAGE_SIZE for prompt in PROMPTS]
    assert [completion.usage.cached_tokens for completion in warm] == whole_pages
    assert_as_transformers([outputs.of_completion(completion) for completion in cold], llm.activations)
    assert_as_transformers([outputs.of_completion(completion) for completion in warm], llm.activations)


def test_preempted(llm: LLM) -> None:
    completions = generate(llm, *(prompt.prompt_ids for prompt in PROMPTS))
    assert sum(completion.metrics.preemptions for completion in completions) > 0
    assert_as_transformers([outputs.of_completion(completion) for completion in completions], llm.activations)


@pytest.fixture(scope="module")
def directory(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The default model in three shards. Half a gigabyte: it goes when its tests are over."""
    path = hf_directory.export(smollm2_path, tmp_path_factory.mktemp("export") / "model", num_shards=3)
    yield path
    for file in path.iterdir():
        file.unlink()


def test_from_safetensors(smollm2_path: Path, directory: Path) -> None:
    from_gguf, from_shards = load_model(smollm2_path), load_model(directory)
    assert from_shards.config == from_gguf.config
    pairs = zip(jax.tree.leaves(from_shards.weights), jax.tree.leaves(from_gguf.weights), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)
    del from_gguf, from_shards, pairs
    llm = LLM(str(directory), **TINY)
    assert CHAT.messages is not None
    [answer] = llm.chat(CHAT.messages, max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0, num_logprobs=0)
    others = generate(llm, *(prompt.prompt_ids for prompt in PROMPTS if prompt is not CHAT))
    assert llm.activations == "exact", "weights of safetensors are floats"
    assert_as_transformers([outputs.of_completion(completion) for completion in (*others, answer)], llm.activations)


async def test_over_every_door_of_a_server(smollm2_path: Path, live_server: LiveServer) -> None:
    """Batches of four, chunks of up to 64 tokens."""
    tokenizer = load_tokenizer(smollm2_path)
    with urllib.request.urlopen(f"{live_server.url}/v1/contract") as answer:
        activations = json.load(answer)["contract"]["activations"]
    found = [
        await outputs.websocket(live_server.stream_url, PROMPTS, NUM_TOKENS),
        outputs.http_whole(live_server.url, PROMPTS, NUM_TOKENS),
        outputs.http_streamed(live_server.url, PROMPTS, NUM_TOKENS),
    ]
    for door in found:
        assert_as_transformers(door, activations)
        assert [output.text for output in door] == [tokenizer.decode(output.ids) for output in door]
