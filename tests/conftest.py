"""Fixtures that every folder shares: the default model, a real server process, and how this process compiles."""

import gc
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from filelock import FileLock
from jax.experimental.compilation_cache import compilation_cache

from headrace.model.pull import DEFAULT_MODEL, resolve_model
from tests.live import SMALL, LiveServer, start_server

LONGEST_FIRST = (
    "numerics/test_golden.py",
    "serving/runner/test_memory.py",
    "pallas_kernels/test_tpu_prefill.py",
    "e2e/test_serve.py",
    "serving/runner/test_backend_steps.py",
    "cases/test_o35_damaged_models.py",
    "pallas_kernels/test_tpu_decode.py",
    "numerics/test_metamorphic.py",
    "serving/runner/test_mesh_steps.py",
    "e2e/test_mesh.py",
    "pallas_kernels/test_gpu_attention.py",
    "e2e/test_generate.py",
    "serving/runner/test_mesh_families.py",
    "model/test_decoder.py",
    "serving/runner/test_families.py",
    "model/test_oracle.py",
)
"""Files of a minute and more. pytest-xdist takes file by file in this order (--no-loadscope-reorder): were one of them
the last, a processor would wait for it."""

HEAVY_KERNELS = (
    "pallas_kernels/native/test_attention.py",
    "pallas_kernels/native/test_integer_kernels.py",
    "pallas_kernels/native/test_sanitized_draws.py",
    "pallas_kernels/native/test_sanitized_products.py",
)
"""Files that compile all C++ kernels again, with sanitizers or for each instruction set: some 15 minutes of two cores.
They run with --heavy-kernels (make check-sanitizers)."""

# Before JAX starts a back end: meshes of CPU devices. Everything else runs on the first of them.
jax.config.update("jax_num_cpu_devices", 8)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--heavy-kernels", action="store_true", help="also the files of HEAVY_KERNELS")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_heavy = collection_path in [Path(__file__).parent / name for name in HEAVY_KERNELS]
    return True if is_heavy and not config.getoption("--heavy-kernels") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    places = {folder / name: place for place, name in enumerate(LONGEST_FIRST)}
    missing = [str(path) for path in places if not path.exists()]
    assert not missing, f"LONGEST_FIRST names files that are not there: {missing}"
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """Five thousand tests and what they import stay to the end: no collection of garbage looks at them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _keeps_no_programs() -> Iterator[None]:
    """An engine in this process keeps its programs for the next start. What other modules compile after it would be
    kept too, thousands of small programs, and each one that JAX adds to a full directory has it look at every file
    there: 0.14 s at 3,000 programs."""
    yield
    if jax.config.jax_compilation_cache_dir is not None:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def quick_compiles() -> Iterator[None]:
    """Machine code without most of LLVM's optimizations: a third less time for programs that run once on tiny arrays.
    XLA's passes, buffers and collectives are the same; servers and the default model run as they are served."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct as GGUF, pulled into the user's cache on first use."""
    return resolve_model(DEFAULT_MODEL).path


@pytest.fixture(scope="session")
def live_server(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[LiveServer]:
    """One small server for the session; tests leave it as they found it."""
    # Two workers of pytest-xdist compile one after the other: the second finds the programs of the first.
    with FileLock(tmp_path_factory.getbasetemp().parent / "live_server.lock"):
        server = start_server(tmp_path_factory.mktemp("server") / "log", "smollm2-135m", *SMALL)
    yield server
    assert server.stop() == 0, server.log.read_text()
