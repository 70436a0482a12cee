"""The refusals of admission as clients see them: which limit it is, how large, and what to do about it."""

from math import ceil

from headrace.serving.core.budgets import BudgetRefusal
from headrace.serving.core.drain_rate import MAX_RETRY_MS, MIN_RETRY_MS
from headrace.serving.core.forecast import Forecast
from headrace.serving.core.rate_limit import Rate
from headrace.serving.core.tenant_policy import Budget
from headrace.serving.edge.errors import ApiError, ErrorCode

_NAMES = {
    Budget.STREAMS: "live streams",
    Budget.QUEUED_REQUESTS: "requests that wait for a first token",
    Budget.QUEUED_TOKENS: "prompt tokens that wait",
    Budget.TOKENS_IN_FLIGHT: "tokens in flight (prompts and expected output)",
    Budget.PAGES: "pages of KV memory (by estimate)",
}
_TENANT_CODES = {
    Budget.STREAMS: ErrorCode.TOO_MANY_STREAMS,
    Budget.QUEUED_REQUESTS: ErrorCode.QUEUE_FULL,
    Budget.QUEUED_TOKENS: ErrorCode.QUEUE_FULL,
    Budget.TOKENS_IN_FLIGHT: ErrorCode.RATE_LIMITED,
    Budget.PAGES: ErrorCode.RATE_LIMITED,
}
_SERVER_CODES = {
    Budget.STREAMS: ErrorCode.OVERLOADED,
    Budget.QUEUED_REQUESTS: ErrorCode.QUEUE_FULL,
    Budget.QUEUED_TOKENS: ErrorCode.QUEUE_FULL,
    Budget.TOKENS_IN_FLIGHT: ErrorCode.OVERLOADED,
    Budget.PAGES: ErrorCode.OVERLOADED,
}
_SMALLER = {
    Budget.STREAMS: "send fewer prompts in one request",
    Budget.QUEUED_REQUESTS: "send fewer prompts in one request",
}


def budget_error(refusal: BudgetRefusal) -> ApiError:
    """429 for a tenant's own limits and for the queue, 503 where another budget of the server is used up."""
    is_tenants = refusal.tenant is not None
    code = (_TENANT_CODES if is_tenants else _SERVER_CODES)[refusal.budget]
    name, whose = _NAMES[refusal.budget], "this key" if is_tenants else "the server"
    if refusal.retry_after_ms is None:
        remedy = _SMALLER.get(refusal.budget, "lower max_tokens, shorten the prompt, or send fewer prompts at once")
        text = f"The request needs {refusal.asked} {name}, but {whose} may have {refusal.limit}; {remedy}."
        return ApiError(code, text)
    what = "The queue is full" if code is ErrorCode.QUEUE_FULL else "A budget is used up"
    remedy = "Wait for own requests to end, or retry" if is_tenants else "Retry"
    text = f"{what}: {whose} may have {refusal.limit} {name}, and has {refusal.used}. {remedy} after retry_after_ms."
    return ApiError(code, text, retry_after_ms=refusal.retry_after_ms)


def over_rate(rate: Rate, unit: str, wait_ms: int) -> ApiError:
    """unit: requests or tokens. wait_ms: exact, as the bucket fills."""
    return ApiError(
        ErrorCode.RATE_LIMITED,
        f"This key may use {rate.per_second:g} {unit} a second, and {rate.burst:g} at once. Retry after "
        f"retry_after_ms.",
        retry_after_ms=wait_ms,
    )


def late_error(first_ms: float, objective_ms: int) -> ApiError:
    """The forecast of the first token is beyond the server's objective: it is there again when the queue has drained by
    the difference."""
    return ApiError(
        ErrorCode.OVERLOADED,
        f"The first token would come in {ceil(first_ms)} ms by estimate, and the server's objective is {objective_ms} "
        f"ms. Retry after retry_after_ms, or with another replica.",
        retry_after_ms=_hint(first_ms - objective_ms),
    )


def unmeetable_error(seen: Forecast, alone: Forecast, left_ms: float) -> ApiError:
    """seen: behind the work that is there. alone: on an idle server, which a retry may find."""
    text = (
        f"By estimate the last token would come in {ceil(seen.last_token_ms)} ms, and the deadline is in "
        f"{max(0, int(left_ms))} ms."
    )
    if alone.last_token_ms > left_ms:
        remedy = "An idle server would need longer too: allow more time, lower max_tokens or shorten the prompt."
        return ApiError(ErrorCode.DEADLINE_UNMEETABLE, f"{text} {remedy}", param="deadline_ms")
    return ApiError(
        ErrorCode.DEADLINE_UNMEETABLE,
        f"{text} Retry after retry_after_ms, or allow more time.",
        param="deadline_ms",
        retry_after_ms=_hint(seen.last_token_ms - left_ms),
    )


def _hint(wait_ms: float) -> int:
    return int(min(max(wait_ms, MIN_RETRY_MS), MAX_RETRY_MS))
