"""Compile every program before serving, a few at a time, and account for it."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax

from headrace.serving.engine.ports import CompiledProgram, Progress
from headrace.serving.runner.compile_cache import CompileLog

MAX_THREADS = 4
"""XLA compiles one program with few threads; tracing holds the interpreter lock, so more would wait for it."""


def on_device(device: jax.Device | None) -> AbstractContextManager[object]:
    """What is made or compiled inside goes to a device; None = JAX's default."""
    return nullcontext() if device is None else jax.default_device(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """function: to be jitted. donated: argument numbers. arguments: shapes, types and places."""

    function: Callable[..., Any]
    donated: tuple[int, ...]
    arguments: tuple[Any, ...]
    keep_unused: bool = False

    def compile(
        self, device: jax.Device | None, compiler_options: Mapping[str, bool | int] | None = None
    ) -> jax.stages.Compiled:
        """For a device; None = JAX's default."""
        with on_device(device):  # a setting of the thread, so it is made in the one that compiles
            jitted = jax.jit(self.function, donate_argnums=self.donated, keep_unused=self.keep_unused)
            return jitted.lower(*self.arguments).compile(compiler_options=dict(compiler_options or {}) or None)


def compile_programs(
    programs: Mapping[str, Program],
    device: jax.Device | None,
    compile_log: CompileLog,
    progress: Progress,
    compiler_options: Mapping[str, bool | int] | None = None,
) -> tuple[dict[str, jax.stages.Compiled], tuple[CompiledProgram, ...]]:
    """Compile all; the result holds executables by name and the ledger, both in the order of ``programs``.

    An executable refuses arguments of other shapes instead of compiling again. device: None = JAX's default.
    compiler_options: XLA's own, by the names of its flags.
    """
    lock = threading.Lock()
    done = 0

    def build(name: str) -> tuple[jax.stages.Compiled, CompiledProgram]:
        program = programs[name]
        hits, started_s = compile_log.cache_hits(), time.monotonic()
        compiled = program.compile(device, compiler_options)
        analysis = compiled.memory_analysis()
        entry = CompiledProgram(
            name=name,
            seconds=time.monotonic() - started_s,
            temp_bytes=0 if analysis is None else int(analysis.temp_size_in_bytes),
            from_cache=compile_log.cache_hits() > hits,
        )
        nonlocal done
        with lock:
            done += 1
            progress(f"compiling {name}", done, len(programs))
        return compiled, entry

    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="compile") as pool:
        futures = {name: pool.submit(build, name) for name in programs}
        for future in as_completed(futures.values()):
            future.result()
    built = {name: future.result() for name, future in futures.items()}
    return {name: compiled for name, (compiled, _) in built.items()}, tuple(entry for _, entry in built.values())
