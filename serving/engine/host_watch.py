"""When another host counts as lost: the rules, as pure functions of the times of its signs of life."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimits:
    """beat_s: between signs of life. silent_s: a rank that is silent for so long in service is lost; with the last
    beat and the tick that is noticed 5 to 6.3 s after a host stopped, within the 10 s that are promised.
    starting_silent_s: the same while loading and compiling, when a thread may hold the interpreter for long.
    step_s: a rank that has not begun a step which rank 0 has waited for so long is stuck, however well it beats. Less
    than the 9 s after which the edge gives up an engine without a word, so that the rank is named.
    """

    beat_s: float = 1.0
    silent_s: float = 6.0
    starting_silent_s: float = 60.0
    step_s: float = 8.0

    @property
    def tick_s(self) -> float:
        return self.beat_s / 4


class HostWatch:
    """Decides from the times of beats and ticks which rank is lost, and why.

    A tick that comes late shows that this process itself did not run (stopped, starved, suspended): beats may lie
    unread, so that time does not count.
    """

    def __init__(self, ranks: Iterable[int], limits: HostLimits, now_s: float) -> None:
        self._limits = limits
        self._heard_s = dict.fromkeys(ranks, now_s)
        self._begun = dict.fromkeys(self._heard_s, 0)
        self._last_tick_s = now_s
        self._waits: tuple[int, float] | None = None
        self._is_serving = False

    def serves(self, now_s: float) -> None:
        """The shorter limits hold from here on."""
        self._is_serving = True
        self._heard_s = dict.fromkeys(self._heard_s, now_s)

    def heard(self, rank: int, now_s: float, steps: int = 0) -> None:
        """steps: how many the rank has begun, 0 where it says nothing of it."""
        self._heard_s[rank] = now_s
        self._begun[rank] = max(steps, self._begun[rank])

    def waits_for(self, steps: int | None, now_s: float) -> None:
        """Rank 0 waits for the last of so many steps from now on; None = for none."""
        self._waits = None if steps is None else (steps, now_s)

    def lost(self, now_s: float) -> tuple[int, str] | None:
        """(rank, why) of one that is lost. Call once per tick."""
        self._excuse(now_s - self._last_tick_s - 2 * self._limits.tick_s)
        self._last_tick_s = now_s
        limit_s = self._limits.silent_s if self._is_serving else self._limits.starting_silent_s
        for rank, heard_s in self._heard_s.items():
            if now_s - heard_s >= limit_s:
                return rank, f"no sign of life for {now_s - heard_s:.1f} s"
        return self._stuck(now_s)

    def _stuck(self, now_s: float) -> tuple[int, str] | None:
        if self._waits is None or now_s - self._waits[1] < self._limits.step_s:
            return None
        steps, since_s = self._waits
        for rank, begun in self._begun.items():
            if begun < steps:
                return rank, f"it has not begun step {steps}, which rank 0 has waited for {now_s - since_s:.1f} s"
        return None

    def _excuse(self, late_s: float) -> None:
        """Time in which this process did not run is nobody's silence."""
        if late_s > 0:
            self._heard_s = {rank: heard_s + late_s for rank, heard_s in self._heard_s.items()}
            if self._waits is not None:
                self._waits = (self._waits[0], self._waits[1] + late_s)
