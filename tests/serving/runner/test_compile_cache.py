"""Each start is a process of its own: JAX reads its cache settings once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from headrace.serving.runner.compile_cache import CompileLog
from headrace.serving.runner.warmup import Program, compile_programs

START = """
import json, logging, sys
logging.basicConfig(level=logging.WARNING)
import jax, jax.numpy as jnp
from headrace.serving.runner.compile_cache import CompileLog, use_compile_cache
from headrace.serving.runner.warmup import Program, compile_programs
path = use_compile_cache(sys.argv[1] if len(sys.argv) > 1 else None)
x = jax.ShapeDtypeStruct((4,), jnp.float32)
programs = {"a": Program(function=lambda x: jnp.sin(x) * 2, donated=(), arguments=(x,)),
            "b": Program(function=lambda x: jnp.cumsum(x), donated=(0,), arguments=(x,))}
built, ledger = compile_programs(programs, None, CompileLog(), lambda *_: None)
out = [float(built[name](jnp.ones(4)).sum()) for name in programs]
print(json.dumps({"path": path and str(path), "from_cache": [p.from_cache for p in ledger], "out": out}))
"""
OUT = pytest.approx([6.7317679, 10.0])


def start(*arguments: str) -> tuple[dict, str]:
    done = subprocess.run(
        [sys.executable, "-P", "-c", START, *arguments], capture_output=True, text=True, timeout=120, check=True
    )
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_a_second_start_takes_everything_from_the_cache(tmp_path: Path) -> None:
    first, _ = start(str(tmp_path))
    second, _ = start(str(tmp_path))
    assert (first["from_cache"], second["from_cache"]) == ([False, False], [True, True])
    assert first["out"] == second["out"] == OUT
    assert Path(first["path"]).parent == tmp_path and f"jax-{jax.__version__}-" in first["path"]


@pytest.mark.parametrize("damage", ["truncated", "empty", "garbage"])
def test_a_damaged_cache_costs_a_compilation(tmp_path: Path, damage: str) -> None:
    start(str(tmp_path))
    entries = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert entries
    for path in entries:
        body = path.read_bytes()
        path.write_bytes({"truncated": body[: len(body) // 2], "empty": b"", "garbage": os.urandom(200)}[damage])
    again, _ = start(str(tmp_path))
    assert again["from_cache"] == [False, False] and again["out"] == OUT


def test_a_directory_that_cannot_be_made_costs_a_warning(tmp_path: Path) -> None:
    """A file in its place; a directory without permission reads the same, but not as root."""
    (tmp_path / "file").write_text("")
    result, log = start(str(tmp_path / "file"))
    assert result == {"path": None, "from_cache": [False, False], "out": OUT}
    assert "compiled programs are not kept" in log and str(tmp_path / "file") in log


def test_without_a_directory_nothing_is_kept(tmp_path: Path) -> None:
    result, log = start()
    assert result["path"] is None and "not kept" not in log


def test_progress_and_order_of_the_ledger() -> None:
    log = CompileLog()
    seen: list[tuple[str, int, int]] = []
    x = jax.ShapeDtypeStruct((3,), jnp.float32)
    programs = {name: Program(function=lambda x: x + 1, donated=(), arguments=(x,)) for name in "cab"}
    built, ledger = compile_programs(programs, None, log, lambda *progress: seen.append(progress))
    log.close()
    assert list(built) == [program.name for program in ledger] == ["c", "a", "b"]
    assert [(done, total) for _, done, total in seen] == [(1, 3), (2, 3), (3, 3)]
    with pytest.raises(TypeError, match="different|compiled"):
        built["a"](jnp.ones(4))


def test_an_error_in_one_program_is_raised() -> None:
    log = CompileLog()
    x = jax.ShapeDtypeStruct((3,), jnp.float32)
    programs = {"bad": Program(function=lambda x: x.reshape(2, 2), donated=(), arguments=(x,))}
    with pytest.raises(TypeError, match="reshape"):
        compile_programs(programs, None, log, lambda *_: None)
    log.close()


def test_only_compilations_after_ready_count() -> None:
    log = CompileLog()
    jax.jit(lambda x: x * 3)(jnp.ones(7))
    log.mark_ready()
    assert log.after_ready == ()

    def late(x: jax.Array) -> jax.Array:
        return x * 5

    x = jnp.asarray([1.0])
    before = len(log.after_ready)
    jax.jit(late)(x)
    assert [name for name in log.after_ready[before:] if "late" in name]
    log.close()
    count = len(log.after_ready)
    jax.jit(lambda x: x * 7)(x)
    assert len(log.after_ready) == count
