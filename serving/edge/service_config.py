"""What ``service`` is made with: its configuration, and the part of the engine client that it uses."""

from dataclasses import dataclass
from typing import Protocol

from headrace.serving.core.request import CancelReason, Request, RequestId
from headrace.serving.core.tenant_policy import BudgetLimits
from headrace.serving.edge.admission import AdmissionConfig
from headrace.serving.edge.engine_client import Sink
from headrace.serving.edge.metrics import EngineView


class EnginePort(EngineView, Protocol):
    """The part of ``EngineClient`` that the service uses."""

    @property
    def failure(self) -> str | None: ...
    @property
    def queue_depth(self) -> int: ...
    def next_request_id(self) -> RequestId: ...
    def submit(self, request: Request, sink: Sink) -> None: ...
    def cancel(self, request_id: RequestId, reason: CancelReason) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """model_names: what clients may call the model; the first is its name in answers. vocab_size: of the model.

    eos_ids: end a generation unless ignore_eos is set. max_queued_*: requests (and their prompt tokens) that may wait
    for a first token; the engine's own limits must not be lower. max_streams, max_tokens_in_flight, max_live_pages: of
    all accepted requests, see ``BudgetLimits``. first_token_ms, chunk_tokens: see ``AdmissionConfig``. revision: of the
    model, where it has one.
    """

    model_names: tuple[str, ...]
    vocab_size: int
    eos_ids: tuple[int, ...]
    version: str = "0.1.0"
    max_queued_requests: int = 512
    max_queued_prompt_tokens: int = 524_288
    max_streams: int | None = None
    max_tokens_in_flight: int | None = None
    max_live_pages: int | None = None
    first_token_ms: int | None = None
    chunk_tokens: int = 256
    max_prompt_bytes: int = 1 << 20
    max_body_bytes: int = 4 << 20
    revision: str | None = None
    allow_unknown_fields: bool = False

    @property
    def admission(self) -> AdmissionConfig:
        limits = BudgetLimits(
            streams=self.max_streams,
            queued_requests=self.max_queued_requests,
            queued_tokens=self.max_queued_prompt_tokens,
            tokens_in_flight=self.max_tokens_in_flight,
            pages=self.max_live_pages,
        )
        return AdmissionConfig(limits=limits, first_token_ms=self.first_token_ms, chunk_tokens=self.chunk_tokens)


@dataclass(frozen=True, slots=True)
class Readiness:
    """reason: why not, or "ready"."""

    ready: bool
    reason: str
