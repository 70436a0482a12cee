"""The edge's admission in simulated time: the very budgets, rates and forecasts that a server asks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.events import Event, Finished, TokenEvent
from headrace.serving.core.request import FinishReason, Rejection, RejectionReason, Request, RequestId
from headrace.serving.core.scheduler import SchedulerStats
from headrace.serving.core.simulated_service import Gate
from headrace.serving.core.tenant_policy import BudgetLimits, TenantPolicy
from headrace.serving.edge.admission import AdmissionConfig, AdmissionControl, Admitted
from headrace.serving.edge.bodies import ParsedBody, parse_body
from headrace.serving.edge.errors import ApiError
from headrace.serving.edge.fields import Endpoint
from headrace.serving.edge.generation import Done, Failure, Usage
from headrace.serving.edge.tenants import Policies, SamePolicy, TenantFile
from headrace.serving.edge.terms import Terms

REASONS = {
    "rate_limited": RejectionReason.RATE_LIMITED,
    "deadline_unmeetable": RejectionReason.DEADLINE,
    "deadline_exceeded": RejectionReason.DEADLINE,
    "context_exceeded": RejectionReason.CONTEXT_EXCEEDED,
    "never_fits": RejectionReason.NEVER_FITS,
    "invalid_value": RejectionReason.INVALID,
}
"""By the code of an error; all others are the server's being full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """What admission reads of an engine that serves."""

    page_size: int
    num_slots: int
    num_lanes: int
    max_context: int


@dataclass(slots=True)
class _Engine:
    ready_info: _Ready
    stats: Any
    state: str = "ready"
    num_restarts: int = 0


@dataclass(slots=True)
class _Generation:
    """What admission reads of a choice."""

    request: Request
    admitted: Admitted
    completion_tokens: int = 0


class AdmissionGate:
    """One edge's. Prompts count by their tokens from the start: they come as ids here."""

    def __init__(self, config: SchedulerConfig, policies: Policies, admission: AdmissionConfig) -> None:
        ready = _Ready(
            page_size=config.page_size,
            num_slots=config.num_slots,
            num_lanes=config.num_lanes,
            max_context=config.max_context,
        )
        self._engine = _Engine(ready, _no_stats(config))
        self._now_s = 0.0
        engine = cast(Any, self._engine)
        self._control = AdmissionControl(admission, engine=engine, policies=policies, clock=lambda: self._now_s)
        self._generations: dict[RequestId, _Generation] = {}

    def refuse(self, request: Request, now_s: float) -> Rejection | None:
        """See ``Gate``."""
        self._now_s = max(self._now_s, now_s)
        body = _body(request)
        sizes = (4 * len(request.prompt_ids),)
        deadline_ms = None if request.deadline_ms is None else round(request.deadline_ms)
        terms = Terms(deadline_ms=deadline_ms, priority=request.priority, arrival_s=now_s)
        ready = cast(Any, self._engine.ready_info)
        admitted: Admitted | None = None
        try:
            admitted = self._control.accept(
                body, sizes, (request.request_id,), ready=ready, tenant=request.tenant, terms=terms
            )
            self._control.tokenized(admitted, body, sizes, (request,), ready)
        except ApiError as error:
            if admitted is not None:
                self._control.abandon(admitted)
            reason = REASONS.get(error.code, RejectionReason.OVERLOADED)
            return Rejection(reason=reason, message=error.message, retry_after_ms=error.retry_after_ms)
        self._generations[request.request_id] = _Generation(request, admitted)
        return None

    def see(self, events: Sequence[Event], stats: SchedulerStats, now_s: float) -> None:
        """See ``Gate``."""
        self._now_s = max(self._now_s, now_s)
        self._engine.stats = stats
        for event in events:
            generation = self._generations.get(event.request_id)
            if generation is None:
                continue
            if isinstance(event, TokenEvent):
                generation.completion_tokens += 1
                self._control.on_token(cast(Any, generation), now_s)
            elif isinstance(event, Finished):
                del self._generations[event.request_id]
                self._control.on_end(cast(Any, generation), _outcome(event))

    def forget(self, request_id: RequestId, now_s: float) -> None:
        """See ``Gate``."""
        self._now_s = max(self._now_s, now_s)
        generation = self._generations.pop(request_id, None)
        if generation is not None:
            self._control.abandon(generation.admitted)


def make_gates(
    num_replicas: int,
    config: SchedulerConfig,
    tenant_file: Path | None,
    first_token_ms: int | None,
    tenants: Sequence[str],
) -> tuple[list[Gate], dict[str, TenantPolicy]]:
    """One for each replica, and the policies of the tenants. Raises: ConfigError naming the file."""
    policies: Policies = SamePolicy() if tenant_file is None else TenantFile(tenant_file, None)
    limits = BudgetLimits(queued_requests=config.max_queued_requests, queued_tokens=config.max_queued_prompt_tokens)
    admission = AdmissionConfig(limits=limits, first_token_ms=first_token_ms, chunk_tokens=config.chunk_tokens)
    gates: list[Gate] = [AdmissionGate(config, policies, admission) for _ in range(num_replicas)]
    return gates, {tenant: policies.of(tenant) for tenant in {"", *tenants}}


def _body(request: Request) -> ParsedBody:
    fields = {"prompt": list(request.prompt_ids), "max_tokens": request.stop.max_tokens, "ignore_eos": True}
    return parse_body(Endpoint.COMPLETION, fields)


def _outcome(event: Finished) -> Done | Failure:
    if event.reason is FinishReason.ERROR:
        return Failure(ApiError("engine", event.error_message or ""))
    usage = Usage(
        prompt_tokens=event.prompt_tokens,
        completion_tokens=event.completion_tokens,
        cached_tokens=event.cached_tokens,
    )
    return Done(finish_reason=event.reason, stop_reason=None, usage=usage, timings=event.timings)


def _no_stats(config: SchedulerConfig) -> SchedulerStats:
    zeros = dict.fromkeys(
        ("running", "waiting", "pages_cached", "steps", "prompt_tokens", "generation_tokens"), 0
    ) | dict.fromkeys(("prefix_queries_tokens", "prefix_hits_tokens", "preemptions"), 0)
    pages = config.num_lanes * (config.num_pages - 1)
    return SchedulerStats(**zeros, pages_total=pages, pages_free=pages)
