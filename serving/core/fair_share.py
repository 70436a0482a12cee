"""Who has had how much: virtual time of tenants by token work and weight, as in VTC (arXiv:2401.00588)."""

from dataclasses import dataclass

PROMPT_TOKEN_PRICE = 1.0
"""Of a prompt token that is computed; cached ones and those computed again after a preemption cost nothing."""
OUTPUT_TOKEN_PRICE = 2.0
"""Of a generated token: it takes a row of a step of its own, where prompt tokens share one. The prices of VTC."""
FIRST_STREAM_TOKENS = 512.0
"""So much work less counts for a tenant without a running sequence: a short request need not wait until the others have
caught up with the one before it. A constant, so it changes no share in the long run."""

EXPECTED_OUTPUT_TOKENS = 64
"""Of a request that starts, that count as served already, if it may generate so many: else a tenant takes one slot
after the other before what runs in them shows. Paid back as they are generated, or when the request ends before."""


@dataclass(slots=True, eq=False)
class Tenant:
    """served: token work at its price, divided by weight. num_live: accepted requests without an end; num_running: of
    them with a slot; num_expected: output tokens that those will still generate, each counted up to
    EXPECTED_OUTPUT_TOKENS."""

    name: str = ""
    weight: float = 1.0
    served: float = 0.0
    num_live: int = 0
    num_running: int = 0
    num_expected: int = 0

    def charge(self, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        self.served += (prompt_tokens * PROMPT_TOKEN_PRICE + output_tokens * OUTPUT_TOKEN_PRICE) / self.weight

    @property
    def waits(self) -> bool:
        """Whether one of its requests has no slot."""
        return self.num_live > self.num_running

    @property
    def turn(self) -> float:
        """The lowest goes first."""
        return self._turn(self.num_running, self.num_expected)

    def turn_without(self, num_expected: int) -> float:
        """The same, once one of its running requests, of which so many tokens are expected, waits again."""
        return self._turn(self.num_running - 1, self.num_expected - num_expected)

    def _turn(self, num_running: int, num_expected: int) -> float:
        ahead = num_expected * OUTPUT_TOKEN_PRICE if num_running else -FIRST_STREAM_TOKENS
        return self.served + ahead / self.weight


class FairShare:
    """All tenants that are active (have a live request) or whose virtual time is ahead of the active ones."""

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._idle_since_s: dict[str, float] = {}
        """Of tenants that may come back, the last to go last."""

    def join(self, name: str, weight: float) -> Tenant:
        """One more live request. A tenant of which none waits starts beside the least served of those that wait: time
        in which it wanted no more than it had earns nothing."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name)
        tenant.weight = weight
        if not tenant.waits:
            tenant.served = max(tenant.served, self._floor())
        tenant.num_live += 1
        self._idle_since_s.pop(name, None)
        return tenant

    def leave(self, tenant: Tenant, now_s: float) -> None:
        """One live request less. With the last of all a busy period ends, and its accounts are closed."""
        tenant.num_live -= 1
        if tenant.num_live:
            return
        self._idle_since_s[tenant.name] = now_s
        floor = min((t.served for t in self._tenants.values() if t.num_live), default=0.0)
        is_busy = any(t.num_live for t in self._tenants.values())
        self._tenants = {n: t for n, t in self._tenants.items() if t.num_live or (is_busy and t.served > floor)}
        if not is_busy:
            self._idle_since_s.clear()

    def parts_of(self, whole: int) -> dict[str, float]:
        """Shares of a whole by name, by weight among the active."""
        active = self.active
        total = sum(t.weight for t in active)
        return {t.name: whole * t.weight / total for t in active}

    def awaits_another(self, now_s: float, window_s: float) -> bool:
        """A tenant has become idle within the window, and is not back."""
        while self._idle_since_s and now_s - next(iter(self._idle_since_s.values())) >= window_s:
            del self._idle_since_s[next(iter(self._idle_since_s))]
        return bool(self._idle_since_s)

    @property
    def active(self) -> tuple[Tenant, ...]:
        return tuple(t for t in self._tenants.values() if t.num_live)

    def _floor(self) -> float:
        """Where nobody waits nobody is owed anything: then all who come are put beside the most served."""
        waiting = [t.served for t in self._tenants.values() if t.waits]
        return min(waiting) if waiting else max((t.served for t in self.active), default=0.0)
