"""One stream of the native WebSocket: from a started job to numbered frames, and the log that lets it be resumed.

Whoever shows the stream, a session, may change while it runs (``resume``); numbers and text do not notice.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import msgspec
from msgspec import UNSET

from headrace.serving.core.events import Timings
from headrace.serving.core.request import CancelReason
from headrace.serving.edge import messages
from headrace.serving.edge.errors import ApiError
from headrace.serving.edge.fields import Endpoint
from headrace.serving.edge.generation import ChosenLogprob, Delta, Done, Failure, Generation
from headrace.serving.edge.job import Job
from headrace.serving.edge.message_parts import ChoiceEnd, Preemption, Times
from headrace.serving.edge.obfuscation import obfuscation
from headrace.serving.edge.openai_chunks import chat_logprobs, total_usage

LOGPROBS_PER_FRAME = 256
"""20 alternatives take about 2.5 kB a token; clients commonly refuse messages over 1 MiB."""


class StreamOwner(Protocol):
    """Who shows the stream's frames."""

    def mark_ready(self, stream: "Stream") -> None: ...


@dataclass(slots=True)
class ReplayBudget:
    """Bytes that the logs of all detached streams of the server may hold together."""

    limit_bytes: int
    used_bytes: int = 0


class ReplayLog:
    """The frames of a detached stream, the oldest dropped when they exceed the stream's or the server's limit."""

    def __init__(self, limit_bytes: int, budget: ReplayBudget) -> None:
        self._frames: deque[tuple[int, str]] = deque()
        self._size = 0
        self._limit_bytes = limit_bytes
        self._budget = budget
        self._next_seq = 0

    def append(self, seq: int, frame: str) -> None:
        self._frames.append((seq, frame))
        self._next_seq = seq + 1
        self._size += len(frame)
        self._budget.used_bytes += len(frame)
        while self._frames and (self._size > self._limit_bytes or self._budget.used_bytes > self._budget.limit_bytes):
            self._drop_oldest()

    def after(self, seq: int | None) -> list[str] | None:
        """Frames behind number seq (None: all). None when some of them are gone, or seq was never sent."""
        wanted = 0 if seq is None else seq + 1
        oldest = self._frames[0][0] if self._frames else self._next_seq
        if not oldest <= wanted <= self._next_seq:
            return None
        return [frame for number, frame in self._frames if number >= wanted]

    def clear(self) -> None:
        while self._frames:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, frame = self._frames.popleft()
        self._size -= len(frame)
        self._budget.used_bytes -= len(frame)


class Stream:
    """created, then deltas, then exactly one done or error; all on the event loop."""

    def __init__(self, stream_id: str, *, endpoint: Endpoint, log: ReplayLog | None, owner: StreamOwner) -> None:
        """log: only of a detached stream."""
        self.id = stream_id
        self.owner: StreamOwner | None = owner
        self._endpoint = endpoint
        self._log = log
        self._job: Job | None = None
        self._stop_preparing: Callable[[], object] | None = None
        self._cancelled: CancelReason | None = None
        self._waiting: deque[str] = deque()  # made, not yet shown
        self._next_seq = 0
        self._turn = 0
        self._done: dict[int, Done] = {}
        self._has_terminal = False

    @property
    def is_detached(self) -> bool:
        return self._log is not None

    @property
    def is_over(self) -> bool:
        """The terminal frame has been shown."""
        return self._has_terminal and not self._waiting

    # What happens to it

    def preparing(self, stop: Callable[[], object]) -> None:
        """The request is being prepared; stop() gives that up."""
        self._stop_preparing = stop

    def started(self, job: Job) -> None:
        """Admitted. When somebody cancelled meanwhile, the job is cancelled at once."""
        self._stop_preparing = None
        if self._has_terminal:
            job.cancel(self._cancelled or CancelReason.DISCONNECT)
            return
        self._job = job
        self._show(self._created(job))
        if self._cancelled is not None:
            job.cancel(self._cancelled)
        for generation in job.generations:
            generation.set_listener(self._notify)

    def fail(self, error: ApiError) -> None:
        """End it with an error frame; without effect after a terminal."""
        if not self._has_terminal:
            self._stop_preparing = None
            self._has_terminal = True
            self._show(self._error(error))

    def give_up(self, reason: CancelReason, error: ApiError) -> None:
        """The server ends it now: stop the work, and show the error."""
        stop = self._stop_preparing
        self.cancel(reason)
        self.fail(error)
        if stop is not None:
            stop()

    def cancel(self, reason: CancelReason) -> None:
        """Ask for the end; done follows. Idempotent."""
        if self._cancelled is None:
            self._cancelled = reason
            if self._job is not None:
                self._job.cancel(reason)

    def abandon(self, reason: CancelReason) -> None:
        """Nobody will read it again: stop everything and free the log."""
        self.owner = None
        self.cancel(reason)
        if self._stop_preparing is not None:
            self._stop_preparing()
            self._stop_preparing = None
        self._has_terminal = True
        self._waiting.clear()
        if self._log is not None:
            self._log.clear()

    def replay_after(self, seq: int | None) -> list[str] | None:
        """The frames that a resume would repeat; None when it cannot be resumed there."""
        return None if self._log is None else self._log.after(seq)

    def move(self, owner: StreamOwner, repeat: list[str]) -> None:
        """Go on under another owner, after the frames of repeat. What still waits is in the log, hence in repeat."""
        self._waiting = deque(repeat)
        self.owner = owner
        self._notify()

    # What is shown

    def take_frame(self) -> str | None:
        """The next frame, everything new of one choice merged; None where there is nothing."""
        if self._waiting:
            return self._waiting.popleft()
        if self._job is None or self._has_terminal:
            return None
        generations = self._job.generations
        for _ in generations:
            generation = generations[self._turn]
            self._turn = (self._turn + 1) % len(generations)
            outcome = generation.take()
            if isinstance(outcome, Delta):
                return self._delta(generation, outcome)
            if isinstance(outcome, Failure):
                self._job.cancel(CancelReason.CLIENT)
                self._has_terminal = True
                return self._numbered(self._error(outcome.error))
            if isinstance(outcome, Done):
                self._done[generation.index] = outcome
                if len(self._done) == len(generations):
                    self._has_terminal = True
                    return self._numbered(self._all_done(self._job.contract))
        return None

    def _notify(self) -> None:
        if self.owner is not None:
            self.owner.mark_ready(self)

    def _show(self, message: messages.ServerMessage) -> None:
        self._waiting.append(self._numbered(message))
        self._notify()

    def _numbered(self, message: messages.ServerMessage) -> str:
        frame = messages.encode(message)
        if self._log is not None:
            self._log.append(self._next_seq, frame)
        self._next_seq += 1
        return frame

    def _created(self, job: Job) -> messages.Created:
        frame = messages.Created(
            id=self.id,
            seq=self._next_seq,
            request_id=job.request_id,
            model=job.model,
            created=job.created,
            contract=job.contract,
            queue_depth=job.queue_depth,
            choices=len(job.generations),
            ignored_fields=job.options.ignored_fields,
        )
        if not job.options.return_token_ids:
            return frame
        prompts = tuple(job.prompt_ids(index) for index in range(len(job.generations)))
        return msgspec.structs.replace(frame, prompt_token_ids=prompts)

    def _delta(self, generation: Generation, delta: Delta) -> str:
        """The frame of a merged delta; where logprobs would make it huge, the first of several."""
        assert self._job is not None
        options = self._job.options
        for start in range(0, max(1, len(delta.logprobs)), LOGPROBS_PER_FRAME):
            part = slice(start, start + LOGPROBS_PER_FRAME if options.logprobs else None)
            is_first = start == 0
            text, ids, logprobs = delta.text if is_first else "", delta.token_ids[part], delta.logprobs[part]
            entries = _entries(logprobs)
            frame = messages.Delta(
                id=self.id,
                seq=self._next_seq,
                index=generation.index,
                text=text,
                n=len(logprobs) if options.logprobs else delta.num_tokens,
                role="assistant" if is_first and delta.first and self._endpoint is Endpoint.CHAT else UNSET,
                token_ids=ids if options.return_token_ids else UNSET,
                logprobs=entries if options.logprobs else UNSET,
                obfuscation=obfuscation(text, ids, entries) if options.include_obfuscation else UNSET,
            )
            self._waiting.append(self._numbered(frame))
        return self._waiting.popleft()

    def _all_done(self, contract: str) -> messages.Done:
        ends = [self._done[index] for index in sorted(self._done)]
        times = [end.timings for end in ends]
        first = [time.first_token_ms for time in times if time.first_token_ms is not None]
        return messages.Done(
            id=self.id,
            seq=self._next_seq,
            choices=tuple(
                ChoiceEnd(index=index, finish_reason=end.finish_reason.value, stop_reason=end.stop_reason)
                for index, end in enumerate(ends)
            ),
            usage=total_usage([end.usage for end in ends]).as_json(),
            metrics=Times(
                queue_ms=max(time.queue_ms for time in times),
                prefill_ms=max(time.prefill_ms for time in times),
                first_token_ms=max(first, default=None),
                decode_ms=max(time.decode_ms for time in times),
                preemptions=sum(time.preemptions for time in times),
                preempted_ms=max(time.preempted_ms for time in times),
                preempted=_preempted(times),
                cached_tokens=sum(end.usage.cached_tokens for end in ends),
            ),
            contract=contract,
        )

    def _error(self, error: ApiError) -> messages.Error:
        return messages.error_frame(error, stream_id=self.id, seq=self._next_seq)


def _preempted(times: Sequence[Timings]) -> tuple[Preemption, ...]:
    """Over all choices, in the order in which they are first named."""
    counts: Counter[tuple[str, str]] = Counter()
    for time in times:
        for entry in time.preempted:
            counts[entry.reason.value, entry.action.value] += entry.count
    return tuple(Preemption(reason=r, action=a, count=count) for (r, a), count in counts.items())


def _entries(logprobs: Sequence[ChosenLogprob]) -> list[dict[str, Any]]:
    return cast(list[dict[str, Any]], chat_logprobs(logprobs)["content"])
