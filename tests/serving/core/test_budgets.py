"""Budgets: counted once, given back once, refused by name."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.serving.core.budgets import MAX_IDLE_TENANTS, BudgetRefusal, Budgets, Cost, Hold
from headrace.serving.core.tenant_policy import Budget, BudgetLimits

NONE = BudgetLimits()


def cost(prompt: int = 10, output: int = 5, page_size: int = 4) -> Cost:
    return Cost(prompt_tokens=prompt, output_tokens=output, page_size=page_size)


def taken(budgets: Budgets, *costs: Cost, tenant: str = "a", limits: BudgetLimits = NONE, at: float = 0) -> list[Hold]:
    holds = budgets.take(tenant, limits, costs, at)
    assert not isinstance(holds, BudgetRefusal), holds
    return list(holds)


def refused(
    budgets: Budgets, *costs: Cost, tenant: str = "a", limits: BudgetLimits = NONE, at: float = 0
) -> BudgetRefusal:
    refusal = budgets.take(tenant, limits, costs, at)
    assert isinstance(refusal, BudgetRefusal)
    return refusal


def used(budgets: Budgets, tenant: str | None = None) -> dict[str, int]:
    return {budget.value: budgets.used(budget, tenant) for budget in Budget}


def test_what_one_choice_holds_and_when_it_lets_go() -> None:
    budgets = Budgets(NONE)
    [hold] = taken(budgets, cost(prompt=10, output=5))
    assert used(budgets) == used(budgets, "a")
    assert used(budgets) == {
        "streams": 1, "queued_requests": 1, "queued_tokens": 10, "tokens_in_flight": 15, "pages": 4,
    }  # fmt: skip
    assert budgets.correct(hold, NONE, cost(prompt=3, output=5), 0) is None
    assert used(budgets)["queued_tokens"] == 3
    assert used(budgets)["pages"] == 2
    budgets.leave_queue(hold, 1.0)
    budgets.leave_queue(hold, 1.0)
    assert used(budgets)["queued_requests"] == used(budgets)["queued_tokens"] == 0
    assert used(budgets)["tokens_in_flight"] == 8
    budgets.release(hold, 2.0)
    budgets.release(hold, 2.0)
    assert hold.is_released
    assert set(used(budgets).values()) == set(used(budgets, "a").values()) == {0}
    assert budgets.tenants == ()


@pytest.mark.parametrize("budget", Budget)
def test_each_budget_has_its_limit_of_the_server_and_of_each_tenant(budget: Budget) -> None:
    amount = cost().of(budget)
    limits = BudgetLimits(**{budget.value: 2 * amount})
    of_server, of_tenant = Budgets(limits), Budgets(NONE)
    for _ in range(2):
        taken(of_server, cost())
        taken(of_tenant, cost(), limits=limits)
    refusal = refused(of_server, cost(), tenant="b")
    assert (refusal.budget, refusal.tenant, refusal.limit, refusal.used) == (budget, None, 2 * amount, 2 * amount)
    assert refusal.retry_after_ms
    refusal = refused(of_tenant, cost(), limits=limits)
    assert (refusal.budget, refusal.tenant) == (budget, "a")
    taken(of_tenant, cost(), tenant="b", limits=limits)


def test_a_refusal_leaves_no_trace_and_choices_are_taken_together() -> None:
    budgets = Budgets(BudgetLimits(streams=3))
    taken(budgets, cost(), cost())
    before = used(budgets)
    assert refused(budgets, cost(), cost()).asked == 2
    assert used(budgets) == before
    taken(budgets, cost())


def test_more_choices_than_ever_fit_get_no_hint() -> None:
    assert refused(Budgets(BudgetLimits(streams=3)), *[cost()] * 4).retry_after_ms is None


def test_a_bound_passes_alone_and_the_true_size_decides() -> None:
    """A prompt of many bytes may have few tokens."""
    limits = BudgetLimits(tokens_in_flight=100)
    budgets = Budgets(NONE)
    [hold] = taken(budgets, cost(prompt=400), limits=limits)
    refusal = budgets.correct(hold, limits, cost(prompt=200), 0)
    assert refusal is not None
    assert (refusal.asked, refusal.retry_after_ms) == (205, None)
    assert used(budgets)["tokens_in_flight"] == 405
    assert budgets.correct(hold, limits, cost(prompt=80), 0) is None
    assert used(budgets)["tokens_in_flight"] == 85


def test_a_prompt_beyond_the_queue_is_taken_where_nothing_waits() -> None:
    budgets = Budgets(BudgetLimits(queued_tokens=50))
    [hold] = taken(budgets, cost(prompt=80))
    assert budgets.correct(hold, NONE, cost(prompt=80), 0) is None
    assert refused(budgets, cost(prompt=1)).budget is Budget.QUEUED_TOKENS


def test_the_hint_is_the_measured_rate() -> None:
    """Ten tokens in flight end in each second; thirty too many are gone in three."""
    budgets = Budgets(BudgetLimits(tokens_in_flight=100))
    holds = [taken(budgets, cost(prompt=8, output=2))[0] for _ in range(10)]
    for second, hold in enumerate(holds[:5], 1):
        budgets.release(hold, float(second))
    assert budgets.per_second(Budget.TOKENS_IN_FLIGHT) == pytest.approx(10)
    refusal = refused(budgets, cost(prompt=70, output=10), at=5.0)
    assert refusal.retry_after_ms == 3000
    assert budgets.retry_after_ms(Budget.TOKENS_IN_FLIGHT, 10_000, 5.0) == 60_000


def test_tenants_without_requests_are_forgotten_in_the_end() -> None:
    budgets = Budgets(NONE)
    for number in range(MAX_IDLE_TENANTS + 10):
        [hold] = taken(budgets, cost(), tenant=f"t{number}")
        budgets.release(hold, 0)
    assert len(budgets._tenants) == MAX_IDLE_TENANTS


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_whatever_happens_the_sums_are_those_of_the_holds(data: st.DataObject) -> None:
    budgets = Budgets(BudgetLimits(streams=6, tokens_in_flight=150))
    live: list[Hold] = []
    for time_s in range(data.draw(st.integers(0, 40))):
        match data.draw(st.sampled_from(("take", "correct", "leave", "release", "release"))):
            case "take":
                tenant = data.draw(st.sampled_from("ab"))
                holds = budgets.take(
                    tenant, BudgetLimits(pages=20), [cost(prompt=data.draw(st.integers(1, 60)))], time_s
                )
                live += () if isinstance(holds, BudgetRefusal) else holds
            case "correct" if live:
                budgets.correct(live[0], NONE, cost(prompt=data.draw(st.integers(1, 60))), time_s)
            case "leave" if live:
                budgets.leave_queue(data.draw(st.sampled_from(live)), time_s)
            case "release" if live:
                hold = live.pop(data.draw(st.integers(0, len(live) - 1)))
                budgets.release(hold, time_s)
                budgets.release(hold, time_s)
        for tenant in (None, "a", "b"):
            for budget in Budget:
                held = sum(hold.held.get(budget, 0) for hold in live if tenant in (None, hold.tenant))
                assert budgets.used(budget, tenant) == held
        assert budgets.used(Budget.STREAMS) <= 6
