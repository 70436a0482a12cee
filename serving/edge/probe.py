"""The readiness probe: fixed prompts through the very engine and scheduler that serve, held against a record.

It runs after each start of the engine, before requests are taken, and on an interval. Its requests have a tenant that
no key can name and prefix-cache entries that nothing shares, so every run computes. Metrics of requests do not count
them; gauges and counters of the engine do, at most as many rows as the record has prompts.

A part of the contract, a prompt's ids, a greedy id or a logprob that is not as recorded fails the probe, until the
engine starts anew: what was wrong once is not trusted again. A run that does not end in time, or finds the queue full,
says nothing once one has passed; before that it is tried again.
"""

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from headrace.serving.core.admission import Limits, validate
from headrace.serving.core.contract import Contract, differences
from headrace.serving.core.events import Finished, TokenEvent
from headrace.serving.core.probe import (
    TOP_WIDTH,
    ChatTurn,
    ProbePrompt,
    ProbeRecord,
    TopIds,
    answer_fault,
    choose,
    differs_text,
)
from headrace.serving.core.request import CancelReason, FinishReason, Rejection, Request, RequestId, SamplingParams
from headrace.serving.edge.engine_client import EngineUnavailable, Sink
from headrace.serving.edge.errors import ApiError, ErrorCode
from headrace.serving.edge.probe_view import ProbeStatus
from headrace.serving.engine.messages import Ready, Refused

PROBE_TENANT = ":probe"
"""No name of a key has a colon."""
RETRY_S = 5.0
"""After a run before the first pass that was late or refused."""

log = logging.getLogger("headrace.probe")


class ProbeEngine(Protocol):
    """The part of ``EngineClient`` that a probe uses."""

    @property
    def ready_info(self) -> Ready | None: ...
    def next_request_id(self) -> RequestId: ...
    def submit(self, request: Request, sink: Sink) -> None: ...
    def cancel(self, request_id: RequestId, reason: CancelReason) -> None: ...


class ProbeText(Protocol):
    """The server's own way from text, or from messages, to prompt ids. Raises ApiError."""

    def __call__(self, text: str | None, messages: tuple[ChatTurn, ...] | None) -> Awaitable[Sequence[int]]: ...


class ProbeCounts(Protocol):
    """Where runs and the state are counted."""

    def probe_ran(self, result: str) -> None: ...
    def probe_is(self, status: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeConfig:
    """given: records of the operator; where there are some, the server must be one of them. shipped: others that may
    fit. is_required: without a record the server is not ready. interval_s: between two runs. limit_s: of one run."""

    given: tuple[ProbeRecord, ...] = ()
    shipped: tuple[ProbeRecord, ...] = ()
    is_required: bool = False
    interval_s: float = 300.0
    limit_s: float = 60.0


@dataclass(slots=True)
class _Verdict:
    """Of one engine. why: of a failure, or of what is pending."""

    ready: Ready
    status: ProbeStatus
    record: ProbeRecord | None
    why: str = ""
    num_passed: int = 0
    last_ms: float | None = None


class _Inconclusive(Exception):
    """The run proves nothing; the text is its result in metrics: late, refused or lost."""


class _Answer:
    """What comes back for one prompt."""

    def __init__(self, prompt: ProbePrompt, request: Request) -> None:
        self.prompt = prompt
        self.request = request
        self.ids: list[int] = []
        self.top: list[TopIds] = []
        self.ended: asyncio.Future[str | _Inconclusive | None] = asyncio.get_running_loop().create_future()
        """A failure of the request in the engine, or None; _Inconclusive where it did not run to its end."""

    def on_event(self, event: object) -> None:
        if isinstance(event, TokenEvent):
            self.ids.append(event.token_id)
            self.top.append(() if event.logprobs is None else event.logprobs.top)
        elif self.ended.done():
            return
        elif isinstance(event, Finished) and event.reason is not FinishReason.CANCELLED:
            failed = event.reason is FinishReason.ERROR
            self.ended.set_result(f"the engine failed it with {event.error_code}" if failed else None)
        elif isinstance(event, Finished):
            self.ended.set_result(_Inconclusive("late"))
        elif isinstance(event, Refused):
            self.ended.set_result(_Inconclusive("refused"))
        else:
            self.ended.set_result(_Inconclusive("lost"))

    def fault(self, tolerance: float, *, is_partial: bool = False) -> str | None:
        """is_partial: hold what has come so far against as many steps."""
        prompt, come = self.prompt, len(self.ids)
        if is_partial:
            prompt = replace(prompt, ids=prompt.ids[:come], top=prompt.top[:come])
        found = answer_fault(prompt, self.ids, self.top, tolerance)
        return found and f"prompt {prompt.name!r}: {found}"


class ReadinessProbe:
    """See the module's text. ``run`` is its task; all of it runs on one event loop."""

    def __init__(
        self,
        config: ProbeConfig,
        *,
        engine: ProbeEngine,
        contract: Callable[[Ready], Contract],
        encode: ProbeText,
        counts: ProbeCounts,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._engine = engine
        self._contract = contract
        self._encode = encode
        self._counts = counts
        self._vocab_size = vocab_size
        self._clock = clock
        self._verdict: _Verdict | None = None
        self._live: dict[RequestId, _Answer] = {}
        self._num_runs = 0
        self._stopping = False
        self._wake = asyncio.Event()
        self._judged = asyncio.Event()

    # What is known

    @property
    def status(self) -> str:
        verdict = self._current()
        return (ProbeStatus.PENDING if verdict is None else verdict.status).value

    @property
    def fault(self) -> str | None:
        verdict = self._current()
        if verdict is None or verdict.status is ProbeStatus.PENDING:
            return f"the probe has not passed yet: {verdict.why if verdict else 'no engine is ready'}"
        if verdict.status is ProbeStatus.FAILED:
            return f"probe failed: {verdict.why}"
        if verdict.status is ProbeStatus.UNRECORDED and self._config.is_required:
            return (
                "probe: unrecorded, and --require-probe is set; start a replica that you trust without it, record it "
                "with 'headrace probe record', and serve with --probe FILE"
            )
        return None

    def as_json(self) -> dict[str, object]:
        verdict = self._current()
        found: dict[str, object] = {"status": self.status}
        if verdict is None:
            return found
        if verdict.why:
            found["reason"] = verdict.why
        if verdict.record is not None:
            found |= {"record": verdict.record.fingerprint, "made": verdict.record.made}
            found |= {"tolerance": verdict.record.tolerance, "passed": verdict.num_passed, "last_ms": verdict.last_ms}
        return found

    async def wait_judged(self) -> str | None:
        """Until the first engine has passed, failed, or turned out to be without a record; then ``fault``."""
        await self._judged.wait()
        return self.fault

    def _current(self) -> _Verdict | None:
        """Of the engine that runs now: a new one is held against the records at once, before it gets a request."""
        ready = self._engine.ready_info
        if ready is None:
            return None
        if self._verdict is None or self._verdict.ready is not ready:
            self._verdict = self._first_look(ready)
            self._wake.set()
            self._tell(self._verdict)
        return self._verdict

    def _first_look(self, ready: Ready) -> _Verdict:
        config, contract = self._config, self._contract(ready)
        shipped = tuple(record for record in config.shipped if _fits(record, ready))
        choice = choose(config.given, shipped, contract)
        if choice.differs:
            return _Verdict(ready, ProbeStatus.FAILED, choice.nearest, differs_text(choice.differs))
        if choice.record is None:
            return _Verdict(ready, ProbeStatus.UNRECORDED, None)
        if not _fits(choice.record, ready):
            why = "the record's prompts and answers are longer than the context or the pages of this server"
            return _Verdict(ready, ProbeStatus.FAILED, choice.record, why)
        return _Verdict(ready, ProbeStatus.PENDING, choice.record, "it is running")

    def _tell(self, verdict: _Verdict) -> None:
        self._counts.probe_is(verdict.status.value)
        if verdict.status is ProbeStatus.PENDING:
            return
        self._judged.set()
        if verdict.status is ProbeStatus.FAILED:
            log.error("not ready: probe failed: %s", verdict.why)
        elif verdict.status is ProbeStatus.UNRECORDED:
            so = "not ready, since --require-probe is set" if self._config.is_required else "ready without a check"
            log.warning("probe: unrecorded, so %s; 'headrace probe record' makes a record", so)

    # Running

    def wake(self) -> None:
        """The engine's state has changed."""
        self._counts.probe_is(self.status)
        self._wake.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            verdict = self._current()
            self._wake.clear()
            wait_s = self._config.interval_s
            if verdict is not None and verdict.status in (ProbeStatus.PENDING, ProbeStatus.PASSED):
                assert verdict.record is not None
                if not self._stopping:
                    await self._once(verdict, verdict.record)
                if verdict.status is ProbeStatus.PENDING:
                    wait_s = RETRY_S
            if verdict is None or self._verdict is verdict:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), wait_s)

    async def _once(self, verdict: _Verdict, record: ProbeRecord) -> None:
        started_s = self._clock()
        try:
            why = await self._check(record, verdict.ready)
            result = "passed" if why is None else "failed"
        except _Inconclusive as inconclusive:
            why, result = None, str(inconclusive)
        except Exception:
            # Of ours, and no word about the engine; without its task the probe would stay as it is for ever.
            log.exception("a run of the probe failed by itself")
            why, result = None, "faulty"
        self._counts.probe_ran(result)
        verdict.last_ms = (self._clock() - started_s) * 1000
        if result == "failed":
            verdict.status, verdict.why = ProbeStatus.FAILED, why or ""
        elif result == "passed":
            is_first = verdict.status is ProbeStatus.PENDING
            verdict.status, verdict.why = ProbeStatus.PASSED, ""
            verdict.num_passed += 1
            log.log(logging.INFO if is_first else logging.DEBUG, "probe passed in %.0f ms", verdict.last_ms)
        elif verdict.status is ProbeStatus.PENDING:
            verdict.why = f"the last run was {result} ({self._config.limit_s:g} s are allowed); it is tried again"
            log.warning("not ready yet: of the probe %s in %g s", verdict.why, RETRY_S)
        if self._verdict is verdict:
            self._tell(verdict)

    async def _check(self, record: ProbeRecord, ready: Ready) -> str | None:
        """Why the probe fails, or None. Raises: _Inconclusive."""
        try:
            async with asyncio.timeout(self._config.limit_s):
                why = await self._text_fault(record) or await self._answers_fault(record, ready)
        except TimeoutError:
            why = self._partial_fault(record)
            if why is None:
                raise _Inconclusive("late") from None
        finally:
            self._cancel_live()
        return why

    async def _text_fault(self, record: ProbeRecord) -> str | None:
        for prompt in record.prompts:
            if prompt.text is None and prompt.messages is None:
                continue
            part = "tokenizer" if prompt.messages is None else "chat template"
            try:
                ids = tuple(await self._encode(prompt.text, prompt.messages))
            except ApiError as error:
                if error.code == ErrorCode.QUEUE_FULL:
                    raise _Inconclusive("late") from None
                if error.code == ErrorCode.INTERNAL:  # of the process that encodes, not of what it would have said
                    raise _Inconclusive("lost") from None
                return f"{part} differs: prompt {prompt.name!r} is refused with {error.code}"
            if ids != prompt.prompt_ids:
                return f"{part} differs: prompt {prompt.name!r} becomes other ids than recorded"
        return None

    async def _answers_fault(self, record: ProbeRecord, ready: Ready) -> str | None:
        self._num_runs += 1
        # As many requests as copies of the model, at least: the scheduler gives each to the one with least to do.
        for prompt in record.prompts * -(-ready.num_lanes // len(record.prompts)):
            request = self._request(prompt, ready)
            if isinstance(request, Rejection):
                return f"prompt {prompt.name!r} is not admitted: {request.message}"
            answer = self._live[request.request_id] = _Answer(prompt, request)
            try:
                self._engine.submit(request, answer.on_event)
            except EngineUnavailable:
                raise _Inconclusive("lost") from None
        answers = list(self._live.values())
        ends = [await answer.ended for answer in answers]
        for answer, end in zip(answers, ends, strict=True):
            why = f"prompt {answer.prompt.name!r}: {end}" if isinstance(end, str) else None
            why = why or answer.fault(record.tolerance, is_partial=end is not None)
            if why is not None:
                return self._in_effect(why, record, ready)
        if (stopped := next((end for end in ends if isinstance(end, _Inconclusive)), None)) is not None:
            raise stopped
        return None

    def _partial_fault(self, record: ProbeRecord) -> str | None:
        faults = (a.fault(record.tolerance, is_partial=True) for a in self._live.values() if a.ids)
        why, ready = next(filter(None, faults), None), self._engine.ready_info
        return None if why is None or ready is None else self._in_effect(why, record, ready)

    def _in_effect(self, why: str, record: ProbeRecord, ready: Ready) -> str:
        """All hashes are as recorded, so it is memory, device, kernels or compiler; what the record knows of them."""
        others = differences(record.numerics, self._contract(ready).numerics)
        hint = f"; beside the record differ {', '.join(d.part for d in others)}" if others else ""
        return f"weights differ in effect, though hashes are as recorded ({why}{hint})"

    def _request(self, prompt: ProbePrompt, ready: Ready) -> Request | Rejection:
        name = f"headrace-probe/1 {self._num_runs} {ready.model_hash}"
        return validate(
            Limits(
                vocab_size=self._vocab_size,
                max_context=ready.max_context,
                page_size=ready.page_size,
                num_usable_pages=ready.num_pages - 1,
            ),
            request_id=self._engine.next_request_id(),
            prompt_ids=prompt.prompt_ids,
            sampling=SamplingParams(temperature=0.0, num_logprobs=min(TOP_WIDTH, self._vocab_size)),
            max_tokens=len(prompt.ids),
            ignore_eos=True,
            cache_namespace=hashlib.sha256(name.encode()).digest(),
            tenant=PROBE_TENANT,
        )

    # As a ``Drainable`` of edge.server: it holds up no shutdown, and what it loses is no work.

    def begin_drain(self, limit_s: float) -> None:
        self._stopping = True
        self._cancel_live()

    async def wait_idle(self) -> None:
        """The engine says when its requests are over."""

    def abort(self) -> int:
        return 0

    def _cancel_live(self) -> None:
        for request_id, answer in list(self._live.items()):
            if not answer.ended.done():
                self._engine.cancel(request_id, CancelReason.SHUTDOWN)
                answer.ended.set_result(_Inconclusive("late"))
        self._live.clear()


def _fits(record: ProbeRecord, ready: Ready) -> bool:
    longest = max(len(prompt.prompt_ids) + len(prompt.ids) for prompt in record.prompts)
    return longest <= min(ready.max_context, (ready.num_pages - 1) * ready.page_size)
