"""Token buckets: so many units a second on average, and a burst at once."""

from dataclasses import dataclass
from math import ceil

ROUNDING_MS = 1e-3
"""What sums of floats may be off by."""


@dataclass(frozen=True, slots=True)
class Rate:
    """per_second: > 0. burst: >= 1, what a bucket holds when it is full."""

    per_second: float
    burst: float


class TokenBucket:
    """Starts full. What is taken at once may be more than a burst: that passes when the bucket is full, and leaves a
    debt, so that a large request is slow to come again and not refused for ever."""

    def __init__(self, rate: Rate, now_s: float) -> None:
        self._rate = rate
        self._level = rate.burst
        self._at_s = now_s

    @property
    def rate(self) -> Rate:
        return self._rate

    def change_rate(self, rate: Rate, now_s: float) -> None:
        """Another rate from now on; what was taken stays taken."""
        self._refill(now_s)
        self._level += rate.burst - self._rate.burst
        self._rate = rate

    def level(self, now_s: float) -> float:
        """Units that could be taken now; below 0 in debt."""
        self._refill(now_s)
        return self._level

    def wait_ms(self, amount: float, now_s: float) -> int:
        """0 when amount could be taken now; otherwise in how many ms, rounded up, if nobody else takes any."""
        self._refill(now_s)
        missing = min(amount, self._rate.burst) - self._level
        wait_ms = missing / self._rate.per_second * 1000
        return 0 if wait_ms <= ROUNDING_MS else max(1, ceil(wait_ms - ROUNDING_MS))

    def take(self, amount: float, now_s: float) -> None:
        """Whether or not it is there: ask wait_ms first. A negative amount gives back what was taken too much."""
        self._refill(now_s)
        self._level = min(self._level - amount, self._rate.burst)

    def _refill(self, now_s: float) -> None:
        """A clock that goes back adds nothing."""
        passed_s = max(0.0, now_s - self._at_s)
        self._at_s = max(now_s, self._at_s)
        self._level = min(self._level + passed_s * self._rate.per_second, self._rate.burst)
