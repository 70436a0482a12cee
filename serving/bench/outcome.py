"""What came of one request, and of all of them: rates, percentiles, errors by type."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_ERROR_TYPES = 20
"""Codes come from servers, which may make one up for every request; the rest are counted together."""
MAX_CODE_CHARS = 64
PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Times are seconds of one monotonic clock. first_s: of the first output, None where none came.

    error: None, a code of the server's, or one of ours: connection_lost, timeout, no_end (the answer stopped without
    one), broken_stream (numbers of frames with a gap), http_STATUS. gaps_ms: between tokens. output_tokens: as the
    server counted them, or pieces of text where it does not say. cached_tokens: of the prompt, that it had already; 0
    where it does not say.
    """

    index: int
    sent_s: float
    ended_s: float
    first_s: float | None = None
    error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    gaps_ms: tuple[float, ...] = ()


def clean_code(code: object) -> str:
    """A server's error code as a label: short, of one line."""
    text = "".join(c if c.isalnum() or c in "_-." else "_" for c in str(code))[:MAX_CODE_CHARS]
    return text or "unnamed"


def cached_of(usage: Mapping[str, Any]) -> int:
    """From an OpenAI usage object; 0 where it does not say."""
    details = usage.get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def gaps_of(times_s: Sequence[float], counts: Sequence[int]) -> tuple[float, ...]:
    """Milliseconds between tokens that came in pieces: a piece of n counts as n gaps of its time divided by n."""
    gaps: list[float] = []
    for before_s, at_s, count in zip(times_s, times_s[1:], counts[1:], strict=False):
        gaps += [(at_s - before_s) * 1000 / count] * count
    return tuple(gaps)


def spread(values_ms: Sequence[float]) -> dict[str, float | int | None]:
    """count, mean and percentiles by linear interpolation; None where there is no value."""
    if not values_ms:
        return {"count": 0, "mean_ms": None, **{f"p{p}_ms": None for p in PERCENTILES}}
    found = np.percentile(np.asarray(values_ms), PERCENTILES)
    percentiles = {f"p{p}_ms": round(float(value), 3) for p, value in zip(PERCENTILES, found, strict=True)}
    return {"count": len(values_ms), "mean_ms": round(float(np.mean(values_ms)), 3), **percentiles}


def summarize(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Of a run. seconds: from the first request to the last end. Rates and latencies are of answers that ended well."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    codes = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    errors = dict(codes.most_common(MAX_ERROR_TYPES))
    if len(codes) > MAX_ERROR_TYPES:
        errors["other"] = errors.get("other", 0) + sum(codes.values()) - sum(errors.values())
    seconds = max(o.ended_s for o in outcomes) - min(o.sent_s for o in outcomes) if outcomes else 0.0
    output_tokens = sum(outcome.output_tokens for outcome in good)
    return {
        "requests": len(outcomes),
        "failed": len(outcomes) - len(good),
        "errors": errors,
        "seconds": round(seconds, 3),
        "prompt_tokens": sum(outcome.prompt_tokens for outcome in good),
        "cached_tokens": sum(outcome.cached_tokens for outcome in good),
        "output_tokens": output_tokens,
        "output_tokens_per_s": round(output_tokens / seconds, 2) if seconds else 0.0,
        "requests_per_s": round(len(good) / seconds, 3) if seconds else 0.0,
        "first_token": spread([(o.first_s - o.sent_s) * 1000 for o in good if o.first_s is not None]),
        "inter_token": spread([gap for outcome in good for gap in outcome.gaps_ms]),
        "whole_answer": spread([(outcome.ended_s - outcome.sent_s) * 1000 for outcome in good]),
    }
