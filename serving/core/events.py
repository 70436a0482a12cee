"""What the scheduler tells the outside of one request. Each request gets exactly one Finished, and nothing after it."""

from dataclasses import dataclass
from enum import StrEnum

from headrace.serving.core.plan import TokenLogprobs
from headrace.serving.core.request import CancelReason, FinishReason, RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """One generated token. index: 0, 1, 2, … without a gap. A token that is a stop id is reported too."""

    request_id: RequestId
    index: int
    token_id: int
    logprobs: TokenLogprobs | None = None


class PreemptionReason(StrEnum):
    """Why a running request had to make way: pages ran out; a higher class, or a tenant that ran nothing, wanted its
    slot; or a test asked for it."""

    PAGES = "pages"
    PRIORITY = "priority"
    FAIRNESS = "fairness"
    FORCED = "forced"


class PreemptionAction(StrEnum):
    """What became of the KV of a preempted request: kept in host memory, or to be computed again."""

    SWAPPED = "swapped"
    RECOMPUTED = "recomputed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted:
    """A running request went back to the queue. Not terminal; its tokens so far stand. num_pages: that it held."""

    request_id: RequestId
    reason: PreemptionReason
    action: PreemptionAction
    num_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionCount:
    reason: PreemptionReason
    action: PreemptionAction
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Server-side times of one request in ms; first_token_ms counts from submit.

    preempted_ms: of prefill_ms and decode_ms, spent in the queue again. preempted: how often why and how; the counts
    add up to preemptions.
    """

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    first_token_ms: float | None
    preemptions: int
    preempted_ms: float = 0.0
    preempted: tuple[PreemptionCount, ...] = ()


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


Event = TokenEvent | Preempted | Finished
