"""A request: immutable and validated. Everything behind admission may assume that these ranges hold."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NewType

RequestId = NewType("RequestId", int)
"""Made by the server, unique in the process. A client's own id never becomes an internal key."""

SAMPLING_POLICY = "headrace-sampling/1"
"""Name and version of the order and rules by which a token is chosen; ``model.sampling`` carries them out."""
MAX_LOGPROBS = 20
"""Most alternatives per position; the width of the device's top-k output."""
MAX_STOP_IDS = 32
"""Most stop ids per request, end-of-sequence ids included; the width of the device's hold-off list."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class CancelReason(StrEnum):
    """Why somebody outside the scheduler ended a request."""

    CLIENT = "client"
    DISCONNECT = "disconnect"
    STOP_STRING = "stop_string"
    SLOW_CLIENT = "slow_client"
    SHUTDOWN = "shutdown"
    DEADLINE = "deadline"


class Priority(IntEnum):
    """Class of a request; the lower number goes first. Aging and quotas keep the last from starving."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


class RejectionReason(StrEnum):
    QUEUE_FULL = "queue_full"
    OVERLOADED = "overloaded"
    RATE_LIMITED = "rate_limited"
    DEADLINE = "deadline_unmeetable"
    CONTEXT_EXCEEDED = "context_exceeded"
    NEVER_FITS = "never_fits"
    SHUTTING_DOWN = "shutting_down"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A typed refusal; nothing was allocated for the request."""

    reason: RejectionReason
    message: str
    param: str | None = None
    retry_after_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling policy ``headrace-sampling/1`` of one request (design: logits → bias → penalties → temperature → cuts).

    temperature: >= 0; 0 is greedy, ties go to the lower id.
    top_k: 0 = off, else 1..vocabulary. top_p: (0, 1]. min_p: [0, 1].
    repetition_penalty: > 0, over prompt and output. presence/frequency_penalty: [-2, 2], output only.
    logit_bias: pairs (token id, bias in [-100, 100]); each id at most once.
    allowed_token_ids: None = all ids.
    num_logprobs: None = none wanted, 0 = the chosen token only, up to MAX_LOGPROBS alternatives.
    seed: [0, 2**63); drawn by the edge where the client gave none. Randomness is fold_in(key(seed), position).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    num_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def has_mask(self) -> bool:
        return bool(self.logit_bias) or self.allowed_token_ids is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """When a request ends by itself.

    max_tokens: >= 1, generated tokens. min_tokens: 0..max_tokens; holds off every stop id.
    stop_token_ids: end-of-sequence ids included unless the client set ignore_eos; at most MAX_STOP_IDS.
    Stop strings are text and belong to the edge, which cancels with CancelReason.STOP_STRING.
    """

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation. prompt_ids: 1..max_context - 1 ids, each in [0, vocabulary).

    cache_namespace: 32 bytes that seed the prefix hash (model, tokenizer, template, KV dtype, tenant).
    tenant: accounting key of the credential; "" when the server runs without keys. weight: of the tenant, > 0; its
    share of token work beside other tenants that wait. deadline_ms: > 0, from submit to the last token; None = none.
    shared_prefix_tokens: leading prompt tokens that the operator declared to be common to all tenants; full pages of
    them are found under shared_namespace instead of cache_namespace.
    """

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopRule
    cache_namespace: bytes = b""
    tenant: str = ""
    weight: float = 1.0
    priority: Priority = Priority.NORMAL
    deadline_ms: float | None = None
    shared_prefix_tokens: int = 0
    shared_namespace: bytes = b""
