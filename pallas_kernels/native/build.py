"""Compiles the CPU kernels with the system's compiler into a cache, or takes them from the installed package.

Sources named ``*.isa.cc`` are compiled once for each instruction set, with the macro ISA (see ``cpu_features.h``)
defined as its name, which is the namespace of what they define; other ``*.cc`` once, for the base architecture.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import platformdirs

from headrace.pallas_kernels.native import cache, instruction_sets
from headrace.pallas_kernels.native.compiler import BuildError, Compiler, find_compiler

ROOT = Path(__file__).resolve().parent.parent
PREBUILT = Path(__file__).resolve().parent / "prebuilt"
FOLDERS = ("native", "quant_matmul/cpu", "paged_attention/cpu", "sample/cpu")
MACROS = "HEADRACE"
FLAGS = (
    "-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off", "-Wall", "-Wextra",
)  # fmt: skip
"""Without contraction a product and a sum round as they are written, whatever loop the compiler puts them in: kernels
that must give the same bits for one row and for many say fmadd where they mean it."""
LINK_FLAGS = ("-shared", "-pthread") + (("-Wl,-z,defs",) if sys.platform == "linux" else ())
PORTABLE_LINK_FLAGS = ("-static-libstdc++", "-static-libgcc") if sys.platform == "linux" else ()

Progress = Callable[[int, int, str], None]
"""(files done, files in all, name of one that is being compiled)."""


def no_progress(done: int, total: int, name: str) -> None:
    """The progress callback of somebody who does not look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of the compiler. flags: those of the instruction set, and its macros; none for the base architecture."""

    source: Path
    isa: str | None
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        source = self.source.name
        return source if self.isa is None else f"{source} for {self.isa}"

    @property
    def object_name(self) -> str:
        return "-".join((*self.source.parts[-3:], self.isa or "base")) + ".o"


def default_cache() -> Path:
    """``~/.cache/headrace/native`` on Linux, or below XDG_CACHE_HOME; the platform's own place elsewhere.

    Raises: BuildError: the user has no home directory.
    """
    try:
        place = platformdirs.user_cache_path("headrace")
    except RuntimeError:  # there is neither HOME nor an entry of the user
        place = Path("~")
    if not place.is_absolute():  # what other versions of platformdirs make of it
        raise BuildError("this user has no home directory for compiled CPU kernels: set HOME or XDG_CACHE_HOME")
    return place / "native"


def sources(root: Path = ROOT) -> list[Path]:
    """All C++ files of FOLDERS."""
    return sorted(path for folder in FOLDERS for path in (root / folder).glob("*.cc"))


def jobs(isas: Sequence[str], root: Path = ROOT) -> list[Job]:
    """What is compiled for these instruction sets, the longest sources first."""
    available = tuple(f"-D{MACROS}_HAS_{isa.upper()}=1" for isa in isas)
    flags = instruction_sets.FLAGS[instruction_sets.architecture()]
    found = []
    for source in sorted(sources(root), key=lambda path: path.stat().st_size, reverse=True):
        if not source.name.endswith(".isa.cc"):
            found.append(Job(source=source, isa=None, flags=available))
            continue
        for isa in isas:
            macros = (f"-D{MACROS}_ISA={isa}", f"-D{MACROS}_ISA_{isa.upper()}=1")
            found.append(Job(source=source, isa=isa, flags=(*flags[isa], *macros, *available)))
    return found


def source_digest(root: Path = ROOT) -> str:
    """SHA-256 of all sources and headers, and of the FFI headers of the installed jaxlib."""
    digest = hashlib.sha256()
    ours = (path for folder in FOLDERS for path in (root / folder).glob("*") if path.suffix in (".cc", ".h"))
    include = Path(jax.ffi.include_dir())
    for base, paths in ((root, sorted(ours)), (include, sorted((include / "xla" / "ffi" / "api").glob("*.h")))):
        for path in paths:
            content = path.read_bytes()
            digest.update(f"{path.relative_to(base).as_posix()}\n{len(content)}\n".encode() + content)
    return digest.hexdigest()


def describe(isas: Sequence[str], compiler: Compiler, root: Path = ROOT, link: Sequence[str] = ()) -> dict[str, Any]:
    """All that the result depends on; what a key is made of and a record begins with."""
    return {
        "sources": source_digest(root),
        "architecture": instruction_sets.architecture(),
        "system": sys.platform,
        "isas": {isa: list(instruction_sets.FLAGS[instruction_sets.architecture()][isa]) for isa in isas},
        "flags": [*FLAGS, *LINK_FLAGS, *link],
        "compiler": compiler.path,
        "compiler_version": compiler.version,
    }


def key_of(description: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:20]


def built(
    directory: Path | None = None,
    *,
    progress: Progress = no_progress,
    search_path: str | None = None,
    root: Path = ROOT,
    prebuilt: Path = PREBUILT,
    isas: tuple[str, ...] | None = None,
) -> cache.Version:
    """The library for this machine: the package's own if it has one of these sources, else the cache's, compiled where
    the cache has none.

    directory: the cache; default_cache() by default. search_path: where the compiler is, by default PATH.
    root: folder that FOLDERS are in. prebuilt: folder of the package's own library. isas: compile for these; by default
    for those of this machine.
    Raises BuildError: no kernels for this CPU, no compiler, or it failed; an unsafe cache.
    """
    isas = isas or _local_isas()
    if (version := _prebuilt(prebuilt, root)) is not None:
        return version
    compiler = find_compiler(search_path)
    description = describe(isas, compiler, root)
    directory = (directory or default_cache()).absolute()
    key = key_of(description)
    try:
        version = cache.find(directory, key)
    except OSError as error:
        raise BuildError(
            f"the cache {directory} cannot be read: {error.strerror or error}; give {cache.OTHER}"
        ) from error
    if version is not None:
        return version
    work = jobs(isas, root)
    return cache.make(
        directory,
        key,
        lambda folder: description | _compile(compiler, work, folder, root, (), progress),
        lambda: progress(0, len(work) + 1, "waiting for another process that compiles"),
    )


def build_into(folder: Path, *, progress: Progress = no_progress, root: Path = ROOT) -> cache.Version:
    """Compile for all instruction sets of the architecture, without the compiler's own libraries, for a wheel.

    folder: gets the library and its record. Raises BuildError.
    """
    isas = instruction_sets.of_architecture(instruction_sets.architecture())
    if not isas:
        raise BuildError(_no_kernels())
    compiler = find_compiler()
    folder.mkdir(parents=True, exist_ok=True)
    record = describe(isas, compiler, root, PORTABLE_LINK_FLAGS)
    record |= _compile(compiler, jobs(isas, root), folder, root, PORTABLE_LINK_FLAGS, progress)
    cache.write_record(folder, record)
    version = cache.verified(folder, must_be_ours=False)
    assert version is not None
    return version


def _prebuilt(folder: Path, root: Path) -> cache.Version | None:
    if not (folder / cache.LIBRARY).exists():
        return None
    version = cache.verified(folder, must_be_ours=False)
    if version is None:
        return None
    here = {"sources": source_digest(root), "architecture": instruction_sets.architecture(), "system": sys.platform}
    different = [name for name, value in here.items() if version.record.get(name) != value]
    if different:
        cache.log.warning("the CPU kernels in %s are of other %s and are not used", folder, ", ".join(different))
        return None
    return version


def _local_isas() -> tuple[str, ...]:
    isas = instruction_sets.of_this_machine()
    if not isas:
        raise BuildError(_no_kernels())
    return isas


def _no_kernels() -> str:
    name = instruction_sets.architecture()
    needs = {"x86_64": "this CPU has no AVX2 (with FMA and F16C)", "aarch64": "this CPU has no dot products (dotprod)"}
    why = needs.get(name, f"there are no CPU kernels for {name}, only for x86_64 and aarch64")
    return f"{why}; choose XLA alone"


def _compile(
    compiler: Compiler, work: list[Job], folder: Path, root: Path, link: tuple[str, ...], progress: Progress
) -> dict[str, Any]:
    """Compile and link into folder, as many files at once as this process has cores. Returns seconds and warnings."""
    start_s = time.monotonic()
    include = ("-I", str(root), "-isystem", jax.ffi.include_dir())
    total = len(work) + 1
    objects = [folder / job.object_name for job in work]
    waiting = [job.name for job in work]
    warnings = []
    progress(0, total, waiting[0])
    with ThreadPoolExecutor(min(len(work), _cores())) as pool:
        running = {
            pool.submit(
                compiler.run, (*FLAGS, *job.flags, *include, "-c", str(job.source), "-o", str(made)), job.name
            ): job.name
            for job, made in zip(work, objects, strict=True)
        }
        try:
            for done, future in enumerate(as_completed(running), 1):
                warnings += future.result().splitlines()
                waiting.remove(running[future])
                progress(done, total, waiting[0] if waiting else cache.LIBRARY)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    target = folder / cache.LIBRARY
    warnings += compiler.run((*map(str, objects), *LINK_FLAGS, *link, "-o", str(target)), cache.LIBRARY).splitlines()
    for made in objects:
        made.unlink()
    progress(total, total, cache.LIBRARY)
    return {"seconds": round(time.monotonic() - start_s, 2), "warnings": warnings[:200]}


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
