"""States of an engine seen from outside, and the rules that tell a stuck one from a busy or idle one. Pure."""

import time
from dataclasses import dataclass
from enum import StrEnum


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class SystemClock:
    """``time.monotonic``: jumps of the wall clock change nothing here."""

    def now_s(self) -> float:
        return time.monotonic()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressLimits:
    """silent_s: an engine that owes an answer and sends no frame for so long is stuck. 9 s and a tick of at most
    ``tick_s`` keep the promise to notice within 10 s. starting_silent_s: the same before Ready, where compiling one
    program sends nothing: 10 s for a small model on a quiet machine, minutes for a large one.
    """

    silent_s: float = 9.0
    starting_silent_s: float = 300.0

    @property
    def tick_s(self) -> float:
        return min(self.silent_s / 18, 1.0)


class Watchdog:
    """Decides from the times of frames, ticks and debts whether the engine is stuck.

    The engine owes an answer while requests run or a probe is open; an idle engine is probed after a quarter of the
    limit, so that a stopped process is noticed without traffic. A tick that comes late shows that the edge itself
    did not run (stopped, starved, suspended): then frames may lie unread, and the clock starts anew.
    """

    def __init__(self, limits: ProgressLimits, now_s: float) -> None:
        self._limits = limits
        self._last_frame_s = now_s
        self._last_tick_s = now_s
        self._owed_since_s: float | None = now_s
        self._is_starting = True

    @property
    def last_frame_s(self) -> float:
        """When the last sign of life came."""
        return self._last_frame_s

    def frame_came(self, now_s: float) -> None:
        self._last_frame_s = now_s

    def started(self) -> None:
        """Ready came: the shorter limit holds from here on."""
        self._is_starting = False

    def owes(self, is_owed: bool, now_s: float) -> None:
        """Tell whether anything waits for the engine now; repeat freely."""
        if not is_owed:
            self._owed_since_s = None
        elif self._owed_since_s is None:
            self._owed_since_s = now_s

    def should_probe(self, now_s: float) -> bool:
        return self._owed_since_s is None and now_s - self._last_frame_s >= self._limits.silent_s / 4

    def is_stuck(self, now_s: float) -> bool:
        """Call once per tick. Silence for the limit, and a debt of at least half of it."""
        was_late = now_s - self._last_tick_s > max(3 * self._limits.tick_s, 0.5)
        self._last_tick_s = now_s
        if was_late:
            self._last_frame_s = now_s
        limit_s = self._limits.starting_silent_s if self._is_starting else self._limits.silent_s
        if self._owed_since_s is None:
            return False
        return now_s - self._last_frame_s >= limit_s and now_s - self._owed_since_s >= limit_s / 2


class Backoff:
    """Delays between restarts: 0.5 s, doubling up to 30 s; a run of a minute or more counts as healthy again."""

    FIRST_S = 0.5
    MAX_S = 30.0
    HEALTHY_S = 60.0

    def __init__(self) -> None:
        self._next_s = self.FIRST_S

    def delay_s(self, ran_s: float) -> float:
        """How long to wait before the next start, after a run of ran_s seconds."""
        if ran_s >= self.HEALTHY_S:
            self._next_s = self.FIRST_S
        delay_s = self._next_s
        self._next_s = min(2 * self._next_s, self.MAX_S)
        return delay_s
