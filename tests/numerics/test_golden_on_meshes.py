"""The default model cut over devices of a CPU: still the ids and logprobs of Hugging Face transformers."""

from pathlib import Path

import numpy as np
import pytest

from headrace import LLM
from tests.numerics.golden import LOGPROB_TOLERANCE, MAX_FLIP_SHARE, find_flips, references

NUM_TOKENS = 24
REFERENCES = [reference for reference in references() if len(reference.prompt_ids) <= 300][:16]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("mesh", ["tensor=3", "stage=2", "data=2", "data=2,tensor=3", "stage=2,tensor=3"])
def test_ids_and_logprobs_are_the_references(mesh: str, smollm2_path: Path) -> None:
    llm = LLM(str(smollm2_path), device="cpu", mesh=mesh, num_slots=8, context=512, chunk_tokens=64)
    prompts = [reference.prompt_ids for reference in REFERENCES]
    found = llm.generate(prompts, max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0, num_logprobs=0)
    flips = {
        flip.prompt: flip
        for flip in find_flips(
            [completion.token_ids for completion in found],
            [reference.ids for reference in REFERENCES],
            [reference.gaps for reference in REFERENCES],
            num_tokens=NUM_TOKENS,
        )
    }
    assert all(flip.is_near_tie for flip in flips.values()), flips
    assert len(flips) <= max(1, MAX_FLIP_SHARE * len(REFERENCES)), flips
    for index, (reference, completion) in enumerate(zip(REFERENCES, found, strict=True)):
        assert completion.logprobs is not None
        same = flips[index].position if index in flips else NUM_TOKENS
        chosen = [entry.chosen for entry in completion.logprobs[:same]]
        np.testing.assert_allclose(chosen, reference.logprobs[:same], atol=LOGPROB_TOLERANCE, rtol=0)
