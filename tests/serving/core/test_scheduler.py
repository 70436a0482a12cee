"""Mechanics of the scheduler, one by one; what they must never break together is in test_simulator.py."""

import hashlib

import pytest

from headrace.serving.core.errors import InvariantError
from headrace.serving.core.events import Finished
from headrace.serving.core.plan import Bucket, ProgramKind, SampledToken, SlotRef, StepPlan, StepResult
from headrace.serving.core.request import CancelReason, FinishReason, RejectionReason, RequestId
from headrace.serving.core.scheduler import Scheduler
from tests.serving.core.driver import VOCAB, Drive, ids_alone, make_config, make_request


def test_one_request_from_prompt_to_end() -> None:
    drive = Drive(make_config())
    request = make_request(1, 6, 5)
    drive.submit(request)
    drive.run()
    assert drive.ids(1) == ids_alone(request)
    finished = drive.finished[1]
    assert (finished.reason, finished.prompt_tokens, finished.completion_tokens) == (FinishReason.LENGTH, 6, 5)
    prefill, *decode = drive.plans
    assert (prefill.bucket, prefill.num_tokens) == (Bucket(ProgramKind.MIXED, 4, 16), 6)
    assert [plan.bucket for plan in decode] == [Bucket(ProgramKind.DECODE, 1)] * 4
    assert [plan.decode[0].position for plan in decode] == [6, 7, 8, 9]
    assert [plan.decode[0].output_index for plan in decode] == [1, 2, 3, 4]


def test_a_step_is_planned_before_the_last_result_is_known() -> None:
    drive = Drive(make_config())
    drive.submit(make_request(1, 6, 8))
    assert drive.plan() is not None
    second = drive.plan()
    assert second is not None and second.decode[0].input_token is None
    assert drive.plan() is None, "two steps are in flight"
    drive.collect()
    third = drive.plan()
    assert third is not None and third.decode[0].input_token is None
    drive.collect()
    drive.collect()
    fourth = drive.plan()
    assert fourth is not None and fourth.decode[0].input_token == drive.ids(1)[-1], "nothing was in flight"


def test_no_row_is_planned_beyond_max_tokens() -> None:
    drive = Drive(make_config())
    drive.submit(make_request(1, 6, 2))
    assert drive.plan() is not None and drive.plan() is not None
    drive.collect()
    assert drive.plan() is None
    drive.collect()
    assert drive.scheduler.is_idle


def test_decode_rows_come_first_and_new_requests_join_at_every_step() -> None:
    drive = Drive(make_config(max_steps_in_flight=1))
    drive.submit(make_request(1, 6, 20))
    drive.tick()
    drive.submit(make_request(2, 5, 20))
    plan = drive.plan()
    assert plan is not None
    assert [row.slot.slot for row in plan.decode] == [0]
    assert [segment.slot.slot for segment in plan.prefill] == [1]
    assert [load.request.request_id for load in plan.loads] == [2]
    drive.collect()
    plan = drive.plan()
    assert plan is not None and len(plan.decode) == 2
    assert plan.loads == ()


def test_a_long_prompt_is_read_in_chunks_while_others_decode() -> None:
    drive = Drive(make_config(max_steps_in_flight=1))
    drive.submit(make_request(1, 4, 30))
    drive.tick()
    drive.submit(make_request(2, 40, 3))
    chunks = []
    for _ in range(3):
        plan = drive.plan()
        assert plan is not None and len(plan.decode) == 1
        chunks.append((plan.prefill[0].start, len(plan.prefill[0].token_ids), plan.prefill[0].samples))
        assert not drive.tokens[2], "no token before the last chunk"
        drive.collect()
    assert chunks == [(0, 16, False), (16, 16, False), (32, 8, True)]
    assert len(drive.tokens[2]) == 1


def test_what_is_left_of_the_budget_starts_the_next_prompt() -> None:
    drive = Drive(make_config())
    drive.submit(make_request(1, 5, 3), make_request(2, 20, 3), make_request(3, 5, 3))
    plan = drive.plan()
    assert plan is not None
    assert [len(segment.token_ids) for segment in plan.prefill] == [5, 8], "5 are padded to 8 of 16"


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_stop_id_ends_a_request_and_is_reported(steps_in_flight: int) -> None:
    drive = Drive(make_config(max_steps_in_flight=steps_in_flight))
    alone = ids_alone(make_request(1, 6, 12))
    stop = alone[4]
    assert stop not in alone[:4]
    drive.submit(make_request(1, 6, 12, stop_ids=(stop,)))
    drive.run()
    finished = drive.finished[1]
    assert drive.ids(1) == alone[:5]
    assert (finished.reason, finished.stop_token_id, finished.completion_tokens) == (FinishReason.STOP, stop, 5)


def test_a_row_in_flight_after_the_end_is_dropped_and_its_pages_wait_for_it() -> None:
    drive = Drive(make_config(num_slots=1, prefix_cache=False, is_shared=False))
    stop = ids_alone(make_request(1, 6, 12))[0]
    drive.submit(make_request(1, 6, 12, stop_ids=(stop,)), make_request(2, 6, 3))
    drive.plan()
    late = drive.plan()
    assert late is not None and late.decode[0].slot.generation == 1
    events = drive.collect()
    assert isinstance(events[-1], Finished)
    stats = drive.scheduler.stats()
    assert stats.pages_free == stats.pages_total - 2, "the late row still writes there"
    joined = drive.plan()
    assert joined is not None and joined.prefill[0].slot == SlotRef(0, 2)
    assert not set(joined.prefill[0].page_ids) & set(late.decode[0].page_ids)
    assert drive.collect() == []
    assert drive.scheduler.stats().pages_free == stats.pages_total - 2, "now those of the second"
    drive.run()
    assert drive.ids(2) == ids_alone(make_request(2, 6, 3))


@pytest.mark.parametrize("min_tokens", [0, 1, 5, 12])
def test_min_tokens_holds_off_every_stop_id(min_tokens: int) -> None:
    """O05: several stop ids; the prompt does not count."""
    request = make_request(1, 60, 12, min_tokens=min_tokens, stop_ids=tuple(range(0, VOCAB, 2)))
    drive = Drive(make_config())
    drive.submit(request)
    drive.run()
    assert drive.finished[1].completion_tokens >= min_tokens
    assert not set(drive.ids(1)[:min_tokens]) & set(request.stop.stop_token_ids)
    assert drive.ids(1) == ids_alone(request)


def test_logits_that_are_not_finite_end_one_request() -> None:
    drive = Drive(make_config(), non_finite=frozenset({(RequestId(1), 2)}))
    drive.submit(make_request(1, 9, 8), make_request(2, 9, 8))
    drive.run()
    failed = drive.finished[1]
    assert (failed.reason, failed.error_code, failed.completion_tokens) == (
        FinishReason.ERROR,
        "non_finite_logits",
        2,
    )
    assert drive.ids(2) == ids_alone(make_request(2, 9, 8))


def test_pages_of_a_request_with_bad_logits_are_not_used_again() -> None:
    drive = Drive(make_config(), non_finite=frozenset({(RequestId(1), 2)}))
    drive.submit(make_request(1, 9, 8))
    drive.run()
    assert drive.scheduler.stats().pages_cached == 0
    drive.submit(make_request(2, make_request(1, 9).prompt_ids, 8))
    drive.run()
    assert drive.finished[2].cached_tokens == 0


def test_while_others_wait_two_steps_in_flight_are_no_larger_than_a_full_chunk() -> None:
    """So a newcomer waits for one long step at most before its own."""
    drive = Drive(make_config(num_slots=4, chunk_tokens=16))
    drive.submit(make_request(1, 6, 20))
    assert drive.plan() is not None
    drive.submit(make_request(2, 6, 20))
    assert drive.plan() is None, "the second has to start in the next step, with whoever comes until then"
    drive.collect()
    mixed = drive.plan()
    assert mixed is not None and mixed.prefill and mixed.decode
    drive.submit(*(make_request(i, 6, 20) for i in range(3, 7)))
    drive.collect()
    drive.plan()
    drive.collect()
    assert drive.plan() is not None and drive.plan() is not None, "two decode steps, though two requests wait"


@pytest.mark.parametrize("failed", [0, 1])
def test_a_failed_step_ends_the_requests_in_it(failed: int) -> None:
    """The older or the newer of two steps in flight; a request that joined later goes on."""
    drive = Drive(make_config(is_shared=False))
    drive.submit(make_request(1, 6, 8))
    drive.plan()
    drive.submit(make_request(2, 6, 8))
    drive.plan()
    plans = [plan for plan, _ in drive.in_flight]
    events = drive.take(drive.scheduler.fail_plan(plans[failed], "device_error", "it broke", drive.now_s))
    ended = {1} if failed == 0 else {1, 2}
    assert {event.request_id for event in events} == ended
    assert all(isinstance(e, Finished) and e.error_code == "device_error" and e.error_message for e in events)
    plan, ticket = drive.in_flight[1 - failed]
    results = {p.step_id: drive.runner.collect(t) for p, t in drive.in_flight}
    drive.in_flight.clear()
    drive.take(drive.scheduler.apply_result(plan, results[plan.step_id], drive.now_s))
    assert set(drive.finished) == ended
    drive.run()
    stats = drive.scheduler.stats()
    assert stats.pages_free + stats.pages_cached == stats.pages_total
    if failed == 0:
        assert drive.ids(2) == ids_alone(make_request(2, 6, 8))


def test_pages_of_a_failed_step_are_not_used_again() -> None:
    drive = Drive(make_config(max_steps_in_flight=1))
    drive.submit(make_request(1, 9, 8))
    drive.tick()
    drive.plan()
    assert drive.scheduler.lanes[0].memory.cache.find(drive.scheduler._tenancies.running[0].keys)
    drive.fail()
    assert drive.scheduler.stats().pages_cached == 0


def test_results_must_come_in_order_and_in_the_shape_of_the_plan() -> None:
    drive = Drive(make_config())
    drive.submit(make_request(1, 6, 8))
    first, second = drive.plan(), drive.plan()
    assert first is not None and second is not None
    token = SampledToken(token_id=1)
    apply = drive.scheduler.apply_result
    with pytest.raises(InvariantError, match="oldest plan in flight"):
        apply(second, StepResult(step_id=second.step_id, decode=(token,), prefill=()), 0.0)
    with pytest.raises(InvariantError, match="oldest plan in flight"):
        apply(first, StepResult(step_id=second.step_id, decode=(), prefill=(token,)), 0.0)
    for decode, prefill in (((), ()), ((), (None,)), ((token,), (token,)), ((), (token, token))):
        with pytest.raises(InvariantError, match="shape"):
            apply(first, StepResult(step_id=first.step_id, decode=decode, prefill=prefill), 0.0)
    other = StepPlan(step_id=first.step_id, bucket=first.bucket, loads=(), decode=(), prefill=())
    with pytest.raises(InvariantError, match="not in flight"):
        drive.scheduler.fail_plan(other, "x", "x", 0.0)


def test_what_can_never_fit_is_refused_and_leaves_no_trace() -> None:
    drive = Drive(make_config(num_pages=11, max_context=60))
    assert drive.refused(make_request(1, 50, 11)).reason == RejectionReason.CONTEXT_EXCEEDED
    assert drive.refused(make_request(1, 60, 1)).reason == RejectionReason.CONTEXT_EXCEEDED
    assert drive.refused(make_request(1, 30, 12)).reason == RejectionReason.NEVER_FITS
    assert drive.scheduler.is_idle and drive.scheduler.stats().prompt_tokens == 0
    drive.submit(make_request(1, 30, 11))
    drive.run()
    assert drive.finished[1].completion_tokens == 11, "it takes every page"


def test_a_full_queue_refuses_with_a_measured_hint() -> None:
    drive = Drive(make_config(num_slots=1, max_queued_requests=4))
    drive.submit(*(make_request(i, 6, 3) for i in range(4)))
    rejection = drive.refused(make_request(9, 6, 3))
    assert (rejection.reason, rejection.retry_after_ms) == (RejectionReason.QUEUE_FULL, 1_000)
    while len(drive.finished) < 2:
        drive.tick()
    drive.submit(*(make_request(i, 6, 3) for i in range(10, 10 + 4 - drive.scheduler.stats().waiting)))
    rejection = drive.refused(make_request(9, 6, 3))
    gap_s = drive.finished[1].timings.queue_ms / 1e3 - drive.finished[0].timings.queue_ms / 1e3
    assert rejection.retry_after_ms is not None and rejection.retry_after_ms >= 2 * gap_s * 1e3


def test_draining_refuses_new_work_and_ends_the_old() -> None:
    drive = Drive(make_config(num_slots=1))
    drive.submit(make_request(1, 6, 8), make_request(2, 6, 8))
    drive.tick()
    drive.scheduler.drain()
    assert drive.refused(make_request(3, 6, 8)).reason == RejectionReason.SHUTTING_DOWN
    drive.run()
    assert {f.reason for f in drive.finished.values()} == {FinishReason.LENGTH}


def test_an_id_in_use_is_refused_and_free_after_the_end() -> None:
    """O29."""
    drive = Drive(make_config())
    drive.submit(make_request(1, 6, 3))
    assert drive.refused(make_request(1, 9, 3)).reason == RejectionReason.INVALID
    drive.run()
    for _ in range(20):
        drive.finished.clear()
        drive.submit(make_request(1, 6, 3))
        drive.plan()
        drive.cancel(1)
        drive.finished.clear()
        drive.submit(make_request(1, 9, 3))
        drive.run()
        assert drive.ids(1) == ids_alone(make_request(1, 9, 3))


def test_times_follow_the_clock_that_is_passed_in() -> None:
    drive = Drive(make_config(num_slots=1, max_steps_in_flight=1))
    drive.submit(make_request(1, 6, 3), make_request(2, 6, 1))
    drive.run()
    first, second = drive.finished[1].timings, drive.finished[2].timings
    assert (first.queue_ms, first.prefill_ms, first.decode_ms, first.first_token_ms) == (1e3, 1e3, 4e3, 2e3)
    assert (second.queue_ms, second.prefill_ms, second.decode_ms) == (7e3, 1e3, 0.0)


def test_times_of_a_request_that_never_ran() -> None:
    drive = Drive(make_config())
    drive.submit(make_request(1, 6, 3))
    drive.now_s = 5.0
    drive.cancel(1, CancelReason.DISCONNECT)
    finished = drive.finished[1]
    assert finished.cancel_reason == CancelReason.DISCONNECT
    times = finished.timings
    assert (times.queue_ms, times.prefill_ms, times.decode_ms, times.first_token_ms) == (5e3, 0.0, 0.0, None)


def test_counters_equal_the_sums_over_finished_requests() -> None:
    """O27."""
    drive = Drive(make_config(), non_finite=frozenset({(RequestId(3), 1)}))
    shared = make_request(0, 20).prompt_ids
    for i in range(8):
        drive.submit(make_request(i, shared + (i,) * i, 6))
        drive.tick()
        if i == 5:
            drive.cancel(4)
    drive.run()
    stats, finished = drive.scheduler.stats(), drive.finished.values()
    assert len(finished) == 8
    assert stats.prompt_tokens == sum(f.prompt_tokens for f in finished)
    assert stats.prefix_queries_tokens == stats.prompt_tokens - 24, "number 4 never left the queue"
    assert stats.generation_tokens == sum(f.completion_tokens for f in finished)
    assert stats.prefix_hits_tokens == sum(f.cached_tokens for f in finished) > 0
    assert (stats.running, stats.waiting, stats.steps) == (0, 0, len(drive.plans))


def test_gauges_are_right_at_once_after_a_mass_cancel() -> None:
    drive = Drive(make_config(prefix_cache=False))
    drive.submit(*(make_request(i, 6, 8) for i in range(10)))
    drive.tick()
    for i in range(10):
        drive.cancel(i)
    stats = drive.scheduler.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    drive.run()
    assert drive.scheduler.stats().pages_free == stats.pages_total


def test_a_follow_up_turn_finds_prompt_and_generated_pages() -> None:
    drive = Drive(make_config())
    first = make_request(1, 6, 11)
    drive.submit(first)
    drive.run()
    turn = first.prompt_ids + tuple(drive.ids(1)) + (1, 2, 3)
    drive.submit(make_request(2, turn, 4))
    drive.run()
    assert drive.finished[2].cached_tokens == 16, "16 of the 16 positions that were computed"
    assert drive.ids(2) == ids_alone(make_request(2, turn, 4))


def test_another_namespace_finds_nothing() -> None:
    drive = Drive(make_config())
    drive.submit(make_request(1, 20, 3, namespace=b"a" * 32))
    drive.run()
    prompt = make_request(1, 20).prompt_ids
    drive.submit(make_request(2, prompt, 3, namespace=b"b" * 32), make_request(3, prompt, 3, namespace=b"a" * 32))
    drive.run()
    assert (drive.finished[2].cached_tokens, drive.finished[3].cached_tokens) == (0, 16)


def digest_of_a_run() -> str:
    drive = Drive(make_config(num_pages=12))
    for i in range(12):
        drive.submit(make_request(i, 3 + i, 10, temperature=1.0, seed=i))
        drive.tick()
        drive.cancel(i - 3 if i % 5 == 4 else 99)
    drive.run()
    return hashlib.sha256(repr(drive.plans).encode()).hexdigest()


def test_the_same_commands_give_the_same_plans() -> None:
    assert digest_of_a_run() == digest_of_a_run()


def test_check_finds_a_live_sequence_that_is_nowhere() -> None:
    drive = Drive(make_config())
    drive.submit(make_request(1, 6, 8))
    drive.scheduler._tenancies.waiting.remove(drive.scheduler._tenancies.waiting.first(0.0))
    with pytest.raises(InvariantError, match="not in exactly one"):
        drive.scheduler.check()


@pytest.mark.parametrize("damage", ["slot", "pages", "num_computed", "num_pending"])
def test_check_finds_a_damaged_running_sequence(damage: str) -> None:
    drive = Drive(make_config())
    drive.submit(make_request(1, 6, 8))
    drive.plan()
    (sequence,) = drive.scheduler._tenancies.running
    drive.scheduler.check()
    change = {"slot": None, "pages": [1], "num_computed": 7, "num_pending": 2}[damage]
    setattr(sequence, damage, change)
    if damage == "num_pending":
        sequence.num_computed += 1
    with pytest.raises(InvariantError):
        drive.scheduler.check()


def test_an_unused_scheduler_is_idle() -> None:
    scheduler = Scheduler(make_config())
    assert scheduler.is_idle
    assert scheduler.plan_step(0.0) is None
    assert scheduler.stats().pages_free == 63
