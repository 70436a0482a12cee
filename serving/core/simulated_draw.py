"""A random source for simulations: equal on every Python version, without global state."""

from collections.abc import Sequence as Seq
from typing import TypeVar

T = TypeVar("T")


class Draw:
    """SplitMix64 in ten lines. Two draws of one seed give the same numbers."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def below(self, limit: int) -> int:
        """Uniform in [0, limit), limit far below 2**64."""
        mask = 2**64 - 1
        self._state = (self._state + 0x9E3779B97F4A7C15) & mask
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return (z ^ (z >> 31)) % limit

    def between(self, low: int, high: int) -> int:
        """Uniform in [low, high]."""
        return low + self.below(high - low + 1)

    def pick(self, options: Seq[T]) -> T:
        return options[self.below(len(options))]

    def chance(self, percent: int) -> bool:
        return self.below(100) < percent
