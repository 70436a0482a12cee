"""One choice of a request: token events of the engine in, merged text deltas and exactly one terminal out.

Everything unsent is merged into one pending delta, so a slow reader costs memory in proportion to the output and never
holds cache pages. Work per token is constant: bytes of the token through an incremental decoder, characters of the
text through the stop matcher.

Rules that hold in every mode:

* A stop id counts as a token and appears in token_ids and logprobs; its text does not, unless stop text is included.
* Deltas keep the pace that the request asked for (``pacing``); the terminal waits for nothing.
* Usage ends with the token that completed a stop string. The engine is then told to stop; what it still sends is
  dropped. Text behind the stop string is never shown.
* A stop string counts only when the token that completes it is at least the min_tokens-th (``core.text``).
* A deadline counts until the end has been taken: what a client has not read by then it does not get any more.
* Logprobs and token ids belong to tokens, text to characters: text may be held back (a character cut between tokens,
  a possible beginning of a stop string) while its token is already reported. At the end both are complete.
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Protocol

from headrace.serving.core.events import Finished, Timings, TokenEvent
from headrace.serving.core.plan import TokenLogprobs
from headrace.serving.core.request import CancelReason, FinishReason, Request, RequestId
from headrace.serving.core.text import OutputText, TextPiece
from headrace.serving.edge.errors import ApiError, deadline_exceeded, engine_lost, from_finished, from_rejection
from headrace.serving.edge.pacing import AT_ONCE, CallLater, Pacer, Pacing
from headrace.serving.engine.messages import Refused


@dataclass(frozen=True, slots=True)
class TopLogprob:
    token_id: int
    token_bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class ChosenLogprob:
    """Of the model's own distribution, before bias, penalties and temperature. rank: 1 = most likely.

    top: sorted downwards, ties by lower id; the chosen token is in it only when it is among the best.
    """

    token_id: int
    token_bytes: bytes
    logprob: float
    rank: int
    top: tuple[TopLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Everything new since the last take.

    text may be empty while num_tokens is not. token_ids is empty unless the request asked for them; logprobs likewise.
    first: no earlier delta of this choice exists (it carries the role of a chat). completion_tokens: so far.
    """

    text: str
    num_tokens: int
    completion_tokens: int
    first: bool
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[ChosenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_json(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The good terminal. finish_reason: stop, length or cancelled. stop_reason: the stop string or stop id."""

    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    timings: Timings


@dataclass(frozen=True, slots=True)
class Failure:
    """The bad terminal: refused late, failed in the engine, or the engine was lost."""

    error: ApiError


Outcome = Delta | Done | Failure


class GenerationWatcher(Protocol):
    """Told what happens to a choice, for metrics and accounting; called on the event loop."""

    def on_token(self, generation: "Generation", now_s: float, previous_s: float | None) -> None: ...
    def on_end(self, generation: "Generation", outcome: Done | Failure, now_s: float) -> None: ...
    def on_unread_at_deadline(self, generation: "Generation") -> None:
        """The deadline passed while its output, maybe all of it, waited for the client to read."""


class Generation:
    """See the module's text. Everything runs on the event loop: no locks."""

    def __init__(
        self,
        *,
        index: int,
        request: Request,
        text: OutputText,
        token_bytes: Sequence[bytes],
        cancel_engine: Callable[[RequestId, CancelReason], None],
        watcher: GenerationWatcher,
        keep_token_ids: bool = False,
        include_stop: bool = False,
        drops_output: bool = False,
        deadline_s: float | None = None,
        pacing: Pacing = AT_ONCE,
        clock: Callable[[], float] = time.monotonic,
        call_later: CallLater | None = None,
    ) -> None:
        """index: of the choice. text: fresh. include_stop: whether a stop id's text is shown. drops_output: the request
        only warms the cache: its one token is not reported. deadline_s: on the clock. call_later: see Pacer."""
        self.index = index
        self.request = request
        self.created_s = clock()
        self.first_token_s: float | None = None
        self._output = text
        self._token_bytes = token_bytes
        self._cancel_engine = cancel_engine
        self._watcher = watcher
        self._keep_token_ids = keep_token_ids
        self._include_stop = include_stop
        self.drops_output = drops_output
        self._deadline_s = deadline_s
        self._clock = clock
        self._pacer = Pacer(pacing, self._tell, call_later)
        self._stop_ids = frozenset(request.stop.stop_token_ids)
        self._last_token_s: float | None = None
        self._text = StringIO()
        self._has_text = False
        self._ids = array("I")
        self._logprobs: list[ChosenLogprob] = []
        self._num_pending = 0
        self._num_total = 0
        self._took_delta = False
        self._matched: str | None = None
        self._cancelled = False
        self._terminal: Done | Failure | None = None
        self._took_terminal = False
        self._listener: Callable[[], None] | None = None
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def is_ended(self) -> bool:
        """The terminal is known; deltas before it may still wait to be taken."""
        return self._terminal is not None

    @property
    def completion_tokens(self) -> int:
        return self._num_total

    def set_listener(self, listener: Callable[[], None]) -> None:
        """Call listener on the loop whenever take() has something; at once if it has now. One listener at a time."""
        self._listener = listener
        if self._has_something():
            listener()

    def take(self) -> Outcome | None:
        """All that is new: one merged Delta, then exactly one Done or Failure; None where there is nothing to show."""
        if not self._has_something():
            return None
        if (
            self._deadline_s is not None
            and self._clock() > self._deadline_s
            and not isinstance(self._terminal, Failure)
        ):
            return self._give_up_unread()
        if self._num_pending or self._has_text:
            delta = Delta(
                text=self._text.getvalue(),
                num_tokens=self._num_pending,
                completion_tokens=self._num_total,
                first=not self._took_delta,
                token_ids=tuple(self._ids),
                logprobs=tuple(self._logprobs),
            )
            self._text, self._has_text = StringIO(), False
            self._ids, self._logprobs, self._num_pending = array("I"), [], 0
            self._took_delta = True
            self._pacer.reset()
            return delta
        self._took_terminal = True
        return self._terminal

    def _give_up_unread(self) -> Failure:
        failure = Failure(deadline_exceeded())
        self.cancel(CancelReason.DEADLINE)
        self._watcher.on_unread_at_deadline(self)
        self._text, self._has_text = StringIO(), False
        self._ids, self._logprobs, self._num_pending = array("I"), [], 0
        self._took_terminal = True  # Before the end is told: whoever takes it now need not be woken for it.
        if self._terminal is None:
            self._end(failure)
        self._terminal = failure
        return failure

    async def next(self) -> Outcome:
        """Wait for take(). Raises RuntimeError after the terminal."""
        while (item := self.take()) is None:
            if self._took_terminal:
                raise RuntimeError("next() was called after the terminal of a generation")
            self._changed.clear()
            await self._changed.wait()
        return item

    async def wait_end(self) -> None:
        """Wait until the terminal is known, without taking anything."""
        await self._ended.wait()

    def cancel(self, reason: CancelReason) -> None:
        """Ask the engine to stop; the terminal follows. Idempotent, and without effect after the end."""
        if self._terminal is None and not self._cancelled:
            self._cancelled = True
            self._cancel_engine(self.request.request_id, reason)

    def on_event(self, event: object) -> None:
        """Sink of the engine client: TokenEvent, Finished, Refused, or EngineLost (anything else)."""
        if self._terminal is not None:
            return
        if isinstance(event, TokenEvent):
            self._on_token(event)
        elif isinstance(event, Finished):
            self._on_finished(event)
        elif isinstance(event, Refused):
            self._end(Failure(from_rejection(event.rejection)))
        else:
            self._end(Failure(engine_lost()))

    def _on_token(self, event: TokenEvent) -> None:
        if self._matched is not None:
            return
        now_s = self._clock()
        self._watcher.on_token(self, now_s, self._last_token_s)
        self._last_token_s = now_s
        if self.first_token_s is None:
            self.first_token_s = now_s
        if self.drops_output:
            return
        self._num_pending += 1
        self._num_total += 1
        self._pacer.on_token(self._num_pending)
        if self._keep_token_ids:
            self._ids.append(event.token_id)
        if event.logprobs is not None:
            self._logprobs.append(self._named(event.token_id, event.logprobs))
        if event.token_id not in self._stop_ids or self._include_stop:
            self._add_text(self._output.push(event.token_id))
            if self._matched is not None:
                self.cancel(CancelReason.STOP_STRING)
        self._tell()

    def _add_text(self, piece: TextPiece) -> None:
        self._matched = piece.stop
        if piece.text:
            self._text.write(piece.text)
            self._has_text = True

    def _on_finished(self, finished: Finished) -> None:
        if self._matched is None:
            self._add_text(self._output.finish())
        error = from_finished(finished) if self._matched is None else None
        if error is not None:
            self._end(Failure(error))
            return
        stop_reason: str | int | None = self._matched
        reason = FinishReason.STOP if self._matched is not None else finished.reason
        if self.drops_output and reason is FinishReason.STOP:
            reason = FinishReason.LENGTH
        if stop_reason is None and reason is FinishReason.STOP:
            stop_reason = finished.stop_token_id
        self._end(
            Done(
                finish_reason=reason,
                stop_reason=stop_reason,
                usage=Usage(
                    prompt_tokens=len(self.request.prompt_ids),
                    completion_tokens=self._num_total,
                    cached_tokens=finished.cached_tokens,
                ),
                timings=finished.timings,
            )
        )

    def _named(self, token_id: int, logprobs: TokenLogprobs) -> ChosenLogprob:
        return ChosenLogprob(
            token_id=token_id,
            token_bytes=self._bytes_of(token_id),
            logprob=logprobs.chosen,
            rank=logprobs.rank,
            top=tuple(TopLogprob(i, self._bytes_of(i), value) for i, value in logprobs.top),
        )

    def _bytes_of(self, token_id: int) -> bytes:
        """A vocabulary padded on the device has ids without a token."""
        return self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""

    def _end(self, terminal: Done | Failure) -> None:
        self._terminal = terminal
        self._watcher.on_end(self, terminal, self._clock())
        self._ended.set()
        self._pacer.reset()
        self._tell()

    def _has_something(self) -> bool:
        if self._terminal is not None:
            return not self._took_terminal
        is_visible = self._has_text or bool(self._ids) or bool(self._logprobs)
        return is_visible and self._pacer.is_due(self._num_pending)

    def _tell(self) -> None:
        if self._has_something():
            self._changed.set()
            if self._listener is not None:
                self._listener()
