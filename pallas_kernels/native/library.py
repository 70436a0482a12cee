"""The shared library of CPU kernels: compiled on first use, loaded, and registered with XLA."""

import ctypes
import functools
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from headrace.pallas_kernels.native.build import Progress, built, no_progress
from headrace.pallas_kernels.native.cache import OTHER
from headrace.pallas_kernels.native.compiler import BuildError

PLATFORM = "cpu"
TARGETS: tuple[str, ...] = (
    "HeadraceBestColumn",
    "HeadraceColumns",
    "HeadraceDraw",
    "HeadraceFusedMatmul",
    "HeadraceNop",
    "HeadraceRotaryAttention",
    "HeadraceStream",
)
"""Symbols of FFI handlers; each is registered under its own name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """What this process runs. isa: name of the instruction set. record: how the library was compiled."""

    path: Path
    isa: str
    record: dict[str, Any]


class _Process:
    """The one library of a process: the loader and XLA's registry keep it until the process ends."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.handle: ctypes.CDLL | None = None
        self.path: Path | None = None
        self.record: dict[str, Any] = {}


@functools.cache
def _process() -> _Process:
    return _Process()


def load(*, cache: Path | None = None, isa: str | None = None, progress: Progress | None = None) -> Library:
    """Compile the library where need be, load it, and register its handlers; once in each process, from any thread.

    cache: directory of compiled versions, by default the user's; it counts where the library is not loaded yet.
    isa: run this instruction set from now on, in all programs of the process; None = leave it, at first the best.
    progress: called as files are compiled.
    Raises BuildError: there is no compiler, or it failed; an unsafe cache; the CPU has none of the instruction sets, or
      not the one that is asked for.
    """
    process = _process()
    with process.lock:
        if process.handle is None:
            version = built(cache, progress=progress or no_progress)
            process.handle = _registered(version.path)
            process.path, process.record = version.path, version.record
        assert process.path is not None
        if isa is not None:
            _use(process.handle, isa)
        name = process.handle.HeadraceIsa().decode()
        if name == "none":
            raise BuildError("this CPU runs none of the instruction sets that the kernels were compiled for")
        return Library(path=process.path, isa=name, record=process.record)


def _registered(path: Path) -> ctypes.CDLL:
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(
            f"{path} cannot be loaded ({error}); is its file system mounted noexec? Give {OTHER}"
        ) from error
    handle.HeadraceIsa.argtypes, handle.HeadraceIsa.restype = (), ctypes.c_char_p
    handle.HeadraceUseIsa.argtypes, handle.HeadraceUseIsa.restype = (ctypes.c_char_p,), ctypes.c_int
    missing = [target for target in TARGETS if not hasattr(handle, target)]
    if missing:
        raise BuildError(f"{path} has no {', '.join(missing)}: its sources are not those of this version; reinstall")
    for target in TARGETS:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(handle, target)), platform=PLATFORM)
    return handle


def _use(handle: ctypes.CDLL, isa: str) -> None:
    refused = handle.HeadraceUseIsa(isa.encode())
    if refused == 1:
        raise BuildError(f"the library has no kernels for {isa!r}; it runs {handle.HeadraceIsa().decode()}")
    if refused:
        raise BuildError(f"this CPU cannot run {isa!r}; the best that it runs is {handle.HeadraceIsa().decode()}")
