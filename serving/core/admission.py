"""Every check of a request, in one pure function: what passes here may not surprise the scheduler or the device.

Values come from clients through a parser that does not know ranges, so each may have any Python type. Messages name
the field, the position and the limit; they never repeat the value, which may be a secret, NaN, or a million digits.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import isfinite

from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.request import (
    MAX_LOGPROBS,
    MAX_STOP_IDS,
    Rejection,
    RejectionReason,
    Request,
    RequestId,
    SamplingParams,
    StopRule,
)
from headrace.serving.core.sequence import max_kv_tokens, num_pages_for

MAX_LOGIT_BIAS = 1024
"""Most logit_bias entries of a request."""
MAX_TEMPERATURE = 100.0
"""Beyond it the distribution is uniform in float32 anyway."""
REPETITION_PENALTY_RANGE = (0.01, 100.0)
"""Keeps logits finite in float32 after the division."""
NAMESPACE_BYTES = 32
SEED_LIMIT = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request is measured against. eos_ids end every request that does not ignore them."""

    vocab_size: int
    max_context: int
    page_size: int
    num_usable_pages: int
    eos_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: SchedulerConfig, *, vocab_size: int, eos_ids: tuple[int, ...]) -> "Limits":
        return cls(
            vocab_size=vocab_size,
            max_context=config.max_context,
            page_size=config.page_size,
            num_usable_pages=config.num_pages - 1,
            eos_ids=eos_ids,
        )

    @property
    def max_total_tokens(self) -> int:
        """Most prompt and output tokens of one request: the context, or all pages (the last output needs no KV)."""
        return min(self.max_context, self.num_usable_pages * self.page_size + 1)


class _Refused(Exception):
    """Carries the rejection out of a nested check; never leaves this module."""

    def __init__(self, reason: RejectionReason, param: str, message: str) -> None:
        self.rejection = Rejection(reason=reason, param=param, message=message)


def validate(
    limits: Limits,
    *,
    request_id: RequestId,
    prompt_ids: Seq[int],
    sampling: SamplingParams,
    max_tokens: int | None,
    min_tokens: int = 0,
    stop_token_ids: Seq[int] = (),
    ignore_eos: bool = False,
    cache_namespace: bytes = b"",
    tenant: str = "",
) -> Request | Rejection:
    """A request whose every documented range holds, or the first thing that is wrong with it.

    max_tokens None: as many as fit. sampling may hold values of any type. Rejections: INVALID (a field is wrong),
    CONTEXT_EXCEEDED, NEVER_FITS (more pages than exist).
    """
    try:
        prompt = _prompt(limits, prompt_ids)
        total = limits.max_total_tokens - len(prompt) if max_tokens is None else _integer("max_tokens", max_tokens, 1)
        size = refuse_size(len(prompt), max(1, total), limits)
        if size is not None:
            return size
        min_out = _integer("min_tokens", min_tokens, 0)
        if min_out > total:
            raise _invalid("min_tokens", f"must not exceed the {total} tokens that this request may generate")
        stop_ids = _stop_ids(limits, stop_token_ids, _boolean("ignore_eos", ignore_eos))
        params = _sampling(limits, sampling)
        if min_out and _all_held_off(limits, params, stop_ids):
            raise _invalid("min_tokens", "holds off every token in allowed_token_ids; add one that is no stop id")
        if type(cache_namespace) is not bytes or len(cache_namespace) not in (0, NAMESPACE_BYTES):
            raise _invalid("cache_namespace", f"must be {NAMESPACE_BYTES} bytes or empty")
        if type(tenant) is not str:
            raise _invalid("tenant", "must be a string")
    except _Refused as refused:
        return refused.rejection
    return Request(
        request_id=request_id,
        prompt_ids=prompt,
        sampling=params,
        stop=StopRule(max_tokens=total, min_tokens=min_out, stop_token_ids=stop_ids),
        cache_namespace=cache_namespace,
        tenant=tenant,
    )


def refuse_size(num_prompt: int, max_tokens: int, limits: Limits | SchedulerConfig) -> Rejection | None:
    """A request that can never run: longer than the context, or than all pages together."""
    if num_prompt >= limits.max_context:
        return Rejection(
            reason=RejectionReason.CONTEXT_EXCEEDED,
            param="prompt",
            message=f"the prompt has {num_prompt} tokens, but prompt and output share a context of "
            f"{limits.max_context} tokens; shorten it to at most {limits.max_context - 1}",
        )
    if max_tokens > limits.max_context - num_prompt:
        return Rejection(
            reason=RejectionReason.CONTEXT_EXCEEDED,
            param="max_tokens",
            message=f"the prompt has {num_prompt} tokens, so of the context of {limits.max_context} tokens only "
            f"{limits.max_context - num_prompt} are left for max_tokens; lower it or shorten the prompt",
        )
    usable = limits.num_usable_pages if isinstance(limits, Limits) else limits.num_pages - 1
    needed = num_pages_for(max_kv_tokens(num_prompt, max_tokens), limits.page_size)
    if needed > usable:
        return Rejection(
            reason=RejectionReason.NEVER_FITS,
            param="max_tokens" if num_prompt <= usable * limits.page_size else "prompt",
            message=f"prompt and max_tokens need {needed} pages of {limits.page_size} tokens, but the server has "
            f"{usable}; lower max_tokens or shorten the prompt",
        )
    return None


def _invalid(param: str, text: str) -> _Refused:
    return _Refused(RejectionReason.INVALID, param, f"{param} {text}")


def _integer(param: str, value: object, low: int, high: int | None = None) -> int:
    """A true int (bool is none) in [low, high]."""
    if type(value) is not int:
        raise _invalid(param, "must be an integer")
    if value < low or (high is not None and value > high):
        raise _invalid(param, f"must be at least {low}" if high is None else f"must be between {low} and {high}")
    return value


def _number(param: str, value: object, low: float, high: float, *, above_low: bool = False) -> float:
    """A finite int or float (bool is none) in [low, high], or in (low, high]."""
    if type(value) is not int and type(value) is not float:
        raise _invalid(param, "must be a number")
    # Compare before converting: float() of a huge int overflows, and a comparison with NaN is False.
    if not (low <= value <= high) or (above_low and value == low) or not isfinite(value):
        raise _invalid(param, f"must be {'above' if above_low else 'at least'} {low:g} and at most {high:g}")
    return float(value) + 0.0  # -0.0 becomes 0.0


def _boolean(param: str, value: object) -> bool:
    if type(value) is not bool:
        raise _invalid(param, "must be true or false")
    return value


def _ids(param: str, values: object, vocab_size: int, max_length: int) -> tuple[int, ...]:
    """A list or tuple of at most max_length ids in [0, vocab_size)."""
    if not isinstance(values, list | tuple):
        raise _invalid(param, "must be a list of token ids")
    if len(values) > max_length:
        raise _invalid(param, f"has more than {max_length} entries")
    for i, value in enumerate(values):
        if type(value) is not int or not 0 <= value < vocab_size:
            raise _invalid(param, f"entry {i} must be a token id between 0 and {vocab_size - 1}")
    return tuple(values)


def _prompt(limits: Limits, prompt_ids: object) -> tuple[int, ...]:
    if not isinstance(prompt_ids, list | tuple):
        raise _invalid("prompt", "must be a list of token ids")
    if not prompt_ids:
        raise _invalid("prompt", "must hold at least one token")
    if len(prompt_ids) >= limits.max_context:  # before each id is looked at
        size = refuse_size(len(prompt_ids), 1, limits)
        if size is not None:
            raise _Refused(size.reason, "prompt", size.message)
    return _ids("prompt", prompt_ids, limits.vocab_size, limits.max_context)


def _stop_ids(limits: Limits, stop_token_ids: object, ignore_eos: bool) -> tuple[int, ...]:
    """End-of-sequence ids first, then the client's, each once."""
    own = _ids("stop_token_ids", stop_token_ids, limits.vocab_size, MAX_STOP_IDS)
    merged = tuple(dict.fromkeys(own if ignore_eos else limits.eos_ids + own))
    if len(merged) > MAX_STOP_IDS:
        raise _invalid("stop_token_ids", f"and the model's end ids are more than {MAX_STOP_IDS} together")
    return merged


def _sampling(limits: Limits, given: SamplingParams) -> SamplingParams:
    low, high = REPETITION_PENALTY_RANGE
    num_logprobs = given.num_logprobs
    return SamplingParams(
        temperature=_number("temperature", given.temperature, 0.0, MAX_TEMPERATURE),
        top_k=_integer("top_k", given.top_k, 0, limits.vocab_size),
        top_p=_number("top_p", given.top_p, 0.0, 1.0, above_low=True),
        min_p=_number("min_p", given.min_p, 0.0, 1.0),
        seed=_integer("seed", given.seed, 0, SEED_LIMIT - 1),
        repetition_penalty=_number("repetition_penalty", given.repetition_penalty, low, high),
        presence_penalty=_number("presence_penalty", given.presence_penalty, -2.0, 2.0),
        frequency_penalty=_number("frequency_penalty", given.frequency_penalty, -2.0, 2.0),
        logit_bias=_logit_bias(limits, given.logit_bias),
        allowed_token_ids=_allowed(limits, given.allowed_token_ids),
        num_logprobs=None
        if num_logprobs is None
        else _integer("logprobs", num_logprobs, 0, min(MAX_LOGPROBS, limits.vocab_size)),
    )


def _logit_bias(limits: Limits, pairs: object) -> tuple[tuple[int, float], ...]:
    """Ascending by id."""
    if not isinstance(pairs, list | tuple) or any(not isinstance(p, list | tuple) or len(p) != 2 for p in pairs):
        raise _invalid("logit_bias", "must be pairs of token id and bias")
    ids = _ids("logit_bias", [pair[0] for pair in pairs], limits.vocab_size, MAX_LOGIT_BIAS)
    _no_repeats("logit_bias", ids)
    return tuple(sorted((i, _number("logit_bias", pair[1], -100.0, 100.0)) for i, pair in zip(ids, pairs, strict=True)))


def _allowed(limits: Limits, token_ids: object) -> tuple[int, ...] | None:
    """Ascending; the whole vocabulary may be named."""
    if token_ids is None:
        return None
    ids = _ids("allowed_token_ids", token_ids, limits.vocab_size, limits.vocab_size)
    if not ids:
        raise _invalid("allowed_token_ids", "must allow at least one token")
    _no_repeats("allowed_token_ids", ids)
    return tuple(sorted(ids))


def _no_repeats(param: str, ids: tuple[int, ...]) -> None:
    if len(set(ids)) != len(ids):
        raise _invalid(param, "must name each token id at most once")


def _all_held_off(limits: Limits, sampling: SamplingParams, stop_ids: tuple[int, ...]) -> bool:
    """True when min_tokens would leave no token to sample."""
    allowed: Iterable[int] = (
        range(limits.vocab_size) if sampling.allowed_token_ids is None else sampling.allowed_token_ids
    )
    held_off = set(stop_ids)
    return all(token_id in held_off for token_id in allowed)
