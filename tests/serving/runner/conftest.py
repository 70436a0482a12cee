"""Programs of tiny models: compiling them takes longer than running them."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _quickly(quick_compiles: None) -> None:
    """Every module of this folder."""
