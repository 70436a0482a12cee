"""Meshes as flags and files give them."""

from pathlib import Path

import pytest

from headrace.sharding.errors import MeshError
from headrace.sharding.mesh_shape import MeshShape, parse_mesh


def test_a_flag_names_axes_in_any_order() -> None:
    assert parse_mesh("tensor=8,data=2") == parse_mesh(" data=2 , tensor=8") == MeshShape(data=2, tensor=8)
    assert MeshShape(data=2, tensor=8).num_devices == 16
    assert str(MeshShape(data=2, tensor=8)) == "data=2,tensor=8" and str(MeshShape()) == "tensor=1"
    for shape in (MeshShape(), MeshShape(stage=2, tensor=3), MeshShape(expert=4)):
        assert parse_mesh(str(shape)) == shape


def test_a_file_has_a_table(tmp_path: Path) -> None:
    path = tmp_path / "pod.toml"
    path.write_text("[mesh]\ntensor = 4\nexpert = 2\n")
    assert parse_mesh(str(path)) == MeshShape(tensor=4, expert=2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tensor", "'tensor' is not AXIS=NUMBER"),
        ("tensor=", "'tensor=' is not AXIS=NUMBER"),
        ("tensor=two", "'tensor=two' is not AXIS=NUMBER"),
        ("tensor=-1", "'tensor=-1' is not"),
        ("tensor=٣", "is not AXIS=NUMBER"),
        ("", "'' is not AXIS=NUMBER"),
        ("tensor=2,tensor=2", "gives tensor twice"),
        ("model=2", "axis 'model' is not known; axes are data, stage, expert, tensor"),
        ("tensor=0", "axis tensor is 0; it must be a whole number from 1 to 256"),
        ("tensor=257", "axis tensor is 257"),
        ("tensor=16,data=32", "has 512 devices; 256 are the most"),
    ],
)
def test_a_flag_that_is_no_mesh_is_refused(text: str, words: str) -> None:
    with pytest.raises(MeshError, match=words):
        parse_mesh(text)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has no table .mesh."),
        ("mesh = 3", "has no table .mesh."),
        ("[mesh]\ntensor = 2.5", "axis tensor is 2.5"),
        ("[mesh]\ntensor = true", "axis tensor is True"),
        ("[mesh]\ntensors = 2", "axis 'tensors' is not known"),
        ("[mesh", "mesh file"),
    ],
)
def test_a_file_that_is_no_mesh_is_refused(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "pod.toml"
    path.write_text(content)
    with pytest.raises(MeshError, match=words):
        parse_mesh(str(path))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MeshError, match="no.toml: .*No such file"):
        parse_mesh(str(tmp_path / "no.toml"))
