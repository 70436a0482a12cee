"""Models with experts on meshes of CPU devices: the logits of Hugging Face transformers, through the runner."""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.model.load import LoadedModel, load_model
from headrace.serving.core.events import TokenEvent
from headrace.serving.core.request import SamplingParams
from headrace.serving.runner.backend import Backend, find_mesh
from headrace.serving.runner.runner import JaxRunner
from headrace.sharding.mesh_shape import parse_mesh
from tests.golden import random_weights
from tests.model.tiny import write_json
from tests.serving.runner.plans import CONFIG, request, serve

CPU = jax.devices("cpu")[0]
SMALL = replace(CONFIG, num_pages=80, decode_rows=(4,), prefill_tokens=(16,))
RECORDS = Path(__file__).parents[2] / "golden" / "families"
TOLERANCE = 5e-6
"""Of the largest logit, as on one device; the largest difference measured is 1e-6."""


@functools.cache
def record(name: str) -> dict[str, Any]:
    return json.loads((RECORDS / f"{name}.json").read_text())


def model_of(name: str, folder: Path) -> LoadedModel:
    save_file(random_weights.draw(record(name)["seed"], record(name)["shapes"]), folder / "model.safetensors")
    write_json(folder / "config.json", record(name)["config"])
    return load_model(folder)


@pytest.mark.parametrize(
    ("name", "mesh", "scan"),
    [
        ("mixtral", "expert=4", False),
        ("gpt_oss", "expert=2,tensor=2", False),
        ("qwen2_moe", "expert=2,tensor=2", False),
        *(
            pytest.param(name, mesh, scan, marks=pytest.mark.slow)
            for name, mesh, scan in (
                ("mixtral", "expert=2,tensor=2", True),
                ("mixtral", "data=2,expert=2", False),
                ("qwen3_moe", "expert=4", False),
                ("qwen3_moe", "expert=2,tensor=2", True),
                ("qwen3_moe", "data=2,expert=2", False),
                ("gpt_oss", "expert=4", True),
                ("gpt_oss", "data=2,expert=2", False),
                ("qwen2_moe", "expert=4", True),
                ("qwen2_moe", "data=2,stage=2,expert=2", False),
            )
        ),
    ],
)
def test_the_next_tokens_are_as_likely_as_transformers_says(name: str, mesh: str, scan: bool, tmp_path: Path) -> None:
    backend = Backend(device=CPU, mesh=find_mesh(CPU, parse_mesh(mesh)), scan_layers=scan)
    model = model_of(name, tmp_path)
    lanes = backend.mesh_shape.data
    config = replace(SMALL, num_lanes=lanes, num_slots=4 // lanes, decode_rows=(4 // lanes,))
    runner = JaxRunner.of_host(model, config, backend=backend)
    runner.warm_up(lambda *_: None)
    ids, logits = tuple(record(name)["ids"]), np.array(record(name)["logits"])
    asks = SamplingParams(temperature=0.0, num_logprobs=20)
    lengths = (1, 9, 17, 30, len(ids))
    events = serve(runner, config, [request(n, ids[:n], asks, max_tokens=1) for n in lengths])
    counts = runner.expert_tokens()
    runner.close()
    assert counts is not None and len(counts) == model.config.num_layers
    # Every token once in each layer, however many devices it is on; some were found in a lane's prefix cache.
    (in_layer,) = {sum(layer) for layer in counts}
    assert len(ids) <= in_layer / model.config.experts_per_token <= sum(lengths)
    for length in lengths:
        (token,) = [event for event in events[length] if isinstance(event, TokenEvent)]
        assert token.logprobs is not None and token.token_id == logits[length - 1].argmax()
        expected = np.asarray(jax.nn.log_softmax(logits[length - 1]))
        worst = max(abs(value - expected[token_id]) for token_id, value in token.logprobs.top)
        assert worst < TOLERANCE * np.abs(logits).max(), (length, worst)
