"""What the measured cases share: how much is done, bounds with what was measured, and the statistics behind them."""

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import mannwhitneyu

Figures = dict[str, Any]
Bounds = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of each case is done; the defaults are the cases' own figures where they have some."""

    rounds: int
    pairs: int
    tries: int
    connections: int
    minutes: float


def say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


def under(measured: float, limit: float, digits: int = 4) -> dict[str, Any]:
    return {"measured": round(measured, digits), "limit": f"< {limit:g}", "passed": bool(measured < limit)}


def exactly(measured: object, wanted: object) -> dict[str, Any]:
    return {"measured": measured, "limit": f"== {wanted}", "passed": measured == wanted}


def quantile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(np.asarray(values), share))


def stalls(seconds: Sequence[float], every_s: float) -> list[float]:
    """What a probe would have seen that does not wait for one answer before it asks again: an answer that took many
    intervals stands for all of the questions that fell into it."""
    return [took - late for took in seconds for late in np.arange(0.0, max(took, 1e-9), every_s).tolist()]


def mann_whitney_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sided, with the normal approximation and the correction for ties: for hundreds of values and more."""
    return float(mannwhitneyu(a, b, method="asymptotic", use_continuity=False).pvalue)


def smallest_shift_found(a: Sequence[float], b: Sequence[float], p_limit: float, most: float) -> float:
    """The least that must be added to every b for the test to call the two different: what the comparison can see."""
    low, high = 0.0, most
    for _ in range(12):
        middle = (low + high) / 2
        found = mann_whitney_p(a, [value + middle for value in b]) < p_limit
        low, high = (low, middle) if found else (middle, high)
    return high


def change_interval(pairs: Sequence[tuple[Sequence[float], Sequence[float]]], seed: int = 0) -> tuple[float, float]:
    """95% interval of the change of the pooled p99 between the first and the second of pairs, by resampling pairs:
    gaps within a run depend on each other, runs hardly do."""
    rng = random.Random(seed)
    changes = [p99_change(rng.choices(pairs, k=len(pairs))) for _ in range(2000)]
    return quantile(changes, 0.025), quantile(changes, 0.975)


def p99_change(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    without, with_ = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
    return quantile(with_, 0.99) / quantile(without, 0.99) - 1
