"""The loaded library: its instruction sets, its probes, its symbols, and calls from many places at once."""

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.pallas_kernels.native import build, instruction_sets
from headrace.pallas_kernels.native.compiler import BuildError, find_compiler
from headrace.pallas_kernels.native.library import TARGETS, Library, load
from headrace.pallas_kernels.native.probes import nop, stream
from scripts.check_native import stress

LOCAL = instruction_sets.of_this_machine()
STRESS_RUNS = 150


@pytest.fixture(scope="module")
def library() -> Library:
    try:
        return load()
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(params=LOCAL)
def isa(library: Library, request: pytest.FixtureRequest):
    yield load(isa=request.param).isa
    load(isa=library.isa)


def test_the_best_instruction_set_runs_and_a_lower_one_can_be_forced(library: Library) -> None:
    assert library.isa == LOCAL[-1]
    for name in LOCAL:
        assert load(isa=name).isa == name
        assert load().isa == name
    with pytest.raises(BuildError, match="no kernels for 'sse9'"):
        load(isa="sse9")
    assert load(isa=library.isa) == library


def test_the_sources_compile_without_a_warning(library: Library) -> None:
    assert library.record["warnings"] == []


@pytest.mark.parametrize("num_words", [1, 31, 32, 33, 2**17 - 1, 2**17, 2**17 + 1, 3 * 2**17 + 5])
def test_a_stream_reads_every_word(isa: str, num_words: int) -> None:
    words = np.random.default_rng(num_words).integers(0, 2**64, num_words, dtype=np.uint64)
    halves = words.view(np.uint32)
    second = halves[: 2 * (num_words // 2)] * 3
    expected = np.bitwise_xor.reduce(words) ^ np.bitwise_xor.reduce(second.view(np.uint64), initial=0)
    found = np.asarray(jax.jit(stream)(jnp.asarray(halves), jnp.asarray(second)))
    assert found.view(np.uint64)[0] == expected


def test_a_stream_of_an_odd_number_of_bytes_is_refused(library: Library) -> None:
    with pytest.raises(Exception, match="no multiple of 8"):
        jax.jit(stream)(jnp.ones(7, jnp.int8)).block_until_ready()


@pytest.mark.parametrize(("size", "num_items"), [(1, 1), (10, 3), (3, 10), (1000, 64), (1000, 100_000)])
def test_items_cover_everything(library: Library, size: int, num_items: int) -> None:
    x = jnp.arange(size, dtype=jnp.int32)
    y, threads = jax.jit(lambda x: nop(x, num_items))(x)
    assert np.array_equal(y, np.arange(size) + 1)
    assert int(threads[0]) >= 1


def test_programs_in_many_threads_at_once(library: Library) -> None:
    def call(seed: int) -> None:
        run = jax.jit(lambda x: [nop(x + i, 1 + (i * seed) % 17)[0] for i in range(16)])
        x = jnp.arange(300, dtype=jnp.int32)
        for _ in range(20):
            for i, y in enumerate(run(x)):
                assert np.array_equal(y, np.arange(300) + i + 1)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(call, range(12)))


def test_64_independent_calls_on_two_threads_do_not_hang(library: Library) -> None:
    found = stress(STRESS_RUNS, 2, 120.0)
    assert "failure" not in found, found
    assert found["wrong_values"] == 0


def test_only_handlers_and_the_choice_of_an_instruction_set_are_seen_from_outside(library: Library) -> None:
    defined = _symbols(library.path, "-D")
    assert {name for kind, name in defined if kind == "T"} == {*TARGETS, "HeadraceIsa", "HeadraceUseIsa"}


@pytest.mark.parametrize("name", LOCAL)
def test_code_of_an_instruction_set_stays_in_its_namespace(library: Library, name: str, tmp_path: Path) -> None:
    """A function that the linker merges with others of its name (an inline one, a template's) would run with AVX-512
    in it where the base architecture is meant."""
    compiler = find_compiler()
    include = ("-I", str(build.ROOT), "-isystem", jax.ffi.include_dir())
    found = {}
    for job in build.jobs([name]):
        if job.isa is not None:
            made = tmp_path / job.object_name
            flags = [flag for flag in build.FLAGS if not flag.startswith("-W")]
            compiler.run((*flags, *job.flags, *include, "-c", str(job.source), "-o", str(made)), job.name)
            merged = [symbol for kind, symbol in _symbols(made) if kind in "WVu" and f"::{name}::" not in symbol]
            if merged:
                found[job.source.name] = merged
    assert not found


def _symbols(path: Path, *options: str) -> list[tuple[str, str]]:
    """(kind, demangled name) of what a file defines."""
    program = shutil.which("nm")
    if program is None:
        pytest.skip("nm is not installed")
    text = subprocess.run(
        [program, "-C", "--defined-only", *options, str(path)], capture_output=True, text=True, check=True
    ).stdout
    return re.findall(r"(?m)^[0-9a-f]+ (\w) (.+)$", text)


def test_a_machine_with_the_lowest_instruction_set_alone_can_link(tmp_path: Path, library: Library) -> None:
    """Tables of instruction sets that are not compiled must not be referred to."""
    lowest = LOCAL[:1]
    version = build.built(tmp_path / "cache", prebuilt=tmp_path / "none", isas=lowest)
    assert list(version.record["isas"]) == list(lowest)
