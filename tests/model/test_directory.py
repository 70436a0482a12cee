"""No name and no link leads out of a model directory."""

import os
from pathlib import Path

import pytest

from headrace.model import directory as module
from headrace.model.directory import ModelDirectory
from headrace.model.errors import ModelFileError


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    path = tmp_path / "outside.json"
    path.write_text('{"secret": 1}')
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    return path


@pytest.mark.parametrize(
    "name", ["../outside.json", "/etc/passwd", "a/b", "..", ".", "", ".hidden", "a\0b", "a\nb", "a\\b", "x" * 256, "~"]
)
def test_names_that_are_not_plain_are_refused(model: Path, outside: Path, name: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        ModelDirectory(model).file(name, named_by=model / "index.json")
    assert caught.value.path == str(model / "index.json") and "not a plain file name" in caught.value.reason


def test_links_out_of_the_directory_are_refused(model: Path, outside: Path) -> None:
    (model / "config.json").symlink_to(outside)
    (model / "step.json").symlink_to("config.json")
    for name in ("config.json", "step.json"):
        with pytest.raises(ModelFileError, match=rf"{name}: a link that leads out of the model directory"):
            ModelDirectory(model).read_json(name)


def test_links_inside_the_directory_are_followed(model: Path) -> None:
    (model / "real.json").write_text('{"a": 1}')
    (model / "config.json").symlink_to("real.json")
    assert ModelDirectory(model).read_json("config.json") == {"a": 1}


def hub_snapshot(root: Path) -> tuple[Path, Path]:
    blobs, snapshot = root / "models--org--name" / "blobs", root / "models--org--name" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    return blobs, snapshot


def test_a_hub_snapshot_reads_its_own_blobs_and_nothing_else(tmp_path: Path, outside: Path) -> None:
    blobs, snapshot = hub_snapshot(tmp_path)
    (blobs / "sha").write_text('{"a": 1}')
    (snapshot / "config.json").symlink_to("../../blobs/sha")
    assert ModelDirectory(snapshot).read_json("config.json") == {"a": 1}
    (snapshot / "other.json").symlink_to(outside)
    (blobs / "chained").symlink_to(outside)
    (snapshot / "chained.json").symlink_to("../../blobs/chained")
    other, _ = hub_snapshot(tmp_path / "second")
    (other / "sha").write_text("{}")
    (snapshot / "neighbour.json").symlink_to(other / "sha")
    for name in ("other.json", "chained.json", "neighbour.json"):
        with pytest.raises(ModelFileError, match="leads out of the model directory"):
            ModelDirectory(snapshot).read_json(name)


def test_what_is_not_a_regular_file_is_refused(model: Path) -> None:
    os.mkfifo(model / "pipe")
    (model / "folder").mkdir()
    (model / "dangling").symlink_to("nowhere")
    (model / "loop").symlink_to("loop")
    for name, reason in [("pipe", "regular"), ("folder", "regular"), ("dangling", "missing"), ("loop", "missing")]:
        with pytest.raises(ModelFileError, match=reason):
            ModelDirectory(model).file(name)


def test_json_has_a_length_limit(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_JSON_BYTES", 10)
    (model / "a.json").write_text('{"a": 123}')
    assert ModelDirectory(model).read_json("a.json") == {"a": 123}
    (model / "a.json").write_text('{"a": 1234}')
    with pytest.raises(ModelFileError, match="longer than 10 bytes"):
        ModelDirectory(model).read_json("a.json")


def test_a_file_is_not_a_directory(outside: Path) -> None:
    with pytest.raises(ModelFileError, match="not a directory"):
        ModelDirectory(outside)
