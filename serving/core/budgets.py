"""What accepted requests hold: streams, the queue, tokens in flight and pages, of the server and of each tenant.

A request is counted when it is accepted, before anything is rendered: bytes of its prompt stand for tokens, which they
are never fewer than. Once tokenized the hold is corrected. It ends exactly once, whatever becomes of the request.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.serving.core.drain_rate import UnitRate
from headrace.serving.core.tenant_policy import Budget, BudgetLimits

MAX_IDLE_TENANTS = 4096
"""Tenants that hold nothing and are remembered for their drain rates."""
QUEUE = (Budget.QUEUED_REQUESTS, Budget.QUEUED_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one choice. prompt_tokens: or an upper bound. output_tokens: expected, at least 1."""

    prompt_tokens: int
    output_tokens: int
    page_size: int

    def of(self, budget: Budget) -> int:
        match budget:
            case Budget.STREAMS | Budget.QUEUED_REQUESTS:
                return 1
            case Budget.QUEUED_TOKENS:
                return self.prompt_tokens
            case Budget.TOKENS_IN_FLIGHT:
                return self.prompt_tokens + self.output_tokens
            case Budget.PAGES:
                # The last token needs no KV.
                return -(-(self.prompt_tokens + self.output_tokens - 1) // self.page_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRefusal:
    """tenant: whose limit it is; None = the server's. retry_after_ms: None where the request alone is too large."""

    budget: Budget
    tenant: str | None
    limit: int
    used: int
    asked: int
    retry_after_ms: int | None


@dataclass(slots=True, eq=False)
class Hold:
    """What one choice holds, until ``Budgets.release``."""

    tenant: str
    held: dict[Budget, int]

    @property
    def is_released(self) -> bool:
        return not self.held


@dataclass(slots=True)
class _Pot:
    used: int = 0
    rate: UnitRate = field(default_factory=UnitRate)


@dataclass(slots=True)
class _Account:
    """Of the server or of a tenant."""

    pots: dict[Budget, _Pot] = field(default_factory=lambda: {budget: _Pot() for budget in Budget})

    @property
    def is_idle(self) -> bool:
        return not self.pots[Budget.STREAMS].used

    def add(self, budget: Budget, amount: int, now_s: float) -> None:
        pot = self.pots[budget]
        pot.used += amount
        pot.rate.on_enter(now_s)

    def remove(self, budget: Budget, amount: int, now_s: float) -> None:
        pot = self.pots[budget]
        pot.used -= amount
        pot.rate.on_leave(amount, now_s, is_empty=pot.used == 0)


class Budgets:
    """limits: of the whole server. Those of a tenant come with each request, since its policy may change."""

    def __init__(self, limits: BudgetLimits) -> None:
        self.limits = limits
        self._server = _Account()
        self._tenants: OrderedDict[str, _Account] = OrderedDict()

    def take(
        self, tenant: str, limits: BudgetLimits, costs: Sequence[Cost], now_s: float
    ) -> tuple[Hold, ...] | BudgetRefusal:
        """One hold for each cost, or none at all. Whoever is over a limit of its own hears of that one."""
        account = self._account(tenant)
        for budget in Budget:
            asked = sum(cost.of(budget) for cost in costs)
            for name, owner, limit in (
                (tenant, account, limits.of(budget)),
                (None, self._server, self.limits.of(budget)),
            ):
                refusal = _refuse(budget, name, owner.pots[budget], limit, asked, now_s)
                if refusal is not None:
                    return refusal
        holds = []
        for cost in costs:
            hold = Hold(tenant, {budget: cost.of(budget) for budget in Budget})
            for budget, amount in hold.held.items():
                account.add(budget, amount, now_s)
                self._server.add(budget, amount, now_s)
            holds.append(hold)
        return tuple(holds)

    def too_large(self, tenant: str, limits: BudgetLimits, costs: Sequence[Cost]) -> BudgetRefusal | None:
        """Of a whole request whose costs are known: why it can never be held, whatever else there is. A single prompt
        that is longer than a queue may wait where nothing else does; several that are so together may not."""
        several = (Budget.QUEUED_TOKENS,) if len(costs) > 1 else ()
        for budget in (*several, Budget.TOKENS_IN_FLIGHT, Budget.PAGES):
            asked = sum(cost.of(budget) for cost in costs)
            for name, limit in ((tenant, limits.of(budget)), (None, self.limits.of(budget))):
                if limit is not None and asked > limit:
                    used = self.used(budget, name)
                    return BudgetRefusal(
                        budget=budget, tenant=name, limit=limit, used=used, asked=asked, retry_after_ms=None
                    )
        return None

    def correct(self, hold: Hold, limits: BudgetLimits, cost: Cost, now_s: float) -> BudgetRefusal | None:
        """The cost is known now. A refusal, with the hold as it was, where the choice alone is more than a limit."""
        refusal = self.too_large(hold.tenant, limits, [cost])
        if refusal is not None:
            return refusal
        account = self._account(hold.tenant)
        for budget, held in hold.held.items():
            hold.held[budget] = cost.of(budget)
            for owner in (account, self._server):
                owner.pots[budget].used += hold.held[budget] - held
        return None

    def leave_queue(self, hold: Hold, now_s: float) -> None:
        """It has its first token. Idempotent."""
        for budget in QUEUE:
            self._give_back(hold, budget, now_s)

    def release(self, hold: Hold, now_s: float) -> None:
        """It is over, however it ended. Idempotent."""
        for budget in tuple(hold.held):
            self._give_back(hold, budget, now_s)
        self._forget_idle()

    def used(self, budget: Budget, tenant: str | None = None) -> int:
        """tenant: None = the whole server."""
        account = self._server if tenant is None else self._tenants.get(tenant)
        return 0 if account is None else account.pots[budget].used

    def per_second(self, budget: Budget) -> float | None:
        """How fast the server's budget drains; None while nothing has been measured."""
        return self._server.pots[budget].rate.per_second

    def retry_after_ms(self, budget: Budget, excess: float, now_s: float) -> int:
        """Until so much of the server's budget has drained."""
        return self._server.pots[budget].rate.retry_after_ms(excess, now_s)

    @property
    def tenants(self) -> tuple[str, ...]:
        """Those that hold something."""
        return tuple(name for name, account in self._tenants.items() if not account.is_idle)

    def _give_back(self, hold: Hold, budget: Budget, now_s: float) -> None:
        amount = hold.held.pop(budget, None)
        if amount is not None:
            self._account(hold.tenant).remove(budget, amount, now_s)
            self._server.remove(budget, amount, now_s)

    def _account(self, tenant: str) -> _Account:
        account = self._tenants.get(tenant)
        if account is None:
            account = self._tenants[tenant] = _Account()
        self._tenants.move_to_end(tenant)
        return account

    def _forget_idle(self) -> None:
        if len(self._tenants) > MAX_IDLE_TENANTS:
            oldest = next((name for name, account in self._tenants.items() if account.is_idle), None)
            if oldest is not None:
                del self._tenants[oldest]


def _refuse(
    budget: Budget, tenant: str | None, pot: _Pot, limit: int | None, asked: int, now_s: float
) -> BudgetRefusal | None:
    """At acceptance. Where nothing is in the budget an amount that is only a bound passes: ``correct`` has the rest."""
    if limit is None or pot.used + asked <= limit:
        return None
    is_count = budget in (Budget.STREAMS, Budget.QUEUED_REQUESTS)
    if not pot.used and not is_count:
        return None
    never = is_count and asked > limit
    return BudgetRefusal(
        budget=budget,
        tenant=tenant,
        limit=limit,
        used=pot.used,
        asked=asked,
        retry_after_ms=None if never else pot.rate.retry_after_ms(pot.used + asked - limit, now_s),
    )
