"""What both doors (OpenAI HTTP and the native WebSocket) share: from a body to running generations.

``Service.start`` parses the body, renders and tokenizes off the event loop, admits and submits. It raises
``ApiError`` for every refusal, before the engine has seen anything.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from headrace.serving.core.request import CancelReason, Request, RequestId
from headrace.serving.edge.bodies import JobOptions
from headrace.serving.edge.fields import Endpoint
from headrace.serving.edge.generation import Generation
from headrace.serving.engine.messages import Ready, Stats


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A started request: one generation per choice.

    request_id: "req_" and 32 hex digits, made by the server. created: unix seconds. queue_depth: requests that waited
    when this one was submitted. contract: fingerprint of what serves it (system_fingerprint).
    """

    request_id: str
    endpoint: Endpoint
    model: str
    created: int
    queue_depth: int
    contract: str
    options: JobOptions
    generations: tuple[Generation, ...]

    def prompt_ids(self, index: int) -> tuple[int, ...]:
        """Prompt token ids of the choice with that index."""
        return self.generations[index].request.prompt_ids

    def cancel(self, reason: CancelReason) -> None:
        for generation in self.generations:
            generation.cancel(reason)


@dataclass(frozen=True, slots=True)
class Readiness:
    ready: bool
    reason: str


class EnginePort(Protocol):
    """What the service needs of the engine client."""

    @property
    def ready_info(self) -> Ready | None: ...
    @property
    def stats(self) -> Stats: ...
    def next_request_id(self) -> RequestId: ...
    def submit(self, request: Request, sink: Callable[[object], None]) -> None: ...
    def cancel(self, request_id: RequestId, reason: CancelReason) -> None: ...


class Service:
    async def start(self, endpoint: Endpoint | str, body: Mapping[str, object], *, tenant: str = "") -> Job:
        """Admit and submit one request. Cancelling the awaiting task before it returns starts nothing."""
        raise NotImplementedError

    def is_ready(self) -> Readiness:
        """True only when the engine is ready, moves, and the service is not draining; the reason says why not."""
        raise NotImplementedError

    @property
    def queue_depth(self) -> int:
        """Requests submitted and still without a first token."""
        raise NotImplementedError

    @property
    def model_names(self) -> tuple[str, ...]:
        raise NotImplementedError

    @property
    def max_context(self) -> int:
        raise NotImplementedError

    def drain(self) -> None:
        """Refuse new work with shutting_down; running generations go on."""
        raise NotImplementedError
