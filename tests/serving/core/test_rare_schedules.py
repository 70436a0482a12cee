"""Rare meetings of rules: what one of them takes for granted and another one breaks."""

from collections.abc import Callable

import pytest

from headrace.serving.core.config import PreemptionPolicy
from headrace.serving.core.fair_share import OUTPUT_TOKEN_PRICE, PROMPT_TOKEN_PRICE
from headrace.serving.core.request import Priority, RequestId
from tests.serving.core.driver import Drive, ids_alone, make_config, make_request


def test_a_step_that_fails_ends_a_request_that_it_only_loaded() -> None:
    """Its slot may not be loaded, and no later plan loads it again."""
    drive = Drive(make_config(max_segments=1, max_steps_in_flight=1))
    drive.submit(make_request(0, 60, 1, tenant="a"))
    drive.tick()
    drive.submit(make_request(1, 60, 60, tenant="b"))
    plan = drive.plan()
    assert plan is not None
    assert [load.request.request_id for load in plan.loads] == [1]
    assert len(plan.prefill) == 1 and plan.prefill[0].slot != plan.loads[0].slot, "the older prompt has its only chunk"
    drive.in_flight.clear()
    drive.runner._tickets.clear()
    drive.take(drive.scheduler.fail_plan(plan, "device_error", "it broke", drive.now_s))
    assert set(drive.finished) == {0, 1}
    drive.run()


def test_a_sequence_whose_leaving_pages_were_taken_is_copied_before_it_comes_back() -> None:
    drive = Drive(
        make_config(
            num_slots=3, num_pages=12, num_swap_pages=20, preemption=PreemptionPolicy.SWAP, max_steps_in_flight=1,
            prefix_cache=False,
        )
    )  # fmt: skip
    low = make_request(0, 12, 6, priority=Priority.NORMAL)
    last = make_request(1, 12, 6, priority=Priority.LOW)
    drive.submit(low, last)
    for _ in range(3):
        drive.tick()
    for request_id in (0, 1):
        drive.take(drive.scheduler.preempt(RequestId(request_id), drive.now_s))
    drive.submit(make_request(2, 18, 2, priority=Priority.HIGH))
    drive.run()
    assert drive.ids(0) == ids_alone(low) and drive.ids(1) == ids_alone(last)


@pytest.mark.parametrize("is_full", [False, True])
def test_no_slot_is_kept_from_whom_a_lower_class_yields_to(is_full: bool) -> None:
    drive = Drive(make_config(num_pages=200, aging_s=1_000.0))
    drive.submit(make_request(50, 8, 2, tenant="gone"))
    drive.submit(make_request(0, 8, 100, tenant="a", priority=Priority.HIGH))
    drive.submit(*(make_request(i, 8, 100, tenant="b", priority=Priority.LOW) for i in (1, 2, 3)))
    while 50 not in drive.finished:
        drive.tick()
    if is_full:
        drive.submit(make_request(4, 8, 100, tenant="c", priority=Priority.LOW))
    for _ in range(6):
        drive.tick()
    drive.submit(make_request(10, 8, 4, tenant="a", priority=Priority.HIGH))
    for _ in range(20):
        drive.tick()
    assert len(drive.preempted) == is_full and 10 in drive.finished


def test_who_yields_to_a_higher_class_after_long_service_does_not_take_its_slot_back() -> None:
    """The class has aged only since it yielded, however long ago its last request was started."""
    drive = Drive(make_config(num_pages=200, aging_s=5.0))
    drive.submit(*(make_request(i, 8, 100, tenant=f"t{i}", priority=Priority.LOW) for i in range(4)))
    for _ in range(20):
        drive.tick()
    drive.submit(make_request(10, 8, 1, tenant="high", priority=Priority.HIGH))
    for _ in range(4):
        drive.tick()
    assert 10 in drive.finished and len(drive.preempted) == 1


@pytest.mark.parametrize(("tenants", "deterministic"), [(("one", "one"), False), (("high", "low"), True)])
def test_a_prompt_of_the_lowest_class_is_read_to_its_end_beside_prompts_of_the_highest(
    tenants: tuple[str, str], deterministic: bool
) -> None:
    drive = Drive(
        make_config(
            num_pages=200, chunk_tokens=4, prefill_tokens=(4,), decode_rows=(4,), aging_s=10.0, num_swap_pages=200,
            deterministic=deterministic,
        )
    )  # fmt: skip
    drive.submit(make_request(0, 12, 2, tenant=tenants[1], priority=Priority.LOW))
    for i in range(1, 60):
        while drive.scheduler.stats().waiting > 4:
            drive.tick()
        drive.submit(make_request(i, 16, 1, tenant=tenants[0], priority=Priority.HIGH))
        if 0 in drive.finished:
            break
    assert 0 in drive.finished
    assert drive.finished[0].timings.prefill_ms <= 100_000, "three chunks, each after two classes up"


@pytest.mark.parametrize("num_swap_pages", [None, 0, 20])
def test_each_computed_prompt_token_and_each_generated_token_is_charged_once(num_swap_pages: int | None) -> None:
    drive = Drive(make_config(num_swap_pages=num_swap_pages or 0, chunk_tokens=8))
    drive.submit(make_request(0, 4, 60, tenant="stays"))
    drive.submit(make_request(1, 20, 9, tenant="one"))
    tenant = drive.scheduler._live[RequestId(1)].tenant
    while 1 not in drive.finished:
        drive.tick()
        if num_swap_pages is not None and len(drive.preempted) < 2 and len(drive.tokens[1]) in (0, 4):
            drive.take(drive.scheduler.preempt(RequestId(1), drive.now_s))
    assert tenant.served == 20 * PROMPT_TOKEN_PRICE + 9 * OUTPUT_TOKEN_PRICE
    assert len(drive.preempted) == (0 if num_swap_pages is None else 2)


def test_a_long_stream_earns_its_tenant_no_claim_on_all_slots_later() -> None:
    drive = Drive(make_config(num_pages=400, max_context=512))
    heavy = iter(range(1_000, 2_000))

    def heavy_finished_until(is_over: Callable[[], bool]) -> int:
        before = sum(i >= 1_000 for i in drive.finished)
        while not is_over():
            while drive.scheduler.stats().waiting < 46:
                drive.submit(make_request(next(heavy), 20, 8, tenant="heavy"))
            drive.tick()
        return sum(i >= 1_000 for i in drive.finished) - before

    drive.submit(make_request(0, 8, 400, tenant="light"))
    heavy_finished_until(lambda: len(drive.tokens[0]) >= 100)
    drive.submit(*(make_request(i, 20, 8, tenant="light") for i in range(1, 41)))
    assert heavy_finished_until(lambda: sum(0 < i <= 40 for i in drive.finished) >= 15) >= 10


def test_a_chunk_behind_a_long_cached_prefix_keeps_to_the_objective_in_its_first_step_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drive = Drive(make_config(inter_token_s=1.0, max_steps_in_flight=1))
    prompt = make_request(0, 48).prompt_ids
    drive.submit(make_request(0, prompt, 2), make_request(1, 4, 60))
    while 0 not in drive.finished:
        drive.tick()
    monkeypatch.setattr(drive.scheduler._tenancies.cost, "budget_tokens", lambda start: 16 if start < 40 else 4)
    drive.submit(make_request(2, (*prompt, *range(16)), 2))
    plan = drive.plan()
    assert plan is not None and plan.decode and plan.prefill[0].start == 48
    assert len(plan.prefill[0].token_ids) == 4


def test_nobody_yields_to_a_tenant_that_would_not_be_next() -> None:
    """Else the slot goes back to who yielded it."""
    drive = Drive(make_config(num_pages=400, max_context=512, aging_s=1.0))
    drive.submit(make_request(0, 8, 400, tenant="light"))
    drive.submit(*(make_request(i, 20, 60, tenant="heavy") for i in range(1, 13)))
    while len(drive.finished) < 12:
        drive.tick()
    drive.submit(*(make_request(i, 8, 20, tenant="light") for i in range(40, 43)))
    for _ in range(4):
        drive.tick()
    drive.submit(make_request(50, 8, 4, tenant="heavy"))
    for _ in range(6):
        drive.tick()
    assert drive.preempted == [] and 50 not in drive.finished
