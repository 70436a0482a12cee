"""What both doors (OpenAI HTTP and the native WebSocket) share: from a body to running generations.

``Service.start`` parses the body, renders and tokenizes off the event loop, admits and submits. It raises
``ApiError`` for every refusal, before the engine has seen anything.
"""

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from headrace.model.chat_template import ChatTemplate
from headrace.model.tokenizer import Tokenizer
from headrace.serving.core.admission import Limits
from headrace.serving.core.request import SAMPLING_POLICY, CancelReason, Request, RequestId
from headrace.serving.core.tenant_policy import BudgetLimits
from headrace.serving.core.text import Detokenizer, OutputText, StopMatcher
from headrace.serving.edge.admission import AdmissionConfig, AdmissionControl, Admitted
from headrace.serving.edge.bodies import JobOptions, ParsedBody, parse_body
from headrace.serving.edge.engine_client import EngineUnavailable, Sink
from headrace.serving.edge.errors import ApiError, ErrorCode, deadline_exceeded, shutting_down
from headrace.serving.edge.fields import Endpoint
from headrace.serving.edge.generation import Done, Failure, Generation
from headrace.serving.edge.job import Job
from headrace.serving.edge.load_metrics import LoadMetrics
from headrace.serving.edge.metrics import EngineView, Metrics
from headrace.serving.edge.preparation import Admission, Preparation, cache_namespace
from headrace.serving.edge.prompt_ids import PromptEncoder
from headrace.serving.edge.shared_prefixes import SharedPrefixes
from headrace.serving.edge.tenants import Policies, SamePolicy
from headrace.serving.edge.terms import Terms
from headrace.serving.engine.lifecycle import EngineState
from headrace.serving.engine.messages import Ready

__all__ = ["Endpoint", "EnginePort", "Job", "JobOptions", "Readiness", "Service", "ServiceConfig"]


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
    all accepted requests, see ``BudgetLimits``. first_token_ms, chunk_tokens: see ``AdmissionConfig``.
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


class Service:
    """Everything behind the doors but the engine. All methods run on one event loop."""

    def __init__(
        self,
        config: ServiceConfig,
        *,
        engine: EnginePort,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        bulk: PromptEncoder | None = None,
        metrics: Metrics | None = None,
        policies: Policies | None = None,
        shared_prefixes: SharedPrefixes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.engine = engine
        self.created = int(time.time())
        self.metrics = metrics or Metrics(config.model_names[0], engine)
        self.preparation = Preparation(tokenizer, template, max_prompt_bytes=config.max_prompt_bytes, bulk=bulk)
        self._tokenizer = tokenizer
        self._template_hash = template.content_hash if template else ""
        self._clock = clock
        self._is_draining = False
        self._shared_prefixes = shared_prefixes or SharedPrefixes()
        self.admission = AdmissionControl(
            config.admission, engine=engine, policies=policies or SamePolicy(), clock=clock
        )
        self.metrics.add(LoadMetrics(self.admission, engine).metrics)

    # State

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.config.model_names

    @property
    def max_context(self) -> int:
        """Prompt and output tokens of one request; 0 before the engine is ready."""
        ready = self.engine.ready_info
        return ready.max_context if ready else 0

    @property
    def queue_depth(self) -> int:
        """Requests that wait for a row of the step."""
        return self.engine.queue_depth

    def now_s(self) -> float:
        """Of the clock of deadlines and budgets."""
        return self._clock()

    def token_bytes(self, token_id: int) -> bytes:
        table = self._tokenizer.token_bytes
        return table[token_id] if token_id < len(table) else b""

    def is_ready(self) -> Readiness:
        """True only when the engine is ready, moves, and nothing drains; false the moment that it is lost."""
        state = self.engine.state
        if self._is_draining or state is EngineState.DRAINING:
            return Readiness(False, "draining")
        if state is EngineState.STARTING:
            return Readiness(False, "the engine is starting")
        if state is EngineState.DEAD:
            return Readiness(False, f"the engine is dead: {self.engine.failure or 'it was never started'}")
        return Readiness(True, "ready")

    def drain(self) -> None:
        """Refuse new work with shutting_down; running generations go on."""
        self._is_draining = True

    def close(self) -> None:
        """End the threads; the engine belongs to whoever started it."""
        self.preparation.close()

    @property
    def contract(self) -> str:
        """Fingerprint of ``contract_parts``."""
        return "fp_" + hashlib.sha256(json.dumps(self.contract_parts, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def contract_parts(self) -> dict[str, str]:
        """What fixes an answer: weights, tokenizer, template, types, kernels, sampling, version."""
        ready = self.engine.ready_info
        return {
            "model": ready.model_hash if ready else "",
            "tokenizer": self._tokenizer.content_hash,
            "template": self._template_hash,
            "dtype": ready.dtype if ready else "",
            "weights": ready.weights if ready else "",
            "kv_dtype": ready.kv_dtype if ready else "",
            "mesh": ready.mesh if ready else "",
            "attention": ready.attention if ready else "",
            "sampling": SAMPLING_POLICY,
            "version": self.config.version,
        }

    # Requests

    async def start(
        self, endpoint: Endpoint | str, body: Mapping[str, object], *, tenant: str = "", terms: Terms | None = None
    ) -> Job:
        """Admit and submit one request. terms: None = those of the tenant, from now on. Raises ApiError. Cancelling the
        caller before it returns starts nothing."""
        try:
            return await self._start(_known(endpoint), body, tenant, terms or Terms(arrival_s=self._clock()))
        except ApiError as error:
            self.metrics.refused(error.code)
            self.admission.refusals[error.code] += 1
            raise

    async def _start(self, endpoint: Endpoint, body: Mapping[str, object], tenant: str, terms: Terms) -> Job:
        ready = self._require_ready()
        parsed = parse_body(endpoint, body, allow_unknown=self.config.allow_unknown_fields)
        self.require_model(parsed.model)
        sizes = self.preparation.sizes(parsed)
        against = self._admission(ready, parsed, len(sizes), tenant)
        admitted = self.admission.accept(parsed, sizes, against.request_ids, ready=ready, tenant=tenant, terms=terms)
        try:
            requests = await self._prepared(parsed, sizes, against, admitted)
            queue_depth = self.queue_depth
            ignored = parsed.options.ignored_fields + self.preparation.unread_fields(parsed.chat)
            generations = tuple(
                self._generation(index, request, parsed, admitted.deadline_s) for index, request in enumerate(requests)
            )
            self._submit(generations)
        except BaseException:
            self.admission.abandon(admitted)
            raise
        return Job(
            request_id=f"req_{secrets.token_hex(16)}",
            endpoint=endpoint,
            model=parsed.model or self.model_names[0],
            created=int(time.time()),
            queue_depth=queue_depth,
            contract=self.contract,
            options=replace(parsed.options, ignored_fields=ignored),
            generations=generations,
        )

    async def _prepared(
        self, parsed: ParsedBody, sizes: tuple[int, ...], against: Admission, admitted: Admitted
    ) -> tuple[Request, ...]:
        """Rendered, tokenized and counted; given up at the deadline."""
        left_s = None if admitted.deadline_s is None else max(0.0, admitted.deadline_s - self._clock())
        try:
            async with asyncio.timeout(left_s):
                requests = await self.preparation.requests(parsed, sizes, against)
        except TimeoutError:
            raise deadline_exceeded() from None
        return self.admission.tokenized(admitted, parsed, sizes, requests, self._require_ready())

    def _namespace(self, ready: Ready, tenant: str) -> bytes:
        return cache_namespace(
            model_hash=ready.model_hash,
            tokenizer_hash=self._tokenizer.content_hash,
            template_hash=self._template_hash,
            kv_dtype=ready.kv_dtype,
            tenant=tenant,
        )

    def _admission(self, ready: Ready, parsed: ParsedBody, num_choices: int, tenant: str) -> Admission:
        draw_seed = not parsed.has_seed
        return Admission(
            limits=Limits(
                vocab_size=self.config.vocab_size,
                max_context=ready.max_context,
                page_size=ready.page_size,
                num_usable_pages=ready.num_pages - 1,
                eos_ids=self.config.eos_ids,
            ),
            namespace=self._namespace(ready, tenant),
            tenant=tenant,
            request_ids=tuple(self.engine.next_request_id() for _ in range(num_choices)),
            seeds=tuple(secrets.randbits(63) if draw_seed else parsed.sampling.seed for _ in range(num_choices)),
            shared_namespace=self._namespace(ready, ""),
            shared_prefixes=self._shared_prefixes,
        )

    def _generation(self, index: int, request: Request, parsed: ParsedBody, deadline_s: float | None) -> Generation:
        tokenizer = self._tokenizer
        return Generation(
            index=index,
            request=request,
            text=OutputText(
                Detokenizer(tokenizer.token_bytes, tokenizer.special_ids),
                StopMatcher(parsed.stop, parsed.include_stop, min_tokens=parsed.min_tokens),
            ),
            token_bytes=tokenizer.token_bytes,
            cancel_engine=self.engine.cancel,
            watcher=self,
            keep_token_ids=parsed.options.return_token_ids,
            include_stop=parsed.include_stop,
            drops_output=not parsed.generate,
            deadline_s=deadline_s,
            pacing=parsed.options.pacing,
            clock=self._clock,
        )

    def _submit(self, generations: tuple[Generation, ...]) -> None:
        try:
            for generation in generations:
                self.engine.submit(generation.request, generation.on_event)
                self.metrics.accepted()
        except EngineUnavailable:
            for generation in generations:
                generation.cancel(CancelReason.SHUTDOWN)
            self._require_ready()
            raise

    def _require_ready(self) -> Ready:
        ready = self.engine.ready_info
        readiness = self.is_ready()
        if readiness.ready and ready is not None:
            return ready
        if self._is_draining or self.engine.state is EngineState.DRAINING:
            raise shutting_down()
        raise ApiError(
            ErrorCode.NOT_READY,
            "The engine is not ready to take requests; /readyz says why. Retry later.",
            retry_after_ms=5000,
        )

    def require_model(self, name: str | None) -> None:
        """Raises ApiError unless it is a served name or left out."""
        if name is not None and name not in self.model_names:
            raise ApiError(
                ErrorCode.MODEL_NOT_FOUND,
                f"This server does not serve that model; it serves {', '.join(self.model_names)}.",
                param="model",
            )

    # Watching generations

    def on_token(self, generation: Generation, now_s: float, previous_s: float | None) -> None:
        self.admission.on_token(generation, now_s)
        if previous_s is None:
            self.metrics.first_token(now_s - generation.created_s)
        else:
            self.metrics.next_token(now_s - previous_s)

    def on_end(self, generation: Generation, outcome: Done | Failure, now_s: float) -> None:
        self.admission.on_end(generation, outcome)
        self.metrics.ended(generation, outcome, now_s)

    def on_unread_at_deadline(self, generation: Generation) -> None:
        self.admission.num_unread_at_deadline += 1


def _known(endpoint: str) -> Endpoint:
    try:
        return Endpoint(endpoint)
    except ValueError:
        names = " or ".join(Endpoint)
        raise ApiError(ErrorCode.INVALID_VALUE, f"endpoint must be {names}.", param="endpoint") from None
