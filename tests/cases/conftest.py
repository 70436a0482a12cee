"""Cases: public bugs of other servers, tried on a real server with the real model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.model.tokenizer import Tokenizer, load_tokenizer
from tests.cases import servers
from tests.cases.case_client import CaseClient
from tests.cases.five_checks import FiveChecks
from tests.live import LiveServer


@pytest.fixture
def client(live_server: LiveServer) -> Iterator[CaseClient]:
    """A client of the session's server."""
    with CaseClient(live_server.url) as client:
        yield client


@pytest.fixture
def checks(client: CaseClient) -> Iterator[FiveChecks]:
    """The five checks on the session's server, made after the test. A module states that it wants them:
    ``pytestmark = pytest.mark.usefixtures("checks")``."""
    checks = FiveChecks(client.http)
    yield checks
    checks.verify()


@pytest.fixture(scope="session")
def fake_server(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[LiveServer]:
    """One server without a model for the session, for cases about everything around it; 8 slots, 2 ms a step."""
    with servers.fake(tmp_path_factory.mktemp("fake") / "log", smollm2_path) as server:
        yield server


@pytest.fixture
def fake_checks(fake_server: LiveServer) -> Iterator[FiveChecks]:
    """The five checks on the fake server, made after the test."""
    with servers.five_checks(fake_server) as checks:
        yield checks


@pytest.fixture(scope="session")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    """The served model's own; its table of bytes per id is the reference for texts."""
    return load_tokenizer(smollm2_path)
