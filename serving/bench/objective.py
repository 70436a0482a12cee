"""A service-level objective: when an answer was good enough, and how many were, with an interval.

``ttft``: the first output comes within it of the planned start. ``itl``: the request's mean time per token after its
first output is within it, as peers count it (``tpot``); with ``itl_p=P`` instead the P-th percentile of its pauses
between pieces of output, 100 being the longest. ``e2e``: the whole answer is there within it. A request is good when it
was answered to its end and met all that were named.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.serving.bench.outcome import Outcome
from headrace.serving.core.errors import ConfigError

RESAMPLES = 2_000
CONFIDENCE = 0.95
_Z = 1.959964
"""Standard normal quantile of 0.975."""
_TIME = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")
NAMES = ("ttft", "itl", "e2e", "itl_p")


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Milliseconds; None: not asked for. itl_percentile: of a request's pauses; None: its mean time per token."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    e2e_ms: float | None = None
    itl_percentile: float | None = None

    def missed_by(self, outcome: Outcome) -> tuple[str, ...]:
        """Names of the parts that an answer did not meet; ("answer",) where there is none to its end."""
        if outcome.error is not None or outcome.is_cancelled:
            return ("answer",)
        missed = []
        first_ms, gap_ms = outcome.first_token_ms, self._gap_ms(outcome)
        if self.ttft_ms is not None and (first_ms is None or first_ms > self.ttft_ms):
            missed.append("ttft")
        if self.itl_ms is not None and gap_ms is not None and gap_ms > self.itl_ms:
            missed.append("itl")
        if self.e2e_ms is not None and outcome.whole_ms > self.e2e_ms:
            missed.append("e2e")
        return tuple(missed)

    def _gap_ms(self, outcome: Outcome) -> float | None:
        """None where one piece is the whole answer: nobody waited between tokens."""
        if self.itl_percentile is None:
            return outcome.mean_gap_ms
        return float(np.percentile(outcome.pauses_ms, self.itl_percentile)) if outcome.pauses_ms else None

    def __str__(self) -> str:
        gap = "itl" if self.itl_percentile is None else f"itl(p{self.itl_percentile:g})"
        parts = (("ttft", self.ttft_ms), (gap, self.itl_ms), ("e2e", self.e2e_ms))
        return ", ".join(f"{name} ≤ {value:g} ms" for name, value in parts if value is not None)


def parse_objective(text: str) -> Objective:
    """``ttft=1s,itl=250ms,e2e=30s,itl_p=95``: some of them, itl_p with itl only. Raises: ConfigError naming --slo."""
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in NAMES or name in values:
            raise ConfigError(f"--slo {text!r}: {name!r} is not one of {', '.join(NAMES)}, each once, such as ttft=1s")
        values[name] = _percentile(text, value) if name == "itl_p" else _milliseconds(text, name, value)
    if "itl_p" in values and "itl" not in values:
        raise ConfigError(f"--slo {text!r}: itl_p says which of a request's pauses itl is about; give itl, too")
    return Objective(
        ttft_ms=values.get("ttft"),
        itl_ms=values.get("itl"),
        e2e_ms=values.get("e2e"),
        itl_percentile=values.get("itl_p"),
    )


def _milliseconds(text: str, name: str, value: str) -> float:
    found = _TIME.fullmatch(value)
    if found is None or not float(found[1]):
        raise ConfigError(f"--slo {text!r}: {name} is {value!r}; write a time with its unit, such as 250ms or 1.5s")
    return float(found[1]) * (1000 if found[2] == "s" else 1)


def _percentile(text: str, value: str) -> float:
    try:
        found = float(value)
    except ValueError:
        found = math.nan
    if not 0 < found <= 100:
        raise ConfigError(f"--slo {text!r}: itl_p is {value!r}; it must be above 0, and 100 is the longest pause")
    return found


def share_interval(flags: Sequence[bool]) -> tuple[float, float]:
    """95% interval of the share of true flags, in order of arrival: the wider of two on each side.

    Wilson's takes requests as independent, and is right about shares near 0 and 1. A bootstrap of blocks of about
    n^(1/2) neighbours keeps what neighbours have in common: under overload good and bad ones come in runs.
    """
    number = len(flags)
    if not number:
        return 0.0, 1.0
    values = np.asarray(flags, dtype=float)
    share = float(values.mean())
    middle = (share + _Z**2 / (2 * number)) / (1 + _Z**2 / number)
    half = _Z / (1 + _Z**2 / number) * math.sqrt(share * (1 - share) / number + _Z**2 / (4 * number**2))
    length = max(1, math.isqrt(number))
    blocks = math.ceil(number / length)
    # Sums of a block from each start, around the end; a sample's blocks make number values, give or take its last.
    sums = np.convolve(np.concatenate((values, values[: length - 1])), np.ones(length), "valid")
    starts = np.random.default_rng(0).integers(0, number, (RESAMPLES, blocks))
    shares = sums[starts].sum(axis=1) / (blocks * length)
    low, high = np.quantile(shares, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return max(0.0, min(middle - half, float(low))), min(1.0, max(middle + half, float(high)))
