"""The persistent cache of compiled programs, and a count of compilations."""

import hashlib
import logging
import platform
import tempfile
import threading
from collections import Counter
from pathlib import Path

import jax
from jax import monitoring

log = logging.getLogger(__name__)

MAX_CACHE_BYTES = 2 << 30
"""Least recently used programs leave first; one model's ladder takes some 10 MB."""
_COMPILE = "/jax/core/compile/backend_compile_duration"
_HIT = "/jax/compilation_cache/cache_hits"


def use_compile_cache(directory: Path | str | None) -> Path | None:
    """Keep compiled programs below a directory, all of them, however small.

    Programs hold machine code for the processor that they were compiled on, so each kind of processor and version of
    JAX has a directory of its own below the given one (a home directory may be shared between machines).

    Args:
      directory: None turns the cache off.
    Returns: where programs are kept; None where the cache is off or the directory cannot be written to, which costs a
    warning and a slower start, never the start. Damaged entries are compiled anew by JAX, with a warning.
    """
    path = None if directory is None else _usable(Path(directory) / _machine())
    jax.config.update("jax_enable_compilation_cache", path is not None)
    jax.config.update("jax_compilation_cache_dir", None if path is None else str(path))
    if path is not None:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        jax.config.update("jax_compilation_cache_max_size", MAX_CACHE_BYTES)
        jax.config.update("jax_raise_persistent_cache_errors", False)
    return path


def _usable(path: Path) -> Path | None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path):
            return path
    except OSError as error:
        log.warning("compiled programs are not kept: %s cannot be written to (%s)", path, error.strerror or error)
        return None


def _machine() -> str:
    features = platform.machine() + platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features += "".join([line for line in lines if line.startswith(("flags", "Features", "model name"))][:2])
    except OSError:
        pass
    digest = hashlib.sha256(features.encode()).hexdigest()[:12]
    return f"jax-{jax.__version__}-{digest}"


class CompileLog:
    """Counts compilations of this process, of any thread, from construction to close."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hits: Counter[int] = Counter()
        self._is_ready = False
        self._after_ready: list[str] = []
        monitoring.register_event_listener(self._on_event)
        monitoring.register_event_duration_secs_listener(self._on_duration)

    def close(self) -> None:
        """Stop listening; the counts stay."""
        monitoring.unregister_event_listener(self._on_event)
        monitoring.unregister_event_duration_listener(self._on_duration)

    def cache_hits(self) -> int:
        """Programs that this thread took from the persistent cache so far."""
        with self._lock:
            return self._hits[threading.get_ident()]

    def mark_ready(self) -> None:
        """From now on each compilation is a bug: it is counted and logged."""
        with self._lock:
            self._is_ready = True

    @property
    def after_ready(self) -> tuple[str, ...]:
        """Names of the functions that were compiled after ready, in order."""
        with self._lock:
            return tuple(self._after_ready)

    def _on_event(self, event: str, **_: str | int) -> None:
        if event == _HIT:
            with self._lock:
                self._hits[threading.get_ident()] += 1

    def _on_duration(self, event: str, duration_s: float, **details: str | int) -> None:
        if event != _COMPILE:
            return
        name = str(details.get("fun_name", "unnamed"))
        with self._lock:
            if not self._is_ready:
                return
            self._after_ready.append(name)
        log.error("compiled %s in %.2f s after ready: a shape or type that warm-up missed", name, duration_s)
