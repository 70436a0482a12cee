"""A started request as both doors see it."""

from dataclasses import dataclass

from headrace.serving.core.request import CancelReason
from headrace.serving.edge.bodies import JobOptions
from headrace.serving.edge.fields import Endpoint
from headrace.serving.edge.generation import Generation


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
