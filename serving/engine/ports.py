"""What the step loop needs from outside; injected, so that the loop runs with fakes and without JAX."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from headrace.serving.core.plan import StepPlan, StepResult
from headrace.serving.engine.host_messages import Loaded


class EngineFailure(RuntimeError):
    """The engine cannot go on; the text holds no prompt text."""


class Clock(Protocol):
    def now_s(self) -> float:
        """Monotonic seconds."""
        ...


class Ticket(Protocol):
    """A dispatched step; opaque outside the runner that made it."""

    @property
    def step_id(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledProgram:
    """One line of the warm-up ledger."""

    name: str
    seconds: float
    temp_bytes: int
    from_cache: bool


ExpertTokens = tuple[tuple[int, ...], ...]
"""By layer and expert."""

Progress = Callable[[str, int, int], None]
"""(what, done, total), called while something long runs."""


class Runner(Protocol):
    """Owns device arrays and compiled programs."""

    def warm_up(self, progress: Progress) -> tuple[CompiledProgram, ...]:
        """Compile and run every program once; afterwards a compile is a bug."""
        ...

    def dispatch(self, plan: StepPlan) -> Ticket:
        """Start a step; returns at once. At most ``max_steps_in_flight`` tickets are uncollected."""
        ...

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a step, in dispatch order: the only blocking device-to-host read."""
        ...

    def expert_tokens(self) -> ExpertTokens | None:
        """Tokens that each layer sent to each expert since the start, padding left out. Waits for the steps in flight.

        None where the model has no experts, or the counters cannot be read from here.
        """
        ...

    @property
    def swap_page_seconds(self) -> float | None:
        """What a page takes to host memory and back, as warm-up measured it; None without swap space."""
        ...

    def compiles_after_ready(self) -> int:
        """Compiles seen since warm_up returned."""
        ...


class Hosts(Protocol):
    """The other hosts of an engine that spans several, as whoever builds it sees them."""

    @property
    def rank(self) -> int:
        """Of this host; 0 leads."""
        ...

    @property
    def num_hosts(self) -> int: ...

    @property
    def service(self) -> str:
        """HOST:PORT of JAX's coordination service, on rank 0's host."""
        ...

    def agree(self, mine: Loaded, progress: Progress) -> int:
        """Wait until every rank has loaded; KV pages that the devices of all hold. Raises: HostsError naming rank and
        tensor, on rank 0, where one has loaded something else."""
        ...

    def meet(self, point: str, progress: Progress) -> None:
        """Wait until every rank is at a point; point: what ranks that are not there have to do, such as "compile"."""
        ...

    def serves(self) -> None:
        """Warmed up: the limits of service hold from here on."""
        ...

    def give_up(self, reason: str) -> None:
        """Tell the others that this rank ends."""
        ...
