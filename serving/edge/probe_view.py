"""The readiness probe as the service, its answers and its contract see it."""

from enum import StrEnum
from typing import Protocol


class ProbeStatus(StrEnum):
    """unrecorded: there is nothing to compare with. pending: not passed since the engine started."""

    UNRECORDED = "unrecorded"
    PENDING = "pending"
    PASSED = "passed"
    FAILED = "failed"


class ProbeView(Protocol):
    """What the service asks of a probe."""

    @property
    def status(self) -> str: ...
    @property
    def fault(self) -> str | None:
        """Why requests are not taken; None where they are."""

    def as_json(self) -> dict[str, object]:
        """For ``/v1/contract``."""


class _NoProbe:
    status = ProbeStatus.UNRECORDED.value
    fault = None

    def as_json(self) -> dict[str, object]:
        return {"status": self.status}


NO_PROBE: ProbeView = _NoProbe()
"""Of a service that nobody gave a probe."""
