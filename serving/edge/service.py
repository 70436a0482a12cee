"""What both doors (OpenAI HTTP and the native WebSocket) share: from a body to running generations.

``Service.start`` parses the body, renders and tokenizes off the event loop, admits and submits. It raises
``ApiError`` for every refusal, before the engine has seen anything.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from headrace.model.chat_template import ChatTemplate
from headrace.model.tokenizer import Tokenizer
from headrace.serving.core.admission import Limits
from headrace.serving.core.contract import Contract
from headrace.serving.core.request import CancelReason, Request, RequestId
from headrace.serving.core.text import Detokenizer, OutputText, StopMatcher
from headrace.serving.edge.admission import AdmissionControl, Admitted
from headrace.serving.edge.bodies import JobOptions, ParsedBody, parse_body
from headrace.serving.edge.contract import ServedContract, check_expectation, contract_document
from headrace.serving.edge.engine_client import EngineUnavailable
from headrace.serving.edge.errors import ApiError, ErrorCode, deadline_exceeded, shutting_down
from headrace.serving.edge.fields import Endpoint
from headrace.serving.edge.generation import Done, Failure, Generation
from headrace.serving.edge.http_json import JsonObject
from headrace.serving.edge.job import Job
from headrace.serving.edge.load_metrics import LoadMetrics
from headrace.serving.edge.metrics import Metrics
from headrace.serving.edge.preparation import Admission, Preparation, cache_namespace
from headrace.serving.edge.probe_view import NO_PROBE, ProbeView
from headrace.serving.edge.prompt_ids import PromptEncoder
from headrace.serving.edge.request_log import RequestLog
from headrace.serving.edge.service_config import EnginePort, Readiness, ServiceConfig
from headrace.serving.edge.shared_prefixes import SharedPrefixes
from headrace.serving.edge.tenants import Policies, SamePolicy
from headrace.serving.edge.terms import Terms
from headrace.serving.engine.lifecycle import EngineState
from headrace.serving.engine.messages import Ready

__all__ = ["Endpoint", "EnginePort", "Job", "JobOptions", "Readiness", "Service", "ServiceConfig"]


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
        self._template = template
        self._template_hash = template.content_hash if template else ""
        self._served = ServedContract(
            tokenizer=tokenizer.content_hash,
            template=template.content_hash if template else None,
            stop_ids=config.eos_ids,
        )
        self.probe: ProbeView = NO_PROBE
        self._clock = clock
        self._is_draining = False
        self._log = RequestLog()
        self._make_generation: type[Generation] = Generation
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
        """True only when the engine is ready, moves and passed its probe, and nothing drains."""
        state = self.engine.state
        if self._is_draining or state is EngineState.DRAINING:
            return Readiness(False, "draining")
        if state is EngineState.STARTING:
            return Readiness(False, "the engine is starting")
        if state is EngineState.DEAD:
            return Readiness(False, f"the engine is dead: {self.engine.failure or 'it was never started'}")
        if (fault := self.probe.fault) is not None:
            return Readiness(False, fault)
        return Readiness(True, "ready")

    def drain(self) -> None:
        """Refuse new work with shutting_down; running generations go on."""
        self._is_draining = True

    def close(self) -> None:
        """End the threads; the engine belongs to whoever started it."""
        self.preparation.close()

    @property
    def served(self) -> Contract | None:
        """The contract of the engine that runs now; None while none is ready."""
        ready = self.engine.ready_info
        return None if ready is None else self.contract_of(ready)

    def contract_of(self, ready: Ready) -> Contract:
        """Of an engine that reported so."""
        return self._served.of(ready)

    @property
    def contract_hashes(self) -> tuple[str | None, str | None]:
        """Fingerprint of the contract and hash of its numerics; None while no engine is ready."""
        served = self.served
        return (None, None) if served is None else (served.fingerprint, served.numerics_hash)

    def check_expected(self, expected: Sequence[str], param: str = "expect_contract") -> None:
        """Raises: ApiError where the contract is not what a client expects; nothing is checked while none is known."""
        served = self.served
        if served is not None:
            for text in expected:
                check_expectation(text, served, param)

    def refuse_unexpected(self, expected: Sequence[str], param: str, tenant: str) -> None:
        """``check_expected`` ahead of everything else, its refusal counted as one of a request."""
        try:
            self.check_expected(expected, param)
        except ApiError as error:
            self._refused(error, tenant)
            raise

    def _refused(self, error: ApiError, tenant: str) -> None:
        self.metrics.refused(error.code)
        self.admission.refusals[error.code] += 1
        self._log.refused(error, tenant, self._clock())

    def contract_document(self) -> JsonObject:
        """Raises: ApiError while no engine is ready, since the engine alone knows most of it."""
        ready, served = self.engine.ready_info, self.served
        if ready is None or served is None:
            raise _not_ready("The contract is known when the engine is ready")
        return contract_document(
            served,
            ready,
            headrace=self.config.version,
            revision=self.config.revision,
            shows_date=bool(self._template and self._template.shows_date),
            probe=self.probe.as_json(),
            first_token_ms=self.config.first_token_ms,
        )

    # Requests

    async def start(
        self,
        endpoint: Endpoint | str,
        body: Mapping[str, object],
        *,
        tenant: str = "",
        terms: Terms | None = None,
        expected: Sequence[str] = (),
    ) -> Job:
        """Admit and submit one request. terms: None = those of the tenant, from now on. expected: what the client wants
        of the contract, see ``core.contract``.

        Raises ApiError. Cancelling the caller before it returns starts nothing."""
        terms = terms or Terms(arrival_s=self._clock())
        try:
            job = await self._start(_known(endpoint), body, tenant, terms, expected)
        except ApiError as error:
            self._refused(error, tenant)
            raise
        self.metrics.started(job)
        self._log.accepted(job, tenant, self._clock())
        return job

    async def _start(
        self, endpoint: Endpoint, body: Mapping[str, object], tenant: str, terms: Terms, expected: Sequence[str]
    ) -> Job:
        ready = self._require_ready()
        self.check_expected(expected)
        parsed = parse_body(endpoint, body, allow_unknown=self.config.allow_unknown_fields)
        self.require_model(parsed.model)
        sizes = self.preparation.sizes(parsed)
        against = self._admission(ready, parsed, len(sizes), tenant)
        admitted = self.admission.accept(parsed, sizes, against.request_ids, ready=ready, tenant=tenant, terms=terms)
        try:
            requests = await self._prepared(parsed, sizes, against, admitted)
            served = self.contract_of(self._require_ready())
            self.check_expected(expected)  # Another engine may run by now.
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
            contract=served.fingerprint,
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
        return self._make_generation(
            index=index,
            request=request,
            text=OutputText(
                Detokenizer(tokenizer.token_bytes, tokenizer.special_ids),
                StopMatcher(parsed.stop, parsed.include_stop, min_tokens=parsed.min_tokens),
            ),
            token_bytes=tokenizer.token_bytes,
            cancel_engine=self._cancel,
            watcher=self,
            keep_token_ids=parsed.options.return_token_ids,
            include_stop=parsed.include_stop,
            drops_output=not parsed.generate,
            deadline_s=deadline_s,
            pacing=parsed.options.pacing,
            clock=self._clock,
        )

    def _cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        self.metrics.cancelled(reason)
        self.engine.cancel(request_id, reason)

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
        raise _not_ready("The server is not ready to take requests")

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
        if generation.drops_output:  # Nobody gets that token, and usage does not count it.
            return
        if previous_s is None:
            self.metrics.first_token(now_s - generation.created_s)
        else:
            self.metrics.next_token(now_s - previous_s)

    def on_end(self, generation: Generation, outcome: Done | Failure, now_s: float) -> None:
        self.admission.on_end(generation, outcome)
        self.metrics.ended(generation, outcome, now_s)
        self._log.ended(generation, outcome, now_s)

    def on_unread_at_deadline(self, generation: Generation) -> None:
        self.admission.num_unread_at_deadline += 1


def _not_ready(what: str) -> ApiError:
    return ApiError(ErrorCode.NOT_READY, f"{what}; /readyz says why it is not. Retry later.", retry_after_ms=5000)


def _known(endpoint: str) -> Endpoint:
    try:
        return Endpoint(endpoint)
    except ValueError:
        names = " or ".join(Endpoint)
        raise ApiError(ErrorCode.INVALID_VALUE, f"endpoint must be {names}.", param="endpoint") from None
