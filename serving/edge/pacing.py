"""When new output of a choice may become a delta: ``stream_options.chunk_tokens`` and ``chunk_ms``."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Timer(Protocol):
    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], Timer]
"""As ``loop.call_later``: after so many seconds, call this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    """A delta is due with so many new tokens, or so many ms after the first of them: whichever comes first.

    Both None: at once. At the end of a choice everything is due.
    """

    tokens: int | None = None
    ms: int | None = None


AT_ONCE = Pacing()


class Pacer:
    """Keeps the pace of one choice, with at most one timer."""

    def __init__(self, pacing: Pacing, on_time: Callable[[], None], call_later: CallLater | None = None) -> None:
        """on_time: called when output has waited for long enough. call_later: None is that of the running loop."""
        self._is_free = pacing == AT_ONCE
        self._tokens = pacing.tokens
        self._delay_s = None if pacing.ms is None else pacing.ms / 1000
        self._on_time = on_time
        self._call_later = call_later
        self._timer: Timer | None = None
        self._time_is_up = False

    def is_due(self, num_waiting: int) -> bool:
        """num_waiting: tokens that no delta has reported."""
        return self._is_free or self._time_is_up or (self._tokens is not None and num_waiting >= self._tokens)

    def on_token(self, num_waiting: int) -> None:
        """A token came; the first that waits starts the timer."""
        if self._delay_s is not None and self._timer is None and not self.is_due(num_waiting):
            call_later = self._call_later or asyncio.get_running_loop().call_later
            self._timer = call_later(self._delay_s, self._up)

    def reset(self) -> None:
        """Nothing waits any more."""
        self._time_is_up = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _up(self) -> None:
        self._timer, self._time_is_up = None, True
        self._on_time()
