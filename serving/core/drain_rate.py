"""How fast the queue drains, measured, for the retry hint of a refusal."""

DEFAULT_RETRY_MS = 1_000
"""The hint while nothing has been measured."""
MIN_RETRY_MS = 100
MAX_RETRY_MS = 60_000
SMOOTHING = 0.2
"""Weight of the newest gap in the running mean: the last ten or so count."""


class DrainRate:
    """Mean time between two requests leaving the queue while others wait."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._mean_gap_s: float | None = None

    def on_leave(self, now_s: float, others_wait: bool) -> None:
        """A request was taken from the queue to run."""
        if self._since_s is not None:
            gap_s = max(0.0, now_s - self._since_s)
            mean_s = self._mean_gap_s
            self._mean_gap_s = gap_s if mean_s is None else mean_s + SMOOTHING * (gap_s - mean_s)
        self._since_s = now_s if others_wait else None

    def retry_after_ms(self, num_excess: int, now_s: float) -> int:
        """Time until num_excess requests have left; a stall since the last one counts as a gap."""
        if self._mean_gap_s is None:
            return DEFAULT_RETRY_MS
        return int(min(max(self.wait_s(num_excess, now_s) * 1_000, MIN_RETRY_MS), MAX_RETRY_MS))

    def wait_s(self, num_ahead: int, now_s: float) -> float:
        """Time until num_ahead requests have left, a stall included; 0 while nothing was measured."""
        if self._mean_gap_s is None:
            return 0.0
        stall_s = 0.0 if self._since_s is None else now_s - self._since_s
        return max(self._mean_gap_s * num_ahead, stall_s)


class UnitRate:
    """Units that leave a budget in a second while something is in it; for budgets of tokens, pages and streams."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._units = 0.0
        self._seconds = 0.0

    def on_enter(self, now_s: float) -> None:
        """Something is in the budget from now on, if nothing was."""
        if self._since_s is None:
            self._since_s = now_s

    def on_leave(self, units: float, now_s: float, *, is_empty: bool) -> None:
        """units left; is_empty: nothing is in the budget any more."""
        keep = 1 - SMOOTHING
        self._units = self._units * keep + units
        self._seconds = self._seconds * keep + max(0.0, now_s - (now_s if self._since_s is None else self._since_s))
        self._since_s = None if is_empty else now_s

    @property
    def per_second(self) -> float | None:
        """None while nothing has been measured."""
        return self._units / self._seconds if self._units > 0 and self._seconds > 0 else None

    def retry_after_ms(self, excess: float, now_s: float) -> int:
        """Time until excess units have left; a stall since the last ones left counts."""
        rate = self.per_second
        if rate is None:
            return DEFAULT_RETRY_MS
        stall_s = 0.0 if self._since_s is None else now_s - self._since_s
        wait_ms = max(excess / rate, stall_s) * 1_000
        return int(min(max(wait_ms, MIN_RETRY_MS), MAX_RETRY_MS))
