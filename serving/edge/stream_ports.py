"""What the door of the native WebSocket uses of the service and of the security layer."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from headrace.serving.edge.fields import Endpoint
from headrace.serving.edge.job import Job
from headrace.serving.edge.keys import Identity
from headrace.serving.edge.terms import Terms


class StreamService(Protocol):
    """The part of the service that this door uses."""

    @property
    def model_names(self) -> tuple[str, ...]: ...
    @property
    def max_context(self) -> int: ...
    @property
    def contract_hashes(self) -> tuple[str | None, str | None]: ...
    def check_expected(self, expected: Sequence[str], param: str = "expect_contract") -> None: ...
    async def start(
        self,
        endpoint: Endpoint | str,
        body: Mapping[str, object],
        *,
        tenant: str = "",
        terms: Terms | None = None,
        expected: Sequence[str] = (),
    ) -> Job: ...


class KeyCheck(Protocol):
    """The part of the security layer that this door uses."""

    def identify(self, key: str, peer: str) -> Identity | None: ...
    def is_current(self, identity: Identity) -> bool: ...
