"""What is compiled, by what, under which key, and what is said where it cannot be."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.pallas_kernels.native import build, cache, instruction_sets
from headrace.pallas_kernels.native.compiler import BuildError, Compiler, find_compiler
from tests.pallas_kernels.native.small_library import SOURCE, make_compiler, make_root

COMPILER = Compiler(path="/usr/bin/c++", version="c++ 12.2.0, x86_64-linux-gnu")


def cpuinfo(folder: Path, features: str) -> Path:
    path = folder / "cpuinfo"
    path.write_text("processor\t: 0\nflags\t\t: fpu sse2 " + features + "\n\nprocessor\t: 1\n")
    return path


def test_without_a_compiler_the_error_names_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(
        BuildError, match=r"no C\+\+ compiler: none of c\+\+, g\+\+, clang\+\+ is in PATH.*install g\+\+"
    ):
        build.built(tmp_path / "cache", search_path="", root=make_root(tmp_path), prebuilt=tmp_path / "none")
    assert not (tmp_path / "cache").exists()


def test_the_command_without_a_compiler_fails_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headrace.pallas_kernels.native", "--cache", str(tmp_path / "cache")],
        env=os.environ | {"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("Error: no C++ compiler")
    assert "Traceback" not in done.stderr


def test_a_failing_compiler_is_quoted_and_leaves_nothing(tmp_path: Path) -> None:
    root = make_root(tmp_path, SOURCE + "int Broken() { return undeclared_name; }\n")
    with pytest.raises(BuildError, match=r"failed on answer.cc with exit code 1; g\+\+ 9 or .*(?s:.*)undeclared_name"):
        build.built(tmp_path / "cache", root=root, prebuilt=tmp_path / "none")
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("echo 'cannot execute cc1plus: no such file' >&2; exit 1", "cannot execute cc1plus"),
        ("exit 3", "exit code 3.*said nothing"),
    ],
)
def test_a_compiler_that_cannot_even_tell_its_version(tmp_path: Path, body: str, said: str) -> None:
    with pytest.raises(BuildError, match=f"(?s){said}"):
        find_compiler(make_compiler(tmp_path, body))


def test_the_first_compiler_of_the_list_is_taken(tmp_path: Path) -> None:
    folder = make_compiler(tmp_path, "echo clang version 17", "clang++")
    assert find_compiler(folder).version == "clang version 17, clang version 17"
    make_compiler(tmp_path, "echo g++ 9", "g++")
    assert find_compiler(folder).path.endswith("/g++")


def test_the_key_changes_with_everything_that_the_library_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_root(tmp_path)

    def key(isas: tuple[str, ...] = ("avx2",), compiler: Compiler = COMPILER) -> str:
        monkeypatch.setattr(instruction_sets, "architecture", lambda: "x86_64")
        return build.key_of(build.describe(isas, compiler, root))

    keys = [key(), key(isas=("avx2", "avx512")), key(compiler=replace(COMPILER, version="c++ 13, x86_64-linux-gnu"))]
    assert key() == keys[0]
    for name in ("answer.cc", "answer.h", "each.isa.cc"):
        path = root / "native" / name
        path.write_text(path.read_text() + "// changed\n")
        keys.append(key())
    (root / "native" / "more.h").write_text("")
    keys.append(key())
    (root / "native" / "more.h").rename(root / "native" / "other.h")
    keys.append(key())
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    keys.append(key())
    include = tmp_path / "include"
    (include / "xla" / "ffi" / "api").mkdir(parents=True)
    (include / "xla" / "ffi" / "api" / "c_api.h").write_text("#define XLA_FFI_API_MINOR 99\n")
    monkeypatch.setattr(build.jax.ffi, "include_dir", lambda: str(include))
    keys.append(key())
    assert len(set(keys)) == len(keys)


def test_instruction_sets_are_those_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instruction_sets, "architecture", lambda: "x86_64")
    monkeypatch.setattr(sys, "platform", "linux")
    of = instruction_sets.of_this_machine
    full = "avx512f avx512bw avx512dq avx512vl avx512_vnni"
    assert of(cpuinfo(tmp_path, "avx")) == ()
    assert of(cpuinfo(tmp_path, "avx2 fma")) == ()
    assert of(cpuinfo(tmp_path, "avx2 fma f16c avx512f")) == ("avx2",)
    assert of(cpuinfo(tmp_path, f"avx2 fma f16c {full}")) == ("avx2", "avx512")
    assert of(tmp_path / "not there") == ("avx2", "avx512")
    monkeypatch.setattr(instruction_sets, "architecture", lambda: "aarch64")
    path = tmp_path / "arm"
    path.write_text("processor: 0\nFeatures\t: fp asimd asimdhp asimddp\n")
    assert of(path) == ("neon",)
    path.write_text("processor: 0\nFeatures\t: fp asimd\n")
    assert of(path) == ()
    monkeypatch.setattr(instruction_sets, "architecture", lambda: "riscv64")
    assert of(path) == ()


@pytest.mark.parametrize(
    ("name", "said"),
    [("x86_64", "this CPU has no AVX2"), ("aarch64", "no dot products"), ("riscv64", "no CPU kernels for riscv64")],
)
def test_a_cpu_without_kernels_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
    monkeypatch.setattr(instruction_sets, "of_this_machine", tuple)
    monkeypatch.setattr(instruction_sets, "architecture", lambda: name)
    with pytest.raises(BuildError, match=f"{said}.*choose XLA alone"):
        build.built(tmp_path / "cache", root=make_root(tmp_path))


def test_progress_counts_every_file_and_the_link(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    version = build.built(
        tmp_path / "cache", root=make_root(tmp_path), prebuilt=tmp_path / "none",
        progress=lambda done, total, name: seen.append((done, total, name)),
    )  # fmt: skip
    total = 2 + len(version.record["isas"])
    assert [(done, of) for done, of, _ in seen] == [(done, total) for done in range(total + 1)]
    assert all(name for _, _, name in seen)
    assert seen[-1][2] == cache.LIBRARY


def test_a_package_with_a_library_needs_no_compiler(tmp_path: Path) -> None:
    root = make_root(tmp_path)
    made = build.build_into(tmp_path / "prebuilt", root=root)
    assert set(made.record["isas"]) == set(instruction_sets.of_architecture(instruction_sets.architecture()))
    found = build.built(tmp_path / "cache", search_path="", root=root, prebuilt=tmp_path / "prebuilt")
    assert found.path == tmp_path / "prebuilt" / cache.LIBRARY
    assert not (tmp_path / "cache").exists()
    (root / "native" / "answer.cc").write_text(SOURCE.replace("42", "43"))
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        build.built(tmp_path / "cache", search_path="", root=root, prebuilt=tmp_path / "prebuilt")
