"""Cases: public bugs of other servers, tried on a real server with the real model."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace.model.tokenizer import Tokenizer, load_tokenizer
from tests.cases import servers
from tests.cases.case_client import CaseClient
from tests.cases.five_checks import CANARY_IDS, FiveChecks
from tests.cases.tiny_model import TIGHT, write_tiny
from tests.live import LiveServer

if TYPE_CHECKING:
    import numpy as np

Reference = Callable[[Sequence[int]], "np.ndarray"]
REFERENCE_TOKENS = 64


@pytest.fixture
def client(live_server: LiveServer) -> Iterator[CaseClient]:
    """A client of the session's server."""
    with CaseClient(live_server.url) as client:
        yield client


@pytest.fixture(scope="module")
def checks(live_server: LiveServer) -> Iterator[FiveChecks]:
    """The five checks on the session's server, made after a case. A module states that it wants them:
    ``pytestmark = pytest.mark.usefixtures("checks")``."""
    with servers.five_checks(live_server, canary_ids=CANARY_IDS) as checks:
        yield checks


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The real runner with a model of a few kilobytes, 49 pages for four requests, and chunks of two pages."""
    folder = tmp_path_factory.mktemp("tiny")
    with servers.tiny(folder / "log", write_tiny(folder / "model"), *TIGHT) as server:
        yield server


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


@pytest.fixture(scope="session")
def reference(smollm2_path: Path) -> Reference:
    """At most REFERENCE_TOKENS ids -> float32 [S, V]: the logits behind each, from the decoder without a cache."""
    import numpy as np

    from headrace.model.load import load_model
    from headrace.model.oracle import logits_SV

    model = load_model(smollm2_path)

    def logits(ids: Sequence[int]) -> "np.ndarray":
        """Padded behind, where nothing looks, so that one shape is compiled."""
        padded = [*ids, *[0] * (REFERENCE_TOKENS - len(ids))]
        return np.asarray(logits_SV(model.weights, model.config, padded))[: len(ids)]

    return logits
