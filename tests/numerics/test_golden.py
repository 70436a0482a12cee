"""The default model against Hugging Face transformers, through the engine with the options of ``headrace serve``."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from headrace import LLM
from headrace.model.load import load_model
from headrace.serving.app.offline import Completion
from tests.numerics.forced import ForcedDecoder
from tests.numerics.golden import (
    LOGPROB_TOLERANCE,
    MAX_FLIP_SHARE,
    TOLERANCE_OF,
    Flip,
    Reference,
    find_flips,
    references,
)

EDGES = {1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1500}
"""Prompt lengths around pages, query blocks and chunks."""
REFERENCES = [
    reference for index, reference in enumerate(references()) if index % 3 == 0 or len(reference.prompt_ids) in EDGES
]
"""Half of the file; ``make check-golden`` runs all of it."""
NUM_TOKENS = 48
MAX_FORCED_PROMPT = 130
"""Every length up to two query blocks and one more; longer prompts take minutes on a busy machine."""

# The first test pays for a cold compile of the whole ladder.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module", params=["reference", "exact", "int16"])
def llm(request: pytest.FixtureRequest, smollm2_path: Path) -> LLM:
    """Of the reference, and of the CPU's kernels with both forms of activations that keep all ids."""
    if request.param == "reference":
        return LLM(str(smollm2_path), attention="reference")
    return LLM(str(smollm2_path), attention="cpu", activations=request.param)


@pytest.fixture(scope="module")
def completions(llm: LLM) -> list[Completion]:
    """All prompts at once: continuous batches of 16, prompts in chunks of up to 256 tokens between decode rows."""
    prompts = [reference.prompt_ids for reference in REFERENCES]
    return llm.generate(prompts, max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0, num_logprobs=0)


@pytest.fixture(scope="module")
def flips(completions: list[Completion]) -> dict[int, Flip]:
    found = find_flips(
        [completion.token_ids for completion in completions],
        [reference.ids for reference in REFERENCES],
        [reference.gaps for reference in REFERENCES],
        num_tokens=NUM_TOKENS,
    )
    return {flip.prompt: flip for flip in found}


def test_the_golden_prompts_are_many_and_of_every_length() -> None:
    for prompts, least, chats in ((references(), 40, 10), (REFERENCES, 25, 5)):
        assert {len(reference.prompt_ids) for reference in prompts} >= EDGES
        assert len(prompts) >= least
        assert sum(reference.messages is not None for reference in prompts) >= chats


def test_a_flip_is_found_once_and_judged_by_its_gap() -> None:
    expected, gaps = [(1, 2, 3, 4)] * 3, [(0.5, 0.01, 0.03, 0.5)] * 3
    found = find_flips([(1, 2, 3), (1, 9, 9), (1, 2, 9)], expected, gaps, num_tokens=3)
    assert found == [Flip(prompt=1, position=1, gap=0.01), Flip(prompt=2, position=2, gap=0.03)]
    assert [flip.is_near_tie for flip in found] == [True, False]
    with pytest.raises(AssertionError, match="prompt 0: 2 ids"):
        find_flips([(1, 2)], expected[:1], gaps[:1], num_tokens=3)


def test_greedy_ids_are_the_references(llm: LLM, completions: list[Completion], flips: dict[int, Flip]) -> None:
    assert all(flip.is_near_tie for flip in flips.values()), flips
    assert len(flips) <= MAX_FLIP_SHARE * len(REFERENCES), flips
    stats = llm.stats()
    assert stats.compiles_after_ready == 0
    assert stats.generation_tokens > 8 * stats.steps, "the prompts were not batched"


def test_every_logprob_under_the_references_own_prefix(
    llm: LLM, completions: list[Completion], flips: dict[int, Flip]
) -> None:
    """Up to a flip the engine's own prefix is the reference's; from there on it is forced."""
    for index, (reference, completion) in enumerate(zip(REFERENCES, completions, strict=True)):
        assert completion.logprobs is not None
        same = flips[index].position if index in flips else NUM_TOKENS
        found = [entry.chosen for entry in completion.logprobs[:same]]
        prefix = [*reference.prompt_ids, *reference.ids[:same]]
        found += [entry.chosen for entry in llm.score(prefix, reference.ids[same:])]
        assert_near(found, reference, TOLERANCE_OF[llm.activations])


def test_every_logprob_of_whole_chunks(smollm2_path: Path) -> None:
    """The same positions as rows of prefill chunks: what a cached or recomputed prefix is made of."""
    chosen = [reference for reference in REFERENCES if len(reference.prompt_ids) <= MAX_FORCED_PROMPT]
    assert len(chosen) >= 20
    decoder = ForcedDecoder(load_model(smollm2_path), max_tokens=MAX_FORCED_PROMPT + NUM_TOKENS, chunk_tokens=64)
    for reference in chosen:
        assert_near(decoder.logprobs(reference.prompt_ids, reference.ids), reference)


def assert_near(logprobs: Sequence[float], reference: Reference, tolerance: float = LOGPROB_TOLERANCE) -> None:
    difference = np.abs(np.subtract(logprobs, reference.logprobs))
    worst = int(difference.argmax())
    where = f"position {worst} of a prompt of {len(reference.prompt_ids)} tokens"
    assert difference[worst] <= tolerance, f"{where}: {logprobs[worst]} and {reference.logprobs[worst]}"
