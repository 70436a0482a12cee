"""A model directory of 100 kB with one token per byte, and what its oracle says of an answer."""

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.model.init import init_weights
from headrace.model.oracle import logits_SV
from tests.model.test_tokenizer_files import byte_level
from tests.model.tiny import TINY, write_hf

VOCAB_SIZE = 259
"""256 bytes, one merged pair, two more."""
CONTEXT = 1024
CONFIG = replace(TINY, vocab_size=VOCAB_SIZE, max_context=CONTEXT, bos_id=None, eos_ids=(257,))
SEED = 7
PAGE, CHUNK, PAGES = 16, 32, 49
TIGHT = (
    *("--max-streams", "4", "--context", str(CONTEXT), "--page-size", str(PAGE)),
    *("--chunk-tokens", str(CHUNK), "--pages", str(PAGES + 1)),
)
"""Three programs to compile: one row, four rows, and four rows with a chunk. One page is the null page."""
FLIP_GAP = 1e-3
"""A greedy choice may differ where the two best logits are so close: other shapes sum in another order (float32)."""
LOGPROB_TOLERANCE = 1e-3


def write_tiny(directory: Path, *, num_shards: int = 1) -> Path:
    write_hf(directory, CONFIG, init_weights(CONFIG, SEED), num_shards=num_shards)
    (directory / "tokenizer.json").write_text(json.dumps(byte_level()))
    return directory


def prompt(seed: int, num_tokens: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, 256, num_tokens).tolist()
    return ids


@functools.cache
def _weights() -> Any:
    return init_weights(CONFIG, SEED)


def assert_as_oracle(
    prompt_ids: Sequence[int], ids: Sequence[int], logprobs: Sequence[float], *, presence_penalty: float = 0.0
) -> None:
    """Each token is the oracle's choice after those before it, and has its logprob."""
    padded = [*prompt_ids, *ids] + [0] * (CONTEXT - len(prompt_ids) - len(ids))  # one length, one compilation
    raw_SV = np.asarray(logits_SV(_weights(), CONFIG, padded))[len(prompt_ids) - 1 :]
    seen = np.zeros(VOCAB_SIZE, bool)
    assert len(ids) == len(logprobs)
    for token, logprob, raw_V in zip(ids, logprobs, raw_SV, strict=False):
        logits_V = raw_V - presence_penalty * seen
        assert logits_V[token] > logits_V.max() - FLIP_GAP
        assert abs(raw_V[token] - np.logaddexp.reduce(raw_V) - logprob) < LOGPROB_TOLERANCE
        seen[token] = True
