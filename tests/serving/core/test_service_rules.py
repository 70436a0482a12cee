"""Tenants, classes, deadlines, swap, shared prefixes and deterministic mode, each at work in the scheduler."""

from typing import Any

import pytest

from headrace.serving.core.config import PreemptionPolicy
from headrace.serving.core.errors import ConfigError
from headrace.serving.core.events import PreemptionAction, PreemptionReason
from headrace.serving.core.plan import ProgramKind
from headrace.serving.core.request import CancelReason, FinishReason, Priority, RejectionReason
from tests.serving.core.driver import Drive, ids_alone, make_config, make_request


def first_token_s(drive: Drive, request_id: int) -> float:
    first_ms = drive.finished[request_id].timings.first_token_ms
    assert first_ms is not None
    return first_ms / 1e3


def greedy(drive: Drive, count: int = 64, **changes: Any) -> None:
    """Long requests of one tenant that fill every slot and wait for more."""
    drive.submit(*(make_request(i, 20, 60, tenant="greedy", **changes) for i in range(count)))
    for _ in range(20):
        drive.tick()


@pytest.mark.parametrize("num_swap_pages", [0, 100])
def test_a_short_request_of_another_tenant_is_served_at_once(num_swap_pages: int) -> None:
    alone = Drive(make_config())
    alone.submit(make_request(99, 8, 3, tenant="short"))
    alone.run()
    drive = Drive(make_config(num_pages=200, num_swap_pages=num_swap_pages, aging_s=1.0))
    greedy(drive)
    drive.submit(make_request(99, 8, 3, tenant="short"))
    while 99 not in drive.finished:
        drive.tick()
    step_s = 2.0
    assert first_token_s(drive, 99) <= 2 * first_token_s(alone, 99) + step_s
    action = PreemptionAction.SWAPPED if num_swap_pages else PreemptionAction.RECOMPUTED
    assert [(e.reason, e.action) for e in drive.preempted] == [(PreemptionReason.FAIRNESS, action)]


def test_a_tenant_that_comes_again_finds_its_slot_kept() -> None:
    drive = Drive(make_config(num_pages=200, aging_s=1_000.0))
    greedy(drive)
    for i in range(5):
        drive.submit(make_request(100 + i, 8, 2, tenant="short"))
        while 100 + i not in drive.finished:
            drive.tick()
    assert len(drive.preempted) == 1


def test_nobody_yields_more_often_than_is_stated() -> None:
    drive = Drive(make_config(num_slots=2, num_pages=200))
    drive.submit(*(make_request(i, 20, 100, tenant="greedy") for i in range(3)))
    for i in range(30):
        drive.submit(make_request(100 + i, 8, 2, tenant="short"))
        for _ in range(8):
            drive.tick()
    drive.run()
    assert all(drive.finished[i].timings.preemptions <= 2 for i in range(3))
    assert all(drive.ids(i) == ids_alone(make_request(i, 20, 100)) for i in range(3))


def test_work_is_shared_by_weight() -> None:
    drive = Drive(make_config(num_slots=4, num_pages=200, max_queued_requests=1_000))
    for i in range(120):
        drive.submit(make_request(2 * i, 8, 10, tenant="a"), make_request(2 * i + 1, 8, 10, tenant="b", weight=3.0))
    while len(drive.finished) < 120:
        drive.tick()
    heavy = sum(i % 2 for i in drive.finished)
    assert heavy / (len(drive.finished) - heavy) == pytest.approx(3.0, rel=0.1)


def test_a_higher_class_goes_first_and_takes_a_slot_from_one_that_has_more_than_its_share() -> None:
    drive = Drive(make_config(num_pages=200))
    drive.submit(*(make_request(i, 8, 40, priority=Priority.LOW) for i in range(6)))
    for _ in range(4):
        drive.tick()
    drive.submit(make_request(10, 8, 4), make_request(11, 8, 4, priority=Priority.HIGH))
    for _ in range(4):
        drive.tick()
    assert [e.reason for e in drive.preempted] == [PreemptionReason.PRIORITY] * 2
    drive.run()
    assert drive.finished[11].timings.queue_ms <= drive.finished[10].timings.queue_ms
    assert all(f.timings.preemptions <= 2 for f in drive.finished.values())


def test_the_lowest_class_progresses_beside_a_stream_of_the_highest() -> None:
    drive = Drive(make_config(num_slots=1, aging_s=20.0, max_queued_requests=1_000))
    drive.submit(make_request(99, 8, 5, priority=Priority.LOW))
    drive.submit(*(make_request(i, 8, 5, priority=Priority.HIGH) for i in range(50)))
    drive.run()
    assert 40_000 <= drive.finished[99].timings.queue_ms <= 60_000, "two classes up, and then one request"


@pytest.mark.parametrize("state", ["queue", "prefill", "decode"])
def test_a_deadline_ends_a_request_before_the_next_plan(state: str) -> None:
    drive = Drive(make_config(num_slots=1, max_steps_in_flight=1, chunk_tokens=4))
    if state == "queue":
        drive.submit(make_request(0, 8, 30))
        drive.tick()
    drive.submit(make_request(1, 40 if state == "prefill" else 4, 60, deadline_ms=9_000))
    while 1 not in drive.finished:
        drive.tick()
    finished = drive.finished[1]
    assert (finished.reason, finished.cancel_reason) == (FinishReason.CANCELLED, CancelReason.DEADLINE)
    assert bool(finished.completion_tokens) == (state == "decode")
    late = [p for p in drive.plans[-1:] if any(load.request.request_id == 1 for load in p.loads)]
    assert not late
    drive.run()
    assert drive.scheduler.stats().deadline_misses == 1
    assert len(drive.scheduler._deadlines) == 0


def test_a_request_that_cannot_keep_its_deadline_is_refused_with_the_reason() -> None:
    drive = Drive(make_config(max_steps_in_flight=1))
    drive.submit(make_request(0, 32, 10))
    drive.run()
    rejection = drive.refused(make_request(1, 8, 50, deadline_ms=20_000))
    assert rejection.reason is RejectionReason.DEADLINE and rejection.param == "deadline_ms"
    assert "allow more time" in rejection.message
    drive.submit(make_request(2, 8, 50, deadline_ms=20_000, stop_ids=(1,)), make_request(3, 8, 5, deadline_ms=60_000))
    drive.run()
    assert drive.finished[3].reason is FinishReason.LENGTH


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_swapped_requests_go_on_where_they_were(steps_in_flight: int) -> None:
    drive = Drive(
        make_config(
            num_slots=6,
            num_pages=29,
            num_swap_pages=200,
            preemption=PreemptionPolicy.SWAP,
            max_steps_in_flight=steps_in_flight,
            prefix_cache=False,
        )
    )
    requests = [make_request(i, 8, 36, temperature=0.9, seed=i) for i in range(6)]
    drive.submit(*requests)
    drive.run()
    assert all(drive.ids(r.request_id) == ids_alone(r) for r in requests)
    stats = drive.scheduler.stats()
    assert stats.preemptions == stats.preemptions_swapped == len(drive.preempted) > 0
    assert (stats.swap_pages_total, stats.swap_pages_used) == (200, 0)
    computed = sum(len(s.token_ids) for p in drive.plans for s in p.prefill)
    assert computed == 6 * 8, "no prompt token is computed twice"
    times = [f.timings for f in drive.finished.values() if f.timings.preemptions]
    assert all(t.preempted_ms > 0 and sum(c.count for c in t.preempted) == t.preemptions for t in times)


def test_a_failed_copy_is_computed_again() -> None:
    drive = Drive(make_config(num_swap_pages=50, prefix_cache=False))
    drive.submit(make_request(1, 8, 20), make_request(2, 8, 20))
    for _ in range(6):
        drive.tick()
    drive.take(drive.scheduler.preempt(make_request(1, 8).request_id, drive.now_s))
    drive.plan()
    assert drive.plans[-1].swap_out
    drive.collect()
    drive.fail()
    assert 2 in drive.finished and 1 not in drive.finished
    drive.run()
    assert drive.ids(1) == ids_alone(make_request(1, 8, 20))
    assert drive.plans[-1].swap_in == () and drive.scheduler.stats().swap_pages_used == 0


def test_a_cancel_of_a_swapped_request_frees_its_host_pages() -> None:
    drive = Drive(make_config(num_swap_pages=50))
    drive.submit(make_request(1, 8, 20), make_request(2, 8, 20))
    for _ in range(6):
        drive.tick()
    drive.take(drive.scheduler.preempt(make_request(1, 8).request_id, drive.now_s))
    assert drive.scheduler.stats().swap_pages_used > 0
    drive.cancel(1)
    assert drive.scheduler.stats().swap_pages_used == 0
    drive.run()


def test_a_declared_prefix_is_found_by_all_and_nothing_behind_it() -> None:
    drive = Drive(make_config())
    prompt = make_request(0, 24).prompt_ids
    for i, tenant in enumerate("ab"):
        shared = (10, b"s" * 32)
        drive.submit(make_request(i, prompt, 4, namespace=tenant.encode() * 32, tenant=tenant, shared=shared))
        drive.run()
    drive.submit(make_request(2, prompt, 4, namespace=b"b" * 32, tenant="b", shared=(10, b"s" * 32)))
    drive.run()
    assert [drive.finished[i].cached_tokens for i in range(3)] == [0, 8, 20], "two full pages of the ten tokens"


def test_a_tenant_cannot_drive_out_what_another_has_cached() -> None:
    drive = Drive(make_config(num_pages=33))
    prompt = make_request(0, 41).prompt_ids
    drive.submit(make_request(0, prompt, 1, namespace=b"a" * 32, tenant="a"))
    drive.run()
    for i in range(1, 12):
        drive.submit(make_request(i, 40, 2, namespace=b"b" * 32, tenant="b"))
        drive.run()
    drive.submit(make_request(20, prompt, 1, namespace=b"a" * 32, tenant="a"))
    drive.run()
    assert drive.finished[20].cached_tokens == 40


def deterministic(**changes: Any) -> Drive:
    values = {"deterministic": True, "decode_rows": (4,), "prefill_tokens": (16,)} | changes
    return Drive(make_config(**values))


def test_deterministic_steps_are_of_one_kind_and_take_turns() -> None:
    drive = deterministic(max_steps_in_flight=1, num_pages=200)
    drive.submit(make_request(1, 8, 40))
    drive.tick()
    drive.submit(make_request(2, 100, 4))
    drive.run()
    assert all(not (p.decode and p.prefill) for p in drive.plans)
    kinds = [p.bucket.kind for p in drive.plans[1:15]]
    assert kinds == [ProgramKind.MIXED, ProgramKind.DECODE] * 7 or kinds == [ProgramKind.DECODE, ProgramKind.MIXED] * 7


def test_deterministic_chunks_and_hits_keep_to_the_grid() -> None:
    drive = deterministic()
    prompt = make_request(0, 45).prompt_ids
    drive.submit(make_request(1, prompt, 20), make_request(2, 7, 5))
    drive.run()
    drive.submit(make_request(3, prompt, 4), make_request(4, (*prompt, *drive.ids(1)), 4))
    drive.run()
    chunks = [(s.start, len(s.token_ids), s.samples) for p in drive.plans for s in p.prefill]
    assert all(start % 16 == 0 and (length == 16 or samples) for start, length, samples in chunks)
    assert drive.finished[3].cached_tokens == drive.finished[4].cached_tokens == 32


@pytest.mark.parametrize("num_swap_pages", [0, 12, 300])
def test_deterministic_mode_swaps_or_waits(num_swap_pages: int) -> None:
    drive = deterministic(num_pages=29, num_swap_pages=num_swap_pages)
    requests = [make_request(i, 8, 36) for i in range(8)]
    drive.submit(*requests)
    drive.run()
    assert all(drive.ids(r.request_id) == ids_alone(r) for r in requests)
    stats = drive.scheduler.stats()
    assert stats.preemptions_recomputed == 0 and bool(stats.preemptions_swapped) == (num_swap_pages > 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"deterministic": True}, "one decode and one prefill program"),
        (
            {
                "deterministic": True,
                "decode_rows": (4,),
                "prefill_tokens": (16,),
                "preemption": PreemptionPolicy.RECOMPUTE,
            },
            "never computes a request again",
        ),
        (
            {"deterministic": True, "decode_rows": (4,), "prefill_tokens": (16,), "inter_token_s": 0.25},
            "cannot size them by inter_token_s",
        ),
        ({"preemption": PreemptionPolicy.SWAP}, "needs num_swap_pages"),
    ],
)
def test_configurations_that_cannot_work_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_config(**changes)
