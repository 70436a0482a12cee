"""Builds kernel sources with a driver and a sanitizer, and runs the driver: for C++ tests without Python or XLA."""

import functools
import os
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest

from headrace.pallas_kernels.native import build, instruction_sets
from headrace.pallas_kernels.native.compiler import BuildError, Compiler, find_compiler

HERE = Path(__file__).resolve().parent
FLAGS = ("-O1", "-g", "-std=c++17", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", "-ffp-contract=off", "-pthread")
THREAD = "thread"
ADDRESS = "address,undefined"
RUN_LIMIT_S = 240.0


def run_driver(
    driver: str,
    sanitizer: str,
    *,
    folders: Sequence[str] = (),
    sources: Sequence[str] = (),
    arguments: Sequence[str] = (),
    isas: Sequence[str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run tests/pallas_kernels/native/DRIVER, compiled together with sources under pallas_kernels/.

    sanitizer: THREAD or ADDRESS. folders: of FOLDERS, all of whose sources are taken. sources: single ones, such as
    "native/team.cc". ``*.isa.cc`` are compiled for each of isas, by default those of this machine; the driver gets the
    macros HEADRACE_HAS_*. Skips the test where the compiler or the sanitizer's runtime is missing.
    """
    compiler = require(sanitizer)
    isas = instruction_sets.of_this_machine() if isas is None else isas
    wanted = [
        job
        for job in build.jobs(isas)
        if job.source.parent.relative_to(build.ROOT).as_posix() in folders
        or job.source.relative_to(build.ROOT).as_posix() in sources
    ]
    has = tuple(f"-D{build.MACROS}_HAS_{isa.upper()}=1" for isa in isas)
    wanted.append(build.Job(source=HERE / driver, isa=None, flags=has))
    include = ("-I", str(build.ROOT), "-I", str(HERE), "-isystem", jax.ffi.include_dir())
    with tempfile.TemporaryDirectory() as work:
        objects = [str(Path(work) / job.object_name) for job in wanted]

        def compile_one(place: int) -> None:
            job = wanted[place]
            flags = (*FLAGS, f"-fsanitize={sanitizer}", *job.flags, *include)
            compiler.run((*flags, "-c", str(job.source), "-o", objects[place]), job.name)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(compile_one, range(len(wanted))))
        program = str(Path(work) / "driver")
        compiler.run((*objects, f"-fsanitize={sanitizer}", "-pthread", "-o", program), driver)
        return _run([program, *arguments])


def require(sanitizer: str) -> Compiler:
    """The compiler; skips the test where it cannot build and run a program with this sanitizer."""
    try:
        compiler = find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    why = _trouble(compiler, sanitizer)
    if why is not None:
        pytest.skip(f"no -fsanitize={sanitizer} here: {why}")
    return compiler


@functools.cache
def _trouble(compiler: Compiler, sanitizer: str) -> str | None:
    """Why a program that does nothing cannot be built or run with the sanitizer."""
    with tempfile.TemporaryDirectory() as work:
        source = Path(work) / "nothing.cc"
        source.write_text("int main() { return 0; }\n")
        program = str(Path(work) / "nothing")
        try:
            compiler.run((f"-fsanitize={sanitizer}", str(source), "-o", program), source.name)
        except BuildError as error:
            return str(error)
        done = _run([program])
        return None if done.returncode == 0 else done.stderr[:300]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Raises subprocess.TimeoutExpired: it hangs."""
    options = {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    return subprocess.run(
        command, env=os.environ | options, capture_output=True, text=True, errors="replace", timeout=RUN_LIMIT_S
    )
