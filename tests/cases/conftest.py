"""Cases: public bugs of other servers, tried on a real server with the real model."""

from collections.abc import Iterator

import pytest

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
