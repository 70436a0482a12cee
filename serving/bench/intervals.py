"""Medians over repetitions with intervals that assume nothing about their distribution.

The interval of a median has two of the sorted values as its ends: the binomial distribution says how surely the true
median lies between them. Five repetitions give at most 93.75% (from the least to the largest), six 96.9%.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Median:
    """low, high: the interval, None for a single value. confidence: what it has, the least one that reaches 95%, or
    what the number of values allows."""

    median: float
    low: float | None
    high: float | None
    confidence: float | None
    count: int

    def as_json(self) -> dict[str, float | int | None]:
        def short(value: float | None) -> float | None:
            return None if value is None else float(f"{value:.6g}")

        return {
            "median": short(self.median),
            "low": short(self.low),
            "high": short(self.high),
            "confidence": short(self.confidence),
            "count": self.count,
        }


def median_of(values: Sequence[float]) -> Median | None:
    """None without values."""
    if not values:
        return None
    ordered, count = sorted(values), len(values)
    middle = float(np.median(ordered))
    if count == 1:
        return Median(median=middle, low=None, high=None, confidence=None, count=1)
    # From the widest pair of values inwards, as long as it is sure enough.
    rank = 0
    while rank + 1 < count / 2 and _confidence(count, rank + 1) >= CONFIDENCE:
        rank += 1
    return Median(
        median=middle,
        low=ordered[rank],
        high=ordered[count - 1 - rank],
        confidence=_confidence(count, rank),
        count=count,
    )


def paired_ratio(above: Sequence[float | None], below: Sequence[float | None]) -> Median | None:
    """Of values of the same repetition, in order; those of which one is missing or 0 are left out."""
    pairs = zip(above, below, strict=False)
    return median_of([one / other for one, other in pairs if one is not None and other])


def _confidence(count: int, rank: int) -> float:
    """That the median lies between the sorted values number rank and count - 1 - rank, counted from 0."""
    from scipy.stats import binom  # type: ignore[import-untyped]

    tail = float(binom.cdf(rank, count, 0.5))
    return max(0.0, 1 - 2 * tail) if math.isfinite(tail) else 0.0
