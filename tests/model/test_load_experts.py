"""Loading the weights of experts: what is refused, by name, and how much memory it takes."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.model.errors import ModelFileError
from headrace.model.load import load_model
from tests.golden import random_weights
from tests.model.tiny import write_json

FOLDER = Path(__file__).parent.parent / "golden" / "families"
Tensors = dict[str, np.ndarray]


def save(directory: Path, family: str, change: Callable[[Tensors], object], **keys: object) -> Path:
    record = json.loads((FOLDER / f"{family}.json").read_text())
    tensors = random_weights.draw(record["seed"], record["shapes"])
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    write_json(directory / "config.json", record["config"] | keys)
    return directory


EXPERT = "model.layers.1.block_sparse_moe.experts.{}.w1.weight"
STACK = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("family", "change", "reason"),
    [
        ("mixtral", lambda t: t.pop(EXPERT.format(5)), f"tensor '{EXPERT.format(5)}' is missing"),
        (
            "mixtral",
            lambda t: t.update({EXPERT.format(8): t[EXPERT.format(7)]}),
            f"holds tensor '{EXPERT.format(8)}', which this model does not have",
        ),
        (
            "mixtral",
            lambda t: t.update({EXPERT.format(2): t[EXPERT.format(2)].T.copy()}),
            f"tensor '{EXPERT.format(2)}' has shape [64, 48]; the configuration asks for [48, 64]",
        ),
        (
            "gpt_oss",
            lambda t: t.update({STACK: t[STACK][:7]}),
            f"tensor '{STACK}' has shape [7, 64, 96]; the configuration asks for [8, 64, 96]",
        ),
        (
            "gpt_oss",
            lambda t: t[STACK].__setitem__((6, 3, 5), np.inf),
            f"tensor '{STACK}[6]' holds 1 NaN or infinite values of 6144",
        ),
    ],
)
def test_a_fault_is_named(tmp_path: Path, family: str, change: Callable[[Tensors], object], reason: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        load_model(save(tmp_path, family, change))
    assert reason in caught.value.reason


def test_the_hash_depends_on_both_halves_of_a_shared_tensor(tmp_path: Path) -> None:
    hashes = set()
    for index, column in enumerate((None, 10, 11)):
        (tmp_path / str(index)).mkdir()

        def change(tensors: Tensors, column: int | None = column) -> None:
            if column is not None:
                tensors[STACK][2, 0, column] += 1

        model = load_model(save(tmp_path / str(index), "gpt_oss", change))
        hashes.add(model.model_hash)
    assert len(hashes) == 3


def test_a_stack_is_never_in_memory_twice(tmp_path: Path) -> None:
    """32 experts, 8 MiB in one stored tensor: two threads hold a few experts beside the finished weights."""
    experts, width, ffn = 32, 64, 512
    shapes = {
        STACK: (experts, width, 2 * ffn),
        "model.layers.1.mlp.experts.gate_up_proj_bias": (experts, 2 * ffn),
        "model.layers.1.mlp.experts.down_proj": (experts, ffn, width),
        "model.layers.1.mlp.router.weight": (experts, width),
        "model.layers.1.mlp.router.bias": (experts,),
        "model.layers.1.mlp.experts.down_proj_bias": (experts, width),
    }

    def enlarge(tensors: Tensors) -> None:
        for name in list(tensors):
            of_layer_1 = name.replace("layers.0.", "layers.1.")
            if "layers.2." in name or "layers.3." in name:
                del tensors[name]
            elif of_layer_1 in shapes:
                tensors[name] = np.zeros(shapes[of_layer_1], np.float32)

    keys = {"num_local_experts": experts, "intermediate_size": ffn, "num_hidden_layers": 2}
    save(tmp_path, "gpt_oss", enlarge, layer_types=["sliding_attention", "full_attention"], **keys)
    calls = []

    def progress(done: int, total: int) -> None:
        """The first call is after the embedding; reading config.json takes more for a moment than all that follows."""
        if not calls:
            tracemalloc.reset_peak()
        calls.append(done)

    tracemalloc.start()
    try:
        model = load_model(tmp_path, progress=progress)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert model.weights.layers[1].up_EDF.nbytes == 4 << 20
    assert kept > 24 << 20 and peak - kept < 2 << 20
