"""What came of one request, and of all of them: rates, percentiles, errors by type."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MAX_ERROR_TYPES = 20
"""Codes come from servers, which may make one up for every request; the rest are counted together."""
MAX_CODE_CHARS = 64
MAX_SERVER_NUMBERS = 32
"""Of one request, from a server's own metrics."""
MAX_KEPT_CHARS = 32_768
"""Of one answer's text, where it is kept."""
PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Times are seconds of one monotonic clock. first_s: of the first output, None where none came.

    error: None, a code of the server's, or one of ours: connection_lost, timeout, no_end (the answer stopped without
    one), broken_stream (numbers of frames with a gap), http_STATUS; not_sent where the client itself was full.
    is_refused: the error is the server's, before any output, and none of its own faults. is_cancelled: by the client,
    as planned. gaps_ms: between tokens; pauses_ms: between pieces of output, whatever their tokens. output_tokens: as
    the server counted them, or pieces of text where it does not say. cached_tokens: of the prompt, that it had already;
    0 where it does not say. first_tokens: of the first piece. planned_s: None in a closed loop. request_id: the
    server's; server: its own times and counts of this request, by the names that it gives them.
    text: of the answer, where the target keeps it.
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
    pauses_ms: tuple[float, ...] = ()
    planned_s: float | None = None
    last_s: float | None = None
    first_tokens: int = 0
    is_refused: bool = False
    is_cancelled: bool = False
    retry_after_ms: int | None = None
    tenant: str | None = None
    request_id: str | None = None
    server: Mapping[str, float] = field(default_factory=dict)
    text: str = field(default="", repr=False)

    @property
    def start_s(self) -> float:
        """From which latencies count: the planned start where there is one, or what others hold up would be left out
        (coordinated omission)."""
        return self.sent_s if self.planned_s is None else self.planned_s

    @property
    def first_token_ms(self) -> float | None:
        return None if self.first_s is None else (self.first_s - self.start_s) * 1000

    @property
    def whole_ms(self) -> float:
        return (self.ended_s - self.start_s) * 1000

    @property
    def mean_gap_ms(self) -> float | None:
        """From the first to the last output, for each token after those of the first piece; None: there are none."""
        rest = self.output_tokens - self.first_tokens
        if self.first_s is None or self.last_s is None or rest < 1:
            return None
        return (self.last_s - self.first_s) * 1000 / rest


def is_refusal(code: str | None, kind: object, status: int | None) -> bool:
    """Of a server's typed error before any output. kind: its type. No refusals are faults of the server: 5xx but for
    503, its server_error, an engine that died under the request; nor is a deadline that passed while it waited."""
    if code in (None, "engine_lost", "deadline_exceeded", "connection_lost", "broken_stream") or kind == "server_error":
        return False
    return status is None or status < 500 or status == 503


def clean_id(name: object) -> str | None:
    """A server's name of a request: short, of one line; None where it gave none."""
    return clean_code(name) if isinstance(name, str) and name else None


def server_times(metrics: object) -> dict[str, float]:
    """The numbers in what a server says of a request; empty where it says nothing. Of preemptions each reason with
    its action is a name of its own, such as preempted_pages_swapped."""
    if not isinstance(metrics, dict):
        return {}
    found = {clean_code(name): value for name, value in metrics.items()}
    reasons = found.get("preempted")
    for each in reasons if isinstance(reasons, list) else ():
        if isinstance(each, dict):
            found[clean_code(f"preempted_{each.get('reason')}_{each.get('action')}")] = each.get("count")
    numbers = {
        name: value
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
    return dict(list(numbers.items())[:MAX_SERVER_NUMBERS])


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


def pauses_of(times_s: Sequence[float]) -> tuple[float, ...]:
    """Milliseconds between pieces of output: what a reader waits, however many tokens come then."""
    return tuple((at_s - before_s) * 1000 for before_s, at_s in zip(times_s, times_s[1:], strict=False))


def spread(values_ms: Sequence[float]) -> dict[str, float | int | None]:
    """count, mean and percentiles by linear interpolation; None where there is no value."""
    if not values_ms:
        return {"count": 0, "mean_ms": None, **{f"p{p}_ms": None for p in PERCENTILES}}
    found = np.percentile(np.asarray(values_ms), PERCENTILES)
    percentiles = {f"p{p}_ms": round(float(value), 3) for p, value in zip(PERCENTILES, found, strict=True)}
    return {"count": len(values_ms), "mean_ms": round(float(np.mean(values_ms)), 3), **percentiles}


def summarize(outcomes: Sequence[Outcome], counts: Callable[[int], bool] = lambda _: True) -> dict[str, Any]:
    """Of a run. counts: whether a request of that index is in the latencies. seconds: from the first request to the
    last end. Rates and latencies are of answers that ended well."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    codes = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    errors = dict(codes.most_common(MAX_ERROR_TYPES))
    if len(codes) > MAX_ERROR_TYPES:
        errors["other"] = errors.get("other", 0) + sum(codes.values()) - sum(errors.values())
    seconds = max(o.ended_s for o in outcomes) - min(o.sent_s for o in outcomes) if outcomes else 0.0
    timed = [outcome for outcome in good if counts(outcome.index)]
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
        "first_token": spread([(o.first_s - o.sent_s) * 1000 for o in timed if o.first_s is not None]),
        "inter_token": spread([gap for outcome in timed for gap in outcome.gaps_ms]),
        "whole_answer": spread([(outcome.ended_s - outcome.sent_s) * 1000 for outcome in timed]),
    }
