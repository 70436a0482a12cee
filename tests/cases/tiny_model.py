"""A model directory of 100 kB whose tokenizer is one token per byte."""

import json
from dataclasses import replace
from pathlib import Path

from headrace.model.init import init_weights
from tests.model.test_tokenizer_files import byte_level
from tests.model.tiny import TINY, write_hf

VOCAB_SIZE = 259
"""256 bytes, one merged pair, two more."""
CONFIG = replace(TINY, vocab_size=VOCAB_SIZE, max_context=2048, bos_id=None, eos_ids=(257,))


def write_tiny(directory: Path, *, num_shards: int = 1) -> Path:
    write_hf(directory, CONFIG, init_weights(CONFIG, 7), num_shards=num_shards)
    (directory / "tokenizer.json").write_text(json.dumps(byte_level()))
    return directory
