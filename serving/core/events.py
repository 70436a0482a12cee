"""What the scheduler tells the outside of one request. Each request gets exactly one Finished, and nothing after it."""

from dataclasses import dataclass

from headrace.serving.core.plan import TokenLogprobs
from headrace.serving.core.request import CancelReason, FinishReason, RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """One generated token. index: 0, 1, 2, … without a gap. A token that is a stop id is reported too."""

    request_id: RequestId
    index: int
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Server-side times of one request in ms; first_token_ms counts from submit."""

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    first_token_ms: float | None
    preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The terminal event.

    stop_token_id: the id that ended it (reason STOP). cancel_reason: set when reason is CANCELLED.
    error_code, error_message: set when reason is ERROR.
    """

    request_id: RequestId
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timings: Timings
    stop_token_id: int | None = None
    cancel_reason: CancelReason | None = None
    error_code: str | None = None
    error_message: str | None = None


Event = TokenEvent | Finished
