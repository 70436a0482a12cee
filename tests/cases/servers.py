"""Servers whose size and speed a case chooses: with the fake runner, or with a model of a few kilobytes."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from headrace.serving.app.build import EngineOptions, FakeOptions
from headrace.serving.app.options import ServeOptions
from tests.cases import fake_server
from tests.cases.five_checks import FiveChecks, ask_canary
from tests.live import LiveServer, start_command, start_server

FAKE_VOCAB = 49_152
"""Of the default model, whose tokenizer and template the fake servers have."""


@contextmanager
def fake(
    log: Path,
    model: Path,
    *,
    step_ms: float = 2,
    fault: str | None = None,
    engine: dict[str, Any] | None = None,
    **serve: Any,
) -> Iterator[LiveServer]:
    """A server with the fake runner, ready in about two seconds; it must end cleanly."""
    server = start_fake(log, fake_options(model, step_ms=step_ms, fault=fault, engine=engine, **serve))
    try:
        yield server
    finally:
        exit_code = server.stop()
    assert exit_code == 0, log.read_text()


def fake_options(
    model: Path,
    *,
    step_ms: float = 2,
    fault: str | None = None,
    engine: dict[str, Any] | None = None,
    **serve: Any,
) -> ServeOptions:
    """model: whose tokenizer and template the server has. step_ms, fault: see FakeOptions. engine, serve: changes to
    EngineOptions and ServeOptions."""
    values: dict[str, Any] = {"num_slots": 8, "context": 4096, "chunk_tokens": 256} | (engine or {})
    fake = FakeOptions(vocab_size=FAKE_VOCAB, step_ms=step_ms, fault=fault)
    options: dict[str, Any] = {"model_name": "fake", "model_path": model, "port": 0} | serve
    return ServeOptions(engine=EngineOptions(model=str(model), fake=fake, **values), **options)


def start_fake(log: Path, options: ServeOptions) -> LiveServer:
    """The caller stops it."""
    argument = msgspec.json.encode(options, enc_hook=str).decode()
    return start_command(log, [sys.executable, str(Path(fake_server.__file__)), argument], ready_timeout_s=60.0)


@contextmanager
def five_checks(
    server: LiveServer, *, key: str | None = None, canary_ids: Sequence[int] | None = None
) -> Iterator[FiveChecks]:
    """The five checks around a case. canary_ids: None takes what the server answers before the case."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as http:
        checks = FiveChecks(http, canary_ids=canary_ids or ask_canary(http))
        yield checks
        checks.verify()


@contextmanager
def tiny(log: Path, model: Path, *options: str) -> Iterator[LiveServer]:
    """A server with the real runner and a model of a few kilobytes; it must end cleanly."""
    server = start_server(log, str(model), "--served-model-name", "tiny", *options)
    try:
        yield server
    finally:
        exit_code = server.stop()
    assert exit_code == 0, log.read_text()
