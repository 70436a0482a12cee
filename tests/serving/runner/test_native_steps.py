"""Whole steps with the weights of a GGUF file as they are: the logprobs of the oracle on the dequantized weights."""

from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.model import oracle
from headrace.model.group_quant import as_integers, dequantized, form_of
from headrace.model.init import init_weights
from headrace.model.load import load_model, open_weights
from headrace.model.quant_form import GGUF_FORMS
from headrace.model.specs import WeightScheme
from headrace.model.weights import Weights
from headrace.pallas_kernels import api
from headrace.pallas_kernels.types import GroupQuant, Implementation, Kernels
from headrace.serving.core.events import TokenEvent
from headrace.serving.runner.backend import Backend, find_mesh
from headrace.serving.runner.forms import choose_forms
from headrace.serving.runner.load import load_placed
from headrace.serving.runner.runner import JaxRunner
from headrace.sharding.mesh_shape import parse_mesh
from tests.model.tiny import TINY, write_gguf, write_hf
from tests.serving.runner.plans import CONFIG, GREEDY, prompt, request, serve

CPU = jax.devices("cpu")[0]
SMALL = replace(CONFIG, num_pages=80, decode_rows=(4,), prefill_tokens=(16,))
CFG = replace(TINY, tied_embeddings=False, ffn_width=128)
TOLERANCE = 1e-5
"""Of a logprob: what differs is the order of sums. The largest difference measured is 1.5e-6."""
PROMPTS = tuple(prompt(seed, length, CFG) for seed, length in ((1, 9), (2, 21), (3, 4)))


@dataclass(frozen=True, slots=True)
class Case:
    kind: str
    mesh: str
    scan: bool


CASES = (
    Case("Q4_1", "tensor=1", scan=False),
    Case("Q4_0", "tensor=2", scan=True),
    pytest.param(Case("Q5_1", "stage=2", scan=False), marks=pytest.mark.slow),
    pytest.param(Case("MXFP4", "tensor=2", scan=False), marks=pytest.mark.slow),
)
"""tensor=2 cuts the contraction of o and down: groups are cut with it."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind} {case.mesh} scan={case.scan}")
def test_logprobs_and_greedy_ids_are_the_oracles(tmp_path: Path, case: Case) -> None:
    path = write_gguf(tmp_path / "m.gguf", CFG, init_weights(CFG, 3), gguf.GGMLQuantizationType[case.kind])
    forms = {name: form for name, form in open_weights(path).forms.items() if name != "embed_VD"}
    backend = Backend(device=CPU, mesh=find_mesh(CPU, parse_mesh(case.mesh)), scan_layers=case.scan, forms=forms)
    check(path, backend, load_model(path).weights)


def test_int4_of_what_no_file_holds(tmp_path: Path) -> None:
    path = write_hf(tmp_path, CFG, init_weights(CFG, 3))
    weights = jax.tree.map(
        lambda x: dequantized(x) if isinstance(x, GroupQuant) else x,
        init_weights(CFG, 3, scheme=WeightScheme.INT4),
        is_leaf=lambda x: isinstance(x, GroupQuant),
    )
    check(path, Backend(device=CPU, weights=WeightScheme.INT4), weights)


def check(path: Path, backend: Backend, weights: Weights[np.ndarray]) -> None:
    """weights: dequantized."""
    model = load_placed(path, backend)
    layers = model.weights.layers
    assert isinstance((layers if backend.scan_layers else layers[0]).down_FD, GroupQuant)
    runner = JaxRunner(model, SMALL, backend=backend)
    runner.warm_up(lambda *_: None)
    asks = replace(GREEDY, num_logprobs=20)
    events = serve(runner, SMALL, [request(n, ids, asks) for n, ids in enumerate(PROMPTS)])
    runner.close()
    for number, ids in enumerate(PROMPTS):
        tokens = [event for event in events[number] if isinstance(event, TokenEvent)]
        out = [event.token_id for event in tokens]
        padded = [*ids, *out, *[0] * (32 - len(ids) - len(out))]
        logprob_SV = np.asarray(jax.nn.log_softmax(oracle.logits_SV(weights, model.config, padded)))[len(ids) - 1 :]
        assert out == logprob_SV[: len(out)].argmax(axis=1).tolist() and len(out) == 8
        for event, logprob_V in zip(tokens, logprob_SV, strict=False):
            assert event.logprobs is not None
            for token, value in event.logprobs.top:
                assert value == pytest.approx(logprob_V[token], abs=TOLERANCE)


@pytest.mark.parametrize("kind", GGUF_FORMS)
@pytest.mark.parametrize("implementation", [Implementation.TPU, Implementation.GPU])
def test_kernels_run_the_forms_that_are_chosen_for_them(implementation: Implementation, kind: str) -> None:
    """bfloat16 inputs beside the float32 scales that files' scales become."""
    chip = {Implementation.TPU: "v6e", Implementation.GPU: "h100"}[implementation]
    backend = Backend(
        device=CPU,
        kernels=Kernels(implementation=implementation, chip=chip, interpret=True),
        dtype=np.dtype(jnp.bfloat16),
    )
    cfg = replace(CFG, width=256, ffn_width=128, num_heads=4, head_dim=64)
    name = "layers.0.q_DX"
    form = choose_forms({name: GGUF_FORMS[kind]}, cfg, backend).forms[name]
    rng = np.random.default_rng(1)
    low, high = (-8, 8) if form.bits == 4 else (-32, 32)
    values = as_integers(rng.integers(low, high, (256, 256)).astype(np.int8), form).view(form.values_dtype)
    scale, offset = rng.uniform(0.5, 1, (2, form.num_groups(256), 256)).astype(form.scale_dtype)
    weight = GroupQuant(values, scale, offset if form.is_affine else None, stands_for="bfloat16")
    assert form_of(weight) == form
    x = np.asarray(jnp.asarray(rng.standard_normal((5, 256), np.float32), jnp.bfloat16))
    found = api.quant_matmul(jnp.asarray(x), jax.tree.map(jnp.asarray, weight), kernels=backend.kernels)
    expected = x.astype(np.float64) @ dequantized(weight).astype(np.float64)
    np.testing.assert_allclose(found, expected, atol=1e-2 * np.abs(expected).max())
