"""What came of one compilation, whoever compiled. Nothing here imports JAX: a worker's first import must not."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol


class Failing(StrEnum):
    """The checks, each of which can fail by itself. MISSED: a planted fault that its check let pass."""

    COMPILER = "compiler"
    UNSUPPORTED = "unsupported"
    ALIAS = "alias"
    COPY = "copy"
    TEMPORARY = "temporary"
    SPILL = "spill"
    SHARED = "shared memory"
    KERNEL = "kernel"
    MISSED = "missed"


class Figures(Protocol):
    """A compiled kernel, as far as evidence is concerned."""

    def figures(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """failures: (check, what it found). temporary_bytes: of all temporaries together, as far as they live at the same
    time. kernels: ours, by name."""

    name: str
    seconds: float
    failures: tuple[tuple[Failing, str], ...]
    temporary_bytes: int = 0
    largest_temporary_bytes: int | None = None
    alias_bytes: int = 0
    kernels: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The figures that evidence keeps."""
        kernels = {name: kernel.figures() for name, kernel in self.kernels.items()}
        return asdict(replace(self, kernels={})) | {"kernels": kernels}


def failed(name: str, started_s: float, failing: Failing, what: str) -> Outcome:
    """Nothing came of it. started_s: on the clock of time.monotonic."""
    return Outcome(name=name, seconds=round(time.monotonic() - started_s, 2), failures=((failing, what),))


def of_fault(outcome: Outcome, failing: Failing, word: str) -> Outcome:
    """Of a planted fault: no failures where its check found it, else what is wrong with the check."""
    if any(check is failing and word in what.lower() for check, what in outcome.failures):
        return replace(outcome, failures=())
    missed = (Failing.MISSED, f"the check {failing} did not find it; found: {outcome.failures or 'nothing'}")
    return replace(outcome, failures=(missed,))
