"""Fixtures that every folder shares: the default model, and a real server process."""

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from headrace.model.pull import DEFAULT_MODEL, resolve_model
from tests.live import SMALL, LiveServer, start_server

# Before JAX starts a back end: meshes of CPU devices. Everything else runs on the first of them.
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct as GGUF, pulled into the user's cache on first use."""
    return resolve_model(DEFAULT_MODEL).path


@pytest.fixture(scope="session")
def live_server(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[LiveServer]:
    """One small server for the session; tests leave it as they found it."""
    server = start_server(tmp_path_factory.mktemp("server") / "log", "smollm2-135m", *SMALL)
    yield server
    assert server.stop() == 0, server.log.read_text()
