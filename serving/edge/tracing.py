"""The trace of a request: spans of edge, queue, prefill, decode, detokenizing and writing, made when it has ended.

Nothing here knows OpenTelemetry: a finished trace goes to a ``TraceSink``. Only a server with one runs this code; the
others have ``Service`` and ``Generation`` as they are. No span holds text, ids of tokens, or a key.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.serving.core.request import CancelReason, FinishReason, Request
from headrace.serving.core.text import OutputText, TextPiece
from headrace.serving.edge.errors import ApiError, ErrorCode
from headrace.serving.edge.fields import Endpoint
from headrace.serving.edge.generation import Delta, Done, Failure, Generation, Outcome
from headrace.serving.edge.job import Job
from headrace.serving.edge.service import Service
from headrace.serving.edge.trace_context import caller

PROVIDER = "headrace"
OPERATIONS = {Endpoint.CHAT: "chat", Endpoint.COMPLETION: "text_completion"}

Attribute = str | int | float | bool | tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Times in ns since 1970."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Attribute] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTrace:
    """One span for the whole request and those inside it. headers: traceparent and tracestate of the caller, unchecked.
    error: code of what went wrong; None = nothing did."""

    root: Span
    spans: tuple[Span, ...]
    headers: Mapping[str, str]
    error: str | None = None


class TraceSink(Protocol):
    """Takes finished traces; returns at once, and raises nothing."""

    def record(self, trace: RequestTrace) -> None: ...


class TimedText(OutputText):
    """Adds up the time that detokenizing and stop strings take. Monotonic seconds."""

    __slots__ = ("busy_s", "first_s", "last_s")

    def __init__(self, text: OutputText) -> None:
        super().__init__(text._detokenizer, text._matcher)
        self.busy_s = 0.0
        self.first_s: float | None = None
        self.last_s = 0.0

    def push(self, token_id: int) -> TextPiece:
        """See ``OutputText``."""
        started_s = time.monotonic()
        piece = super().push(token_id)
        self._add(started_s)
        return piece

    def finish(self) -> TextPiece:
        """See ``OutputText``."""
        started_s = time.monotonic()
        piece = super().finish()
        self._add(started_s)
        return piece

    def _add(self, started_s: float) -> None:
        if self.first_s is None:
            self.first_s = started_s
        self.last_s = time.monotonic()
        self.busy_s += self.last_s - started_s


class TracedGeneration(Generation):
    """Tells its trace when the first delta and the terminal are taken for writing."""

    def __init__(self, *, text: OutputText, **others: Any) -> None:
        self.timed_text = TimedText(text)
        self.trace: _OpenTrace | None = None
        self.outcome: Done | Failure | None = None
        self.first_taken_s: float | None = None
        super().__init__(text=self.timed_text, **others)

    def take(self) -> Outcome | None:
        """See ``Generation``."""
        taken = super().take()
        if isinstance(taken, Delta) and self.first_taken_s is None:
            self.first_taken_s = time.monotonic()
        elif isinstance(taken, Done | Failure):
            self.outcome = taken  # A good end that came too late to be read is none.
            if self.trace is not None:
                self.trace.choice_ends(self)
        return taken

    def cancel(self, reason: CancelReason) -> None:
        """See ``Generation``. Behind the end it says that nobody takes that any more; but for a deadline, which makes
        another end of it."""
        super().cancel(reason)
        if self.trace is not None and reason is not CancelReason.DEADLINE:
            self.trace.choice_ends(self)


class TracedService(Service):
    """Makes a trace of every request, refused ones too."""

    def __init__(self, *arguments: Any, sink: TraceSink, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self._sink = sink
        self._make_generation = TracedGeneration

    async def start(self, endpoint: Endpoint | str, body: Mapping[str, object], **terms: Any) -> Job:
        """See ``Service``."""
        trace = _OpenTrace(self._sink, self.model_names[0])
        try:
            job = await super().start(endpoint, body, **terms)
        except ApiError as error:
            trace.refused(endpoint, error.code)
            raise
        except asyncio.CancelledError:
            trace.refused(endpoint, FinishReason.CANCELLED.value)
            raise
        except Exception:
            trace.refused(endpoint, ErrorCode.INTERNAL)
            raise
        trace.accepted(job)
        return job

    def on_end(self, generation: Generation, outcome: Done | Failure, now_s: float) -> None:
        """See ``Service``."""
        super().on_end(generation, outcome, now_s)
        if isinstance(generation, TracedGeneration):
            generation.outcome = outcome
            if generation.trace is not None and _is_abandoned(outcome):
                generation.trace.choice_ends(generation)


def _is_abandoned(outcome: Done | Failure) -> bool:
    """A client that has left takes nothing any more."""
    return isinstance(outcome, Done) and outcome.finish_reason is FinishReason.CANCELLED


class _OpenTrace:
    """One request from its arrival to the end of its last choice."""

    def __init__(self, sink: TraceSink, model: str) -> None:
        self._sink = sink
        self._model = model
        self._headers = caller()
        self._start_s = time.monotonic()
        self._start_ns = time.time_ns()
        self._job: Job | None = None
        self._open: set[int] = set()
        self._spans: list[Span] = []

    def refused(self, endpoint: Endpoint | str, code: str) -> None:
        attributes = self._attributes(OPERATIONS.get(Endpoint.CHAT if endpoint == "chat" else Endpoint.COMPLETION, ""))
        self._record({**attributes, "error.type": code}, code)

    def accepted(self, job: Job) -> None:
        self._job = job
        self._open = {generation.index for generation in job.generations}
        created_s = min(generation.created_s for generation in job.generations)
        self._spans.append(self._span("edge", self._start_s, created_s, {}))
        for generation in job.generations:
            if isinstance(generation, TracedGeneration):
                generation.trace = self

    def choice_ends(self, generation: TracedGeneration) -> None:
        """Once for each choice counts; the last one ends the request."""
        if generation.index not in self._open or generation.outcome is None or self._job is None:
            return
        self._open.discard(generation.index)
        self._spans += self._choice_spans(generation, generation.outcome)
        if not self._open:
            self._end(self._job)

    def _choice_spans(self, generation: TracedGeneration, outcome: Done | Failure) -> list[Span]:
        shared: dict[str, Attribute] = {"headrace.choice": generation.index}
        spans = []
        if isinstance(outcome, Done):
            at_s, timings = generation.created_s, outcome.timings
            for name, took_ms in (
                ("queue", timings.queue_ms),
                ("prefill", timings.prefill_ms),
                ("decode", timings.decode_ms),
            ):
                spans.append(self._span(name, at_s, at_s + took_ms / 1e3, shared))
                at_s += took_ms / 1e3
        text, now_s = generation.timed_text, time.monotonic()
        if text.first_s is not None:
            busy: dict[str, Attribute] = {**shared, "headrace.busy_ms": round(text.busy_s * 1e3, 3)}
            spans.append(self._span("detokenize", text.first_s, text.last_s, busy))
        if generation.first_taken_s is not None:
            spans.append(self._span("write", generation.first_taken_s, now_s, shared))
        return spans

    def _end(self, job: Job) -> None:
        attributes = self._attributes(OPERATIONS[job.endpoint], job.model)
        attributes["gen_ai.response.id"] = job.request_id
        attributes["gen_ai.response.model"] = self._model
        attributes |= _request_attributes(job.generations[0].request)
        outcomes = [g.outcome for g in job.generations if isinstance(g, TracedGeneration) and g.outcome is not None]
        attributes["gen_ai.usage.input_tokens"] = sum(len(g.request.prompt_ids) for g in job.generations)
        attributes["gen_ai.usage.output_tokens"] = sum(g.completion_tokens for g in job.generations)
        done = [outcome for outcome in outcomes if isinstance(outcome, Done)]
        reasons = tuple(o.finish_reason.value if isinstance(o, Done) else "error" for o in outcomes)
        attributes["gen_ai.response.finish_reasons"] = reasons
        attributes["headrace.cached_tokens"] = sum(outcome.usage.cached_tokens for outcome in done)
        attributes["headrace.preemptions"] = sum(outcome.timings.preemptions for outcome in done)
        codes = [outcome.error.code for outcome in outcomes if isinstance(outcome, Failure)]
        if codes:
            attributes["error.type"] = codes[0]
        self._record(attributes, codes[0] if codes else None)

    def _attributes(self, operation: str, model: str | None = None) -> dict[str, Attribute]:
        """What every trace has, by the semantic conventions of OpenTelemetry for generative AI."""
        return {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._model if model is None else model,
        }

    def _record(self, attributes: dict[str, Attribute], error: str | None) -> None:
        name = f"{attributes['gen_ai.operation.name']} {attributes['gen_ai.request.model']}"
        root = self._span(name, self._start_s, time.monotonic(), attributes)
        self._sink.record(RequestTrace(root=root, spans=tuple(self._spans), headers=self._headers, error=error))

    def _span(self, name: str, start_s: float, end_s: float, attributes: Mapping[str, Attribute]) -> Span:
        return Span(name=name, start_ns=self._ns(start_s), end_ns=self._ns(end_s), attributes=attributes)

    def _ns(self, at_s: float) -> int:
        return self._start_ns + round((at_s - self._start_s) * 1e9)


def _request_attributes(request: Request) -> dict[str, Attribute]:
    sampling = request.sampling
    return {
        "gen_ai.request.max_tokens": request.stop.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
    }
