"""Each family against Hugging Face transformers: logits of every position of one sequence, float32.

What differs is the order of sums. The records and their weights: scripts/make_golden_families.py.
"""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.model import oracle
from headrace.model.config import ModelConfig
from headrace.model.decoder import stack_layers
from headrace.model.load import load_model
from headrace.model.rope_scaling import YarnScaling
from headrace.model.router import Gate, Router
from headrace.model.weights import Weights
from tests.golden import random_weights
from tests.model.paged_steps import Segment, new_pool, pages, run
from tests.model.tiny import write_json

pytestmark = pytest.mark.usefixtures("quick_compiles")
FOLDER = Path(__file__).parent.parent / "golden" / "families"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
Models = dict[str, tuple[ModelConfig, Weights[jax.Array]]]
TOLERANCE = 5e-6
"""Of the largest logit. Measured: 1.4e-6 at most (gpt-oss, whose four layers are the deepest), 0.6e-6 to 1.0e-6 for the
others, oracle and served decoder alike."""


@functools.cache
def record(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Each model, read from files as transformers writes them."""
    found = {}
    for name in NAMES:
        directory = tmp_path_factory.mktemp(name)
        tensors = random_weights.draw(record(name)["seed"], record(name)["shapes"])
        assert random_weights.digest(tensors) == record(name)["weights_sha256"]
        save_file(tensors, directory / "model.safetensors")
        write_json(directory / "config.json", record(name)["config"])
        model = load_model(directory)
        found[name] = model.config, jax.device_put(model.weights)
    return found


def difference(name: str, rows: Any, start: int = 0) -> float:
    """Largest, relative to the largest logit."""
    expected = np.array(record(name)["logits"])
    return float(np.abs(np.asarray(rows) - expected[start : start + len(rows)]).max() / np.abs(expected).max())


def test_there_are_records() -> None:
    assert {"mixtral", "qwen2_moe", "qwen3", "qwen3_moe", "gpt_oss", "llama3_rope"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_oracle(name: str, models: Models) -> None:
    cfg, weights = models[name]
    assert difference(name, oracle.logits_SV(weights, cfg, record(name)["ids"])) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama3_rope", {"rope_scaling": None}),
        ("mixtral", {"router": Router()}),
        ("mixtral_window", {"sliding_window": 12}),
        ("qwen2_moe", {"has_shared_gate": False}),
        ("qwen2_moe", {"shared_expert_width": 0, "has_shared_gate": False}),
        ("qwen3_moe", {"router": Router()}),
        ("qwen3_moe_plain", {"router": Router(renormalize=True)}),
        ("gpt_oss", {"gate": Gate(alpha=1.702, limit=None, up_offset=1.0)}),
        ("gpt_oss", {"window_pattern": (False, True)}),
        ("gpt_oss", {"rope_scaling": YarnScaling(factor=8.0, original_context=32, attention_factor=1.0)}),
        ("gpt_oss", {"rope_scaling": YarnScaling(factor=8.0, original_context=32, truncate=True)}),
    ],
    ids=str,
)
def test_the_records_would_notice(name: str, change: dict[str, Any], models: Models) -> None:
    """Each option changes the logits by far more than the tolerance: the records depend on all of them."""
    cfg, weights = models[name]
    assert difference(name, oracle.logits_SV(weights, replace(cfg, **change), record(name)["ids"])) > 1e-3


SERVED = [(name, False) for name in NAMES] + [(name, True) for name in ("gpt_oss", "mixtral_window", "qwen3")]


@pytest.mark.parametrize(("name", "scan"), SERVED, ids=[f"{n}-{'scanned' if s else 'unrolled'}" for n, s in SERVED])
def test_the_served_decoder(name: str, scan: bool, models: Models) -> None:
    """A prompt in two chunks beside an empty row, then a token at a time beside another sequence."""
    cfg, weights = models[name]
    weights = stack_layers(weights) if scan else weights
    ids, own, other = record(name)["ids"], pages(1), pages(1, 30)[12:24]
    pool, rows = new_pool(cfg), []
    for start, count in ((0, 16), (16, 9)):
        out, pool = run(cfg, weights, pool, [None, None], [Segment(ids, start, count, own)], blocks=3)
        assert difference(name, out[2:], start + count - 1) < TOLERANCE
    for position in range(25, len(ids)):
        mate = Segment(ids[::-1], position - 25, 1, other)
        out, pool = run(cfg, weights, pool, [mate, Segment(ids, position, 1, own)], [], blocks=0)
        rows.append(out[1])
    assert difference(name, rows, 25) < TOLERANCE
