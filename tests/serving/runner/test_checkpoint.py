"""Orbax checkpoints: the same arrays on every mesh, whichever wrote them; and what a damaged one is told."""

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest

from headrace.model.chat_template import load_chat_template
from headrace.model.checkpoint_files import GGUF_FIELDS, MANIFEST, WEIGHTS, copy_companions
from headrace.model.config_files import read_config
from headrace.model.errors import ModelFileError
from headrace.model.init import init_weights
from headrace.model.load import load_model
from headrace.model.tokenizer import load_tokenizer
from headrace.serving.cli import commands
from headrace.serving.core.errors import ConfigError
from headrace.serving.runner.load import load_placed, placed
from headrace.serving.runner.runner import JaxRunner
from tests.model.test_load_experts import save
from tests.model.tiny import TINY, write_gguf, write_hf
from tests.serving.runner import plans
from tests.serving.runner.test_placing import assert_same, backend_of

SMALL = replace(plans.CONFIG, num_pages=80, decode_rows=(4,), prefill_tokens=(16,))


def write(source: Path, target: Path, mesh: str, dtype: str = "float32") -> Path:
    """By the command."""
    flags = ["--device", "cpu", "--mesh", mesh, "--dtype", dtype]
    assert commands.main(["checkpoint", str(source), str(target), *flags], standalone_mode=False) == 0
    return target


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("source") / "tiny", TINY, init_weights(TINY, 1))


@pytest.fixture(scope="module")
def checkpoint(source: Path) -> Path:
    return write(source, source.parent / "checkpoint", "tensor=2")


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(source, checkpoint)."""
    folder = tmp_path_factory.mktemp("experts")
    (folder / "mixtral").mkdir()
    path = save(folder / "mixtral", "mixtral", lambda tensors: None)
    return path, write(path, folder / "checkpoint", "tensor=2")


@pytest.mark.parametrize(
    ("mesh", "scan", "dtype"),
    [
        ("tensor=1", False, np.float32),
        ("tensor=2", False, np.float32),
        ("tensor=4", False, np.float32),  # key heads twice
        ("tensor=4", True, ml_dtypes.bfloat16),
    ],
)
def test_it_restores_onto_other_meshes(source: Path, checkpoint: Path, mesh: str, scan: bool, dtype: type) -> None:
    backend, calls = backend_of(mesh, scan=scan, dtype=dtype), []
    restored = load_placed(checkpoint, backend, lambda done, total: calls.append((done, total)))
    assert_same(restored.weights, placed(load_model(source, dtype=dtype), backend).weights)
    assert restored.config == read_config(source)
    assert calls == sorted(calls) and calls[-1][0] == calls[-1][1]


def test_experts_restore_onto_an_axis_of_their_own(experts: tuple[Path, Path]) -> None:
    source, checkpoint = experts
    backend = backend_of("expert=2")
    assert_same(load_placed(checkpoint, backend).weights, placed(load_model(source), backend).weights)


@functools.cache
def greedy_ids(path: Path, mesh: str) -> list[list[int]]:
    backend = backend_of(mesh)
    runner = JaxRunner(load_placed(path, backend), SMALL, backend=backend)
    runner.warm_up(lambda *_: None)
    events = plans.serve(runner, SMALL, [plans.request(n, plans.prompt(n, 9 + n)) for n in range(3)])
    runner.close()
    return [plans.ids_of(events[n]) for n in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh"), [("llama", "tensor=1"), ("llama", "tensor=4"), ("mixtral", "expert=2")])
def test_every_mesh_gives_the_same_greedy_ids(request: pytest.FixtureRequest, family: str, mesh: str) -> None:
    """Written on tensor=2, restored on others, against the source on one device."""
    if family == "llama":
        paths = request.getfixturevalue("source"), request.getfixturevalue("checkpoint")
    else:
        paths = request.getfixturevalue("experts")
    expected = greedy_ids(paths[0], "tensor=1")
    assert all(len(found) == 8 for found in expected)
    assert greedy_ids(paths[1], mesh) == expected


def test_the_hash_is_of_the_weights_as_they_lie_there(source: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Not of the mesh that wrote them; and not that of the source, which is noted."""
    one = load_placed(checkpoint, backend_of("tensor=1"))
    assert load_placed(checkpoint, backend_of("tensor=4")).model_hash == one.model_hash
    other = write(source, tmp_path / "other", "tensor=1")
    assert load_placed(other, backend_of("tensor=1")).model_hash == one.model_hash
    narrow = write(source, tmp_path / "narrow", "tensor=2", dtype="bfloat16")
    assert load_placed(narrow, backend_of("tensor=1")).model_hash != one.model_hash
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    assert manifest["source_hash"] == load_model(source).model_hash != one.model_hash
    assert one.digests == {name: weight["sha256"] for name, weight in manifest["weights"].items()}


def test_a_checkpoint_of_a_gguf_file(tmp_path: Path) -> None:
    """The head is untied here, which a GGUF file says by having one."""
    cfg = replace(TINY, tied_embeddings=False)
    source = write_gguf(tmp_path / "m.gguf", cfg, init_weights(cfg, 2), gguf.GGMLQuantizationType.Q8_0)
    checkpoint, backend = write(source, tmp_path / "checkpoint", "tensor=2"), backend_of("tensor=1")
    assert read_config(checkpoint) == read_config(source) and not read_config(source).tied_embeddings
    assert_same(load_placed(checkpoint, backend).weights, placed(load_model(source), backend).weights)


def test_tokenizer_and_chat_template_come_along_from_gguf(smollm2_path: Path, tmp_path: Path) -> None:
    copy_companions(smollm2_path, tmp_path)
    (tmp_path / WEIGHTS).mkdir()
    manifest = {"format": 1, "dtype": "float32", "mesh": "tensor=1", "source_hash": "", "weights": {}}
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    assert (tmp_path / GGUF_FIELDS).stat().st_size < 1 << 22
    assert load_tokenizer(tmp_path).content_hash == load_tokenizer(smollm2_path).content_hash
    template, theirs = load_chat_template(tmp_path), load_chat_template(smollm2_path)
    assert template is not None and theirs is not None and template.content_hash == theirs.content_hash
    assert read_config(tmp_path) == read_config(smollm2_path)


def edit(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / MANIFEST
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def edit_weight(name: str, entry: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        values = json.loads((folder / MANIFEST).read_text())
        if entry is None:
            del values["weights"][name]
        else:
            values["weights"][name] = entry
        (folder / MANIFEST).write_text(json.dumps(values))

    return change


def data_file(folder: Path) -> Path:
    return max((folder / WEIGHTS).rglob("d/*"), key=lambda path: path.stat().st_size)


def truncate(folder: Path) -> None:
    path = data_file(folder)
    path.write_bytes(path.read_bytes()[:1000])


def flip(folder: Path) -> None:
    data = bytearray(data_file(folder).read_bytes())
    data[len(data) // 2] ^= 1
    data_file(folder).write_bytes(data)


NORM = {"dtype": "float32", "shape": [64], "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / MANIFEST).unlink(), "holds an Orbax checkpoint, but no headrace_checkpoint.json"),
        (lambda folder: shutil.rmtree(folder / WEIGHTS), "is not a directory, and headrace_checkpoint.json says"),
        (lambda folder: (folder / "config.json").unlink(), "config.json: missing"),
        (lambda folder: (folder / MANIFEST).write_text("{"), "not JSON"),
        (edit(format=2), "has format 2; this version reads 1; write it again with 'headrace checkpoint'"),
        (edit(dtype="int8"), "has dtype 'int8'; it must be float32 or bfloat16"),
        (edit(weights=[]), "weights as an object"),
        (edit_weight("final_norm_D", {"dtype": "float32"}), "weight 'final_norm_D' must have dtype, shape and sha256"),
        (edit_weight("final_norm_D", None), "lacks weight 'final_norm_D'"),
        (edit_weight("head_DV", NORM), "lists weight 'head_DV'"),
        (
            edit_weight("final_norm_D", NORM | {"shape": [65]}),
            "is float32 [65]; the configuration asks for float32 [64]",
        ),
        (edit_weight("final_norm_D", NORM), "weight 'final_norm_D' has another SHA-256"),
        (truncate, "cannot be restored ("),
        (flip, "weight '"),
        (lambda folder: shutil.rmtree(folder / WEIGHTS / "ocdbt.process_0"), "cannot be restored ("),
    ],
)
def test_damage_is_named(checkpoint: Path, tmp_path: Path, damage: Callable[[Path], object], reason: str) -> None:
    """On one device: of several parts of a weight Orbax leaves the others unread where one fails, with a warning."""
    folder = tmp_path / "damaged"
    shutil.copytree(checkpoint, folder)
    damage(folder)
    with pytest.raises(ModelFileError) as caught:
        load_placed(folder, backend_of("tensor=1"))
    assert reason in str(caught.value) and str(folder) in str(caught.value)


def test_a_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as writer:
        writer.save(tmp_path / "foreign", {"w": jax.numpy.ones(4)})
    for read in (read_config, load_tokenizer, load_model):
        with pytest.raises(ModelFileError, match=r"Orbax checkpoint, but no headrace_checkpoint\.json"):
            read(tmp_path / "foreign")


def test_a_checkpoint_is_not_read_to_the_host_or_written_again(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="a checkpoint, which goes to devices only; give the files it was made"):
        write(checkpoint, tmp_path / "again", "tensor=2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("mesh", "reason"),
    [
        ("tensor=3", "--mesh tensor=3: k_DY and v_DY: 2 key heads cannot be replicated over 3 parts"),
        ("data=2", "--mesh data=2: a checkpoint is cut over tensor and expert"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(source: Path, tmp_path: Path, mesh: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        write(source, tmp_path / "checkpoint", mesh)
    assert reason in str(caught.value) and list(tmp_path.iterdir()) == []


def test_a_directory_with_something_in_it_is_left_alone(source: Path, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="exists and is not an empty directory"):
        write(source, checkpoint, "tensor=2")
