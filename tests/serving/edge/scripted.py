"""A service whose generations do what the request's body, or the test, says. No engine, real Generation objects."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.serving.core.events import Finished, Timings, TokenEvent
from headrace.serving.core.plan import TokenLogprobs
from headrace.serving.core.request import CancelReason, FinishReason, Request, RequestId, SamplingParams, StopRule
from headrace.serving.core.text import Detokenizer, OutputText, StopMatcher
from headrace.serving.edge.bodies import JobOptions, parse_body
from headrace.serving.edge.engine_client import EngineLost
from headrace.serving.edge.errors import ApiError, ErrorCode
from headrace.serving.edge.fields import Endpoint
from headrace.serving.edge.generation import Done, Failure, Generation
from headrace.serving.edge.job import Job
from headrace.serving.edge.pacing import CallLater
from headrace.serving.edge.terms import Terms

BIG_TOKEN = 256
TOKEN_BYTES = (*(bytes([i]) for i in range(256)), b"y" * 4096)
TIMINGS = Timings(queue_ms=1.0, prefill_ms=2.0, decode_ms=3.0, first_token_ms=4.0, preemptions=0)


class Unwatched:
    def on_token(self, generation: Generation, now_s: float, previous_s: float | None) -> None: ...
    def on_end(self, generation: Generation, outcome: Done | Failure, now_s: float) -> None: ...
    def on_unread_at_deadline(self, generation: Generation) -> None: ...


@dataclass(eq=False)
class FakeTimer:
    due_ms: float
    callback: Callable[[], None]
    waiting: "list[FakeTimer]"

    def cancel(self) -> None:
        self.waiting.remove(self)


@dataclass
class FakeTimers:
    """Timers in a time that only the test moves."""

    now_ms: float = 0
    waiting: list[FakeTimer] = field(default_factory=list)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> FakeTimer:
        timer = FakeTimer(self.now_ms + round(delay_s * 1000), callback, self.waiting)
        self.waiting.append(timer)
        return timer

    def advance(self, ms: float) -> None:
        self.now_ms += ms
        for timer in [timer for timer in self.waiting if timer.due_ms <= self.now_ms]:
            self.waiting.remove(timer)
            timer.callback()


class Script:
    """A job and the hand that drives it. A cancel ends every choice as the engine would."""

    def __init__(
        self,
        number: int,
        *,
        endpoint: Endpoint = Endpoint.COMPLETION,
        choices: int = 1,
        options: JobOptions | None = None,
        ends_when_cancelled: bool = True,
        call_later: CallLater | None = None,
    ) -> None:
        self.cancels: list[CancelReason] = []
        self.sent = [0] * choices
        self._ends_when_cancelled = ends_when_cancelled
        options = options or JobOptions()
        self.job = Job(
            request_id=f"req_{number:032x}",
            endpoint=endpoint,
            model="scripted",
            created=1,
            queue_depth=0,
            contract="fp_test",
            options=options,
            generations=tuple(
                Generation(
                    index=index,
                    request=Request(
                        request_id=RequestId(index),
                        prompt_ids=(1, 2, 3),
                        sampling=SamplingParams(),
                        stop=StopRule(max_tokens=10**6),
                    ),
                    text=OutputText(Detokenizer(TOKEN_BYTES, frozenset()), StopMatcher((), False)),
                    token_bytes=TOKEN_BYTES,
                    cancel_engine=self._cancel,
                    watcher=Unwatched(),
                    keep_token_ids=options.return_token_ids,
                    pacing=options.pacing,
                    call_later=call_later,
                )
                for index in range(choices)
            ),
        )

    def tokens(self, ids: Sequence[int], index: int = 0, logprobs: TokenLogprobs | None = None) -> None:
        for token_id in ids:
            event = TokenEvent(
                request_id=RequestId(index), index=self.sent[index], token_id=token_id, logprobs=logprobs
            )
            self.job.generations[index].on_event(event)
            self.sent[index] += 1

    def finish(self, reason: FinishReason = FinishReason.LENGTH, index: int = 0, **rest: Any) -> None:
        finished = Finished(
            request_id=RequestId(index),
            reason=reason,
            prompt_tokens=3,
            completion_tokens=self.sent[index],
            cached_tokens=0,
            timings=TIMINGS,
            **rest,
        )
        self.job.generations[index].on_event(finished)

    def lose(self) -> None:
        for generation in self.job.generations:
            generation.on_event(EngineLost("gone"))

    def _cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        self.cancels.append(reason)
        if self._ends_when_cancelled:
            self.finish(FinishReason.CANCELLED, int(request_id), cancel_reason=reason)


class ScriptedService:
    """body: ``text`` or ``big`` (number of 4 KiB tokens) to say, every_s between tokens (0: all at once), ``hold``:
    say nothing until the test does, ``refuse``: an error code, ``prepare_s``: time before the answer;
    ``stream_options`` and ``return_token_ids`` as in any body."""

    model_names = ("scripted",)
    max_context = 4096

    def __init__(self) -> None:
        self.scripts: list[Script] = []
        self.tenants: list[str] = []
        self.terms: list[Terms | None] = []
        self.given_up = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> int:
        return sum(not generation.is_ended for script in self.scripts for generation in script.job.generations)

    contract_hashes = (f"fp_{'1' * 64}", f"nm_{'2' * 64}")

    def check_expected(self, expected: Sequence[str], param: str = "expect_contract") -> None:
        if any(text not in self.contract_hashes for text in expected):
            raise ApiError(ErrorCode.CONTRACT_MISMATCH, "scripted", param=param)

    async def start(
        self,
        endpoint: Endpoint | str,
        body: Mapping[str, object],
        *,
        tenant: str = "",
        terms: Terms | None = None,
        expected: Sequence[str] = (),
    ) -> Job:
        wants: dict[str, Any] = dict(body)
        try:
            await asyncio.sleep(wants.get("prepare_s", 0))
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        self.check_expected(expected)
        if "refuse" in wants:
            raise ApiError(ErrorCode(wants["refuse"]), "scripted", retry_after_ms=500)
        presented = {name: wants[name] for name in ("stream_options", "return_token_ids") if name in wants}
        options = parse_body(Endpoint.COMPLETION, {"prompt": "", **presented}).options
        script = Script(len(self.scripts), endpoint=Endpoint(endpoint), options=options)
        self.scripts.append(script)
        self.tenants.append(tenant)
        self.terms.append(terms)
        if not wants.get("hold"):
            ids = [BIG_TOKEN] * wants["big"] if "big" in wants else list(str(wants.get("text", "")).encode())
            task = asyncio.create_task(self._say(script, ids, wants.get("every_s", 0)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return script.job

    async def _say(self, script: Script, ids: list[int], every_s: float) -> None:
        for token_id in ids:
            if script.cancels:
                return
            script.tokens([token_id])
            if every_s:
                await asyncio.sleep(every_s)
        if not script.cancels:
            script.finish()
