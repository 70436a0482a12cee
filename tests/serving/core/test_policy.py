from dataclasses import dataclass

import pytest

from headrace.serving.core.config import PreemptionPolicy
from headrace.serving.core.events import PreemptionAction, PreemptionReason
from headrace.serving.core.fair_share import FIRST_STREAM_TOKENS, Tenant
from headrace.serving.core.policy import (
    MAX_PAGE_PREEMPTIONS,
    arrival_rank,
    class_level,
    guard_fits,
    is_newcomer,
    keeps_a_slot,
    must_guard,
    pages_to_keep_free,
    pick_class_victim,
    pick_fairness_victim,
    pick_page_victim,
    preemption_action,
    share_cells,
    share_chunks,
)
from headrace.serving.core.request import Priority
from headrace.serving.core.sequence import Sequence
from tests.serving.core.driver import make_request


def sequence(
    arrival: int, prompt: int = 5, max_tokens: int = 8, priority: Priority = Priority.NORMAL, **state: object
) -> Sequence:
    made = Sequence(
        request=make_request(arrival, prompt, max_tokens, priority=priority), arrival=arrival, submitted_s=0.0
    )
    for name, value in state.items():
        setattr(made, name, value)
    return made


def test_first_come_first_served_within_a_tenant_and_the_last_is_the_victim() -> None:
    tenant = Tenant()
    running = [sequence(i, tenant=tenant) for i in (2, 0, 1)]
    assert [s.arrival for s in sorted(running, key=arrival_rank)] == [0, 1, 2]
    first = running[1]
    victim = pick_page_victim(first, running)
    assert victim is not None and victim.arrival == 2
    assert pick_page_victim(victim, running) is None, "the last waits itself"


def test_a_class_that_is_not_served_is_lifted_up_to_the_highest() -> None:
    waits_s = (-5.0, 9.9, 10.0, 19.9, 20.0, 1e6)
    assert [class_level(Priority.LOW, wait_s, 10.0) for wait_s in waits_s] == [2, 2, 1, 1, 0, 0]
    assert class_level(Priority.HIGH, 1e6, 10.0) == 0


def test_a_tenant_that_runs_nothing_is_a_little_ahead() -> None:
    tenant = Tenant("a", weight=2.0, served=1_000.0)
    assert tenant.turn == 1_000.0 - FIRST_STREAM_TOKENS / 2
    tenant.num_running = 1
    assert tenant.turn == 1_000.0


def fairness(held: dict[str, int], weights: dict[str, float], priority: Priority = Priority.NORMAL) -> str | None:
    """Whose request yields to a new tenant with weight 1 in 8 slots."""
    tenants = {name: Tenant(name, weights[name], num_running=count) for name, count in held.items()}
    running = [
        sequence(10 * i + j, tenant=t, priority=priority)
        for i, t in enumerate(tenants.values())
        for j in range(t.num_running)
    ]
    total = sum(weights.values()) + 1
    excess = {name: held[name] * total / (8 * weight) for name, weight in weights.items()}
    victim = pick_fairness_victim(sequence(99, tenant=Tenant("new")), running, excess)
    if victim is None:
        return None
    assert victim.arrival % 10 == victim.tenant.num_running - 1, "the latest of the tenant"
    return victim.tenant.name


def test_a_tenant_above_its_share_of_slots_yields_to_one_that_runs_nothing() -> None:
    assert fairness({"greedy": 8}, {"greedy": 1.0}) == "greedy"
    assert fairness({"a": 6, "b": 2}, {"a": 1.0, "b": 1.0}) == "a"
    assert fairness({"a": 4, "b": 4}, {"a": 8.0, "b": 1.0}) == "b"
    assert fairness({"a": 4}, {"a": 1.0}) is None, "exactly its share"
    assert fairness({"greedy": 8}, {"greedy": 1.0}, priority=Priority.HIGH) is None, "nobody yields to a lower class"


@pytest.mark.parametrize(
    ("level", "levels", "victim"),
    [
        (0, [1, 1, 1, 1], 3),  # NORMAL keeps 3 of 4
        (0, [0, 1, 1, 1], None),
        (1, [2, 2, 2, 2], 3),  # LOW keeps 2 of 4
        (1, [1, 1, 2, 2], None),
        (0, [1, 2, 2, 2], 3),
        (2, [2, 2, 2, 2], None),
        (1, [1, 1, 1, 1], None),
    ],
)
def test_a_class_above_its_share_of_slots_yields_to_a_higher_one(
    level: int, levels: list[int], victim: int | None
) -> None:
    tenant = Tenant()
    running = [sequence(i, tenant=tenant, priority=Priority(its)) for i, its in enumerate(levels)]
    candidate = sequence(9, tenant=tenant, priority=Priority(level))
    found = pick_class_victim(candidate, running, [s.request.priority for s in running], 4)
    assert (None if found is None else found.arrival) == victim


def test_a_slot_is_kept_for_a_tenant_that_paused() -> None:
    greedy, new = sequence(0, tenant=Tenant(num_running=3)), sequence(1, tenant=Tenant())
    assert keeps_a_slot(greedy, [], 1, 4, awaits_another=True)
    assert not keeps_a_slot(greedy, [], 2, 4, awaits_another=True)
    assert not keeps_a_slot(greedy, [], 1, 3, awaits_another=True)
    assert not keeps_a_slot(greedy, [], 1, 4, awaits_another=False)
    assert not keeps_a_slot(new, [], 1, 4, awaits_another=True)
    low = sequence(2, tenant=greedy.tenant, priority=Priority.LOW)
    assert keeps_a_slot(greedy, [greedy], 1, 4, awaits_another=True)
    assert not keeps_a_slot(greedy, [greedy, low], 1, 4, awaits_another=True), "it yields to the candidate"


def test_one_page_per_running_sequence_stays_free_but_for_a_guarded_one_or_a_first_stream() -> None:
    first, next_one = sequence(1, tenant=Tenant("new")), sequence(2, tenant=Tenant("greedy", num_running=1))
    assert [pages_to_keep_free(next_one, guarded, n) for guarded, n in ((False, 0), (False, 2), (True, 2))] == [0, 2, 0]
    assert pages_to_keep_free(first, False, 2) == 0


def test_a_newcomer_is_the_only_stream_of_its_tenant_with_a_short_prompt() -> None:
    assert is_newcomer(sequence(1, tenant=Tenant("new")))
    assert not is_newcomer(sequence(2, tenant=Tenant("greedy", num_running=1)))
    assert share_chunks([20, 100], 16, 4, 3, 1) == [16, 0], "it leaves nothing to those behind it"
    assert share_chunks([5, 100], 16, 4, 3, 1) == [5, 8], "but what it does not need"


def test_after_enough_preemptions_for_pages_the_worst_cases_of_the_guarded_must_fit() -> None:
    # 5 + 8 - 1 = 12 positions: 3 pages of 4.
    key = (PreemptionReason.PAGES, PreemptionAction.RECOMPUTED)
    again = sequence(9, preempted={key: MAX_PAGE_PREEMPTIONS})
    assert must_guard(again, [], page_size=4, num_host_free=None)
    assert not must_guard(sequence(9, preempted={key: MAX_PAGE_PREEMPTIONS - 1}), [], page_size=4, num_host_free=None)
    running = [sequence(1, is_guarded=True), sequence(2)]
    assert guard_fits(again, running, page_size=4, num_usable=6)
    assert not guard_fits(again, running, page_size=4, num_usable=5)


def test_where_preemption_must_swap_the_unguarded_fit_into_host_memory() -> None:
    running = [sequence(1), sequence(2, is_guarded=True)]
    assert not must_guard(sequence(9), running, page_size=4, num_host_free=6)
    assert must_guard(sequence(9), running, page_size=4, num_host_free=5)


def test_the_cheaper_action_is_taken_where_both_are_possible() -> None:
    @dataclass
    class Case:
        policy: PreemptionPolicy
        tokens: int
        host: int
        token_ms: float
        page_ms: float
        swaps: bool

    auto, swap, recompute = PreemptionPolicy
    for case in (
        Case(auto, 64, 4, 1.0, 1.0, True),
        Case(auto, 64, 4, 0.1, 1.0, False),
        Case(auto, 64, 4, 0.0, 9.0, True),
        Case(auto, 64, 3, 1.0, 1.0, False),
        Case(swap, 64, 4, 0.1, 1.0, True),
        Case(swap, 64, 3, 1.0, 1.0, False),
        Case(swap, 0, 4, 1.0, 1.0, False),
        Case(recompute, 64, 4, 1.0, 1.0, False),
    ):
        action = preemption_action(
            case.policy,
            num_tokens=case.tokens,
            num_pages=4,
            num_host_free=case.host,
            token_ms=case.token_ms,
            page_ms=case.page_ms,
        )
        assert (action is PreemptionAction.SWAPPED) == case.swaps, case


@pytest.mark.parametrize(
    ("needs", "budget", "chunks"),
    [
        ([100], 16, [16]),
        ([5, 20, 5], 16, [5, 8, 0]),
        ([100, 3], 16, [12, 3]),
        ([16, 100], 16, [16, 0]),
        ([100, 100], 16, [12, 4]),
        ([100, 100], 8, [4, 4]),
        ([3, 100], 16, [3, 12]),
        ([100, 100], 4, [4, 0]),
        ([1, 1, 1, 1, 1], 40, [1, 1, 1, 0, 0]),
        ([], 16, []),
    ],
)
def test_no_prompt_takes_a_whole_step_while_others_want_a_part(
    needs: list[int], budget: int, chunks: list[int]
) -> None:
    assert share_chunks(needs, budget, 4, 3) == chunks


def test_cells_are_whole_or_the_rest_of_a_prompt() -> None:
    assert share_cells([100], 16, 4, 3) == [16]
    assert share_cells([5, 20, 5], 16, 4, 3) == [5, 0, 5]
    assert share_cells([100, 3], 16, 4, 3) == [16, 0]
    assert share_cells([1, 1, 1, 1], 16, 4, 3) == [1, 1, 1, 0]
