"""Requests to completions in one process: the step loop without sockets."""

import contextlib
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.serving.core.events import Event, Finished, Timings, TokenEvent
from headrace.serving.core.plan import TokenLogprobs
from headrace.serving.core.request import (
    CancelReason,
    FinishReason,
    Rejection,
    RejectionReason,
    Request,
    RequestId,
)
from headrace.serving.core.text import OutputText
from headrace.serving.edge.generation import Usage
from headrace.serving.engine.engine import StepLoop

OnText = Callable[[int, str], None]
"""(index of the prompt, new text), called from inside the call that generates."""


class RequestError(ValueError):
    """A prompt or parameter that was refused; index: position of the prompt in the call."""

    def __init__(self, index: int, rejection: Rejection) -> None:
        super().__init__(f"prompt {index}: {rejection.message}")
        self.index = index
        self.rejection = rejection


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What became of one prompt.

    token_ids: generated; a stop id is among them, its text is not part of text. They end with the token that completed
    a stop string. stop_reason: that string, or the stop id. logprobs: one per token when asked for, else None.
    error: why, when finish_reason is ERROR.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    metrics: Timings
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values; logprobs and error only where there are any."""
        shown: dict[str, Any] = {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "prompt_token_ids": list(self.prompt_token_ids),
            "finish_reason": str(self.finish_reason),
            "stop_reason": self.stop_reason,
            "usage": self.usage.as_json(),
            "metrics": msgspec.to_builtins(self.metrics),
        }
        if self.logprobs is not None:
            shown["logprobs"] = msgspec.to_builtins(self.logprobs)
        if self.error is not None:
            shown["error"] = self.error
        return shown


@dataclass(slots=True)
class _Work:
    """One request on its way. matched: the stop string that ended it."""

    index: int
    request: Request
    output: OutputText
    include_stop: bool
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    matched: str | None = None
    on_text: OnText | None = None

    def add_text(self, text: str) -> None:
        self.pieces.append(text)
        if text and self.on_text is not None:
            self.on_text(self.index, text)


def complete(
    loop: StepLoop,
    requests: Sequence[tuple[Request, OutputText]],
    *,
    include_stop: bool = False,
    on_text: OnText | None = None,
) -> list[Completion]:
    """Run all requests to their end, batched as they come and fit; results in the order given.

    on_text: told of each piece of text as it comes, in order for each prompt.
    Every output text must be fresh. Raises RequestError (nothing of the call goes on then), EngineFailure or
    InvariantError.
    """
    waiting = deque(
        _Work(i, request, text, include_stop, on_text=on_text) for i, (request, text) in enumerate(requests)
    )
    live: dict[RequestId, _Work] = {}
    done: list[Completion | None] = [None] * len(requests)
    with _cancelled_at_exit(loop, live), _interrupts_deferred() as check_interrupt:
        while waiting or live:
            check_interrupt()
            _submit(loop, waiting, live)
            output = loop.turn()
            events: Iterable[Event] = () if output is None else output.events
            for work, end in _apply(loop, live, events):
                done[work.index] = _completion(work, end)
    return [completion for completion in done if completion is not None]


@contextlib.contextmanager
def _cancelled_at_exit(loop: StepLoop, live: dict[RequestId, _Work]) -> Iterator[None]:
    """Whatever ends the call (an interrupt, say), the next one starts with an empty scheduler."""
    try:
        yield
    finally:
        for request_id in live:
            loop.cancel(request_id, CancelReason.CLIENT)


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C back until the yielded check: in the middle of a step it would leave half a state behind."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield lambda: None
        return
    came: list[int] = []

    def check() -> None:
        if came:
            came.clear()
            signal.signal(signal.SIGINT, previous)
            signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield check
        check()
    finally:
        signal.signal(signal.SIGINT, previous)


def _submit(loop: StepLoop, waiting: deque[_Work], live: dict[RequestId, _Work]) -> None:
    """As many as the queue takes; a full queue is no error here."""
    while waiting:
        work = waiting[0]
        rejection = loop.submit(work.request)
        if rejection is not None:
            if rejection.reason is RejectionReason.QUEUE_FULL and live:
                return
            raise RequestError(work.index, rejection)
        live[work.request.request_id] = waiting.popleft()


def _apply(loop: StepLoop, live: dict[RequestId, _Work], events: Iterable[Event]) -> Iterator[tuple[_Work, Finished]]:
    """Take events; yields the requests that they, or the stop strings in them, end."""
    for event in events:
        work = live.get(event.request_id)
        if work is None:
            continue
        if isinstance(event, TokenEvent):
            _add_token(work, event)
            if work.matched is not None:
                yield from _apply(loop, live, loop.cancel(event.request_id, CancelReason.STOP_STRING))
        elif isinstance(event, Finished):
            del live[event.request_id]
            yield work, event


def _add_token(work: _Work, event: TokenEvent) -> None:
    work.token_ids.append(event.token_id)
    if event.logprobs is not None:
        work.logprobs.append(event.logprobs)
    if event.token_id not in work.request.stop.stop_token_ids or work.include_stop:
        piece = work.output.push(event.token_id)
        work.add_text(piece.text)
        work.matched = piece.stop


def _completion(work: _Work, end: Finished) -> Completion:
    if work.matched is None:
        rest = work.output.finish()
        work.add_text(rest.text)
        work.matched = rest.stop
    stop_reason: str | int | None = work.matched
    if stop_reason is None and end.reason is FinishReason.STOP:
        stop_reason = end.stop_token_id
    return Completion(
        text="".join(work.pieces),
        token_ids=tuple(work.token_ids),
        prompt_token_ids=work.request.prompt_ids,
        finish_reason=FinishReason.STOP if work.matched is not None else end.reason,
        stop_reason=stop_reason,
        usage=Usage(
            prompt_tokens=end.prompt_tokens,
            completion_tokens=len(work.token_ids),
            cached_tokens=end.cached_tokens,
        ),
        metrics=end.timings,
        logprobs=None if work.request.sampling.num_logprobs is None else tuple(work.logprobs),
        error=end.error_message,
    )
