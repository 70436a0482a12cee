"""What one tenant may use, and how its requests stand beside those of others. Values only; files are read elsewhere."""

from dataclasses import dataclass
from enum import StrEnum

from headrace.serving.core.rate_limit import Rate
from headrace.serving.core.request import Priority


class Budget(StrEnum):
    """What is counted from acceptance to release, for the server and for each tenant."""

    STREAMS = "streams"
    QUEUED_REQUESTS = "queued_requests"
    QUEUED_TOKENS = "queued_tokens"
    TOKENS_IN_FLIGHT = "tokens_in_flight"
    PAGES = "pages"


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetLimits:
    """Most of each budget at once, at least 1; None = no limit of its own.

    streams: accepted choices that have not ended. queued_requests, queued_tokens: choices without a first token, and
    their prompt tokens. tokens_in_flight: prompt and expected output tokens of all accepted choices. pages: that those
    tokens take.
    """

    streams: int | None = None
    queued_requests: int | None = None
    queued_tokens: int | None = None
    tokens_in_flight: int | None = None
    pages: int | None = None

    def of(self, budget: Budget) -> int | None:
        limit: int | None = getattr(self, budget.value)
        return limit


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPolicy:
    """weight: > 0, the share of token work beside other tenants that wait. max_priority: the best class that its
    requests may ask for; what they get without asking is NORMAL, or that class where it is lower. deadline_ms: of
    requests that name none; None = none. sees_tenants: whether /v1/load names all tenants to it.
    """

    weight: float = 1.0
    max_priority: Priority = Priority.HIGH
    limits: BudgetLimits = BudgetLimits()
    requests: Rate | None = None
    tokens: Rate | None = None
    deadline_ms: int | None = None
    sees_tenants: bool = False

    @property
    def default_priority(self) -> Priority:
        return max(Priority.NORMAL, self.max_priority)
