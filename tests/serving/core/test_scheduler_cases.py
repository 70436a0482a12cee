"""Public bug classes at the level of the scheduler; the fake runner raises on any wrong use of KV memory."""

import pytest

from headrace.serving.core.events import TokenEvent
from headrace.serving.core.policy import MAX_PREEMPTIONS
from headrace.serving.core.prefix_cache import PageHash, sha256_page
from headrace.serving.core.request import FinishReason, RejectionReason, Request
from headrace.serving.core.scheduler import Scheduler
from headrace.serving.core.simulated_world import Draw
from headrace.serving.core.simulator import weak_page_hash
from headrace.serving.engine.fake_runner import expected_tokens
from tests.serving.core.driver import VOCAB, Drive, ids_alone, make_config, make_request


def run_together(drive: Drive, *requests: Request) -> None:
    drive.submit(*requests)
    drive.run()
    for request in requests:
        assert drive.ids(request.request_id) == ids_alone(request)


@pytest.mark.parametrize("length", [k * 4 + d for k in (1, 2, 3, 8) for d in (-1, 0, 1)])
def test_o19_a_fully_cached_prompt_still_runs_its_last_token(length: int) -> None:
    drive = Drive(make_config())
    prompt = make_request(0, length).prompt_ids
    run_together(drive, make_request(1, prompt, 1))
    run_together(drive, make_request(2, prompt, 9), make_request(3, prompt, 9))
    turn = prompt + tuple(drive.ids(2)[:1])
    run_together(drive, make_request(4, turn, 9))
    most = (length - 1) // 4 * 4
    assert [drive.finished[i].cached_tokens for i in (1, 2, 3, 4)] == [0, most, most, length // 4 * 4]
    stats = drive.scheduler.stats()
    assert stats.pages_free + stats.pages_cached == stats.pages_total


def test_o19_two_equal_prompts_in_one_step_share_nothing_that_is_not_computed() -> None:
    drive = Drive(make_config())
    prompt = make_request(0, 8).prompt_ids
    run_together(drive, make_request(1, prompt, 9), make_request(2, prompt, 9))
    assert len(drive.plans[0].prefill) == 2
    assert drive.finished[2].cached_tokens == 0
    run_together(drive, make_request(3, prompt, 9))
    assert drive.finished[3].cached_tokens == 4


@pytest.mark.parametrize("hash_page", [weak_page_hash(256), sha256_page], ids=["8 bits", "SHA-256"])
def test_o20_colliding_hashes_and_evictions_never_return_foreign_kv(hash_page: PageHash) -> None:
    """500 prompts of 1 to 6 pages in 24 pages, 8 at a time, with cancels."""
    draw = Draw(20)
    config = make_config(num_slots=8, num_pages=25, max_queued_requests=1_000)
    drive = Drive(config, Scheduler(config, hash_page=hash_page))
    pages = [tuple(draw.below(VOCAB) for _ in range(4)) for _ in range(6)]
    requests = {}
    for i in range(500):
        prompt = tuple(t for _ in range(draw.between(1, 6)) for t in draw.pick(pages))
        requests[i] = make_request(i, prompt[: len(prompt) - draw.below(3)], draw.between(1, 6))
    for i, request in requests.items():
        drive.submit(request)
        drive.tick()
        if draw.chance(10):
            drive.cancel(draw.between(max(0, i - 10), i))
    drive.run()
    for i, request in requests.items():
        alone = ids_alone(request)
        is_cancelled = drive.finished[i].reason == FinishReason.CANCELLED
        assert drive.ids(i) == (alone[: len(drive.ids(i))] if is_cancelled else alone)
    assert drive.scheduler.stats().prefix_hits_tokens > 0
    assert sum(f.reason == FinishReason.CANCELLED for f in drive.finished.values()) > 10


def crowd() -> list[Request]:
    """Six requests of 8 + 36 tokens with penalties, logprobs and seeds."""
    return [
        make_request(
            i, 8, 36, presence_penalty=1.0, num_logprobs=2, seed=7 if i == 3 else 0, temperature=0.9 if i == 3 else 0.0
        )
        for i in range(6)
    ]


def assert_as_alone(drive: Drive, requests: list[Request]) -> None:
    for request in requests:
        expected = expected_tokens(request, VOCAB)
        events = drive.tokens[request.request_id]
        assert [(e.token_id, e.logprobs) for e in events] == [(t.token_id, t.logprobs) for t in expected]
        assert all(event.logprobs is not None for event in events)
        finished = drive.finished[request.request_id]
        assert (finished.reason, finished.completion_tokens) == (FinishReason.LENGTH, 36)
        assert finished.timings.preemptions <= MAX_PREEMPTIONS


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_o22_preempted_requests_end_as_if_alone(steps_in_flight: int, prefix_cache: bool) -> None:
    """Pages for about two and a half requests."""
    drive = Drive(
        make_config(num_slots=6, num_pages=29, max_steps_in_flight=steps_in_flight, prefix_cache=prefix_cache)
    )
    drive.submit(*crowd())
    drive.run()
    assert_as_alone(drive, crowd())
    assert drive.scheduler.stats().preemptions > 0
    assert drive.scheduler.stats().preemptions == sum(f.timings.preemptions for f in drive.finished.values())


def test_o22_preemption_at_every_step_number_changes_nothing() -> None:
    num_forced = 0
    for tick in range(0, 60, 3):
        drive = Drive(make_config(num_slots=6))
        drive.submit(*crowd()[:3])
        for _ in range(tick):
            drive.tick()
        running = drive.scheduler._tenancies.running
        if running:
            drive.take(drive.scheduler.preempt(running[-1].request.request_id, drive.now_s))
            num_forced += 1
        drive.run()
        assert_as_alone(drive, crowd()[:3])
    assert num_forced >= 10


def small_pool(**changes: int) -> Drive:
    """O23: 49 pages of 16."""
    return Drive(
        make_config(
            num_slots=8,
            page_size=16,
            block_tokens=16,
            chunk_tokens=256,
            num_pages=50,
            max_context=2048,
            prefix_cache=False,
            **changes,
        )
    )


def run_with_progress(drive: Drive) -> None:
    """Some request makes a token in every 50 steps."""
    ticks_without_token = 0
    while not drive.scheduler.is_idle:
        before = sum(map(len, drive.tokens.values()))
        drive.tick()
        ticks_without_token = 0 if sum(map(len, drive.tokens.values())) > before else ticks_without_token + 1
        assert ticks_without_token <= 50


def test_o23_what_can_never_fit_is_refused_and_delays_nobody() -> None:
    drive = small_pool()
    for request in (make_request(1, 1002, 1), make_request(2, 400, 600)):
        assert drive.refused(request).reason == RejectionReason.NEVER_FITS
    run_together(drive, make_request(3, 20, 5))
    assert drive.finished[3].timings.queue_ms == 1e3


@pytest.mark.parametrize(
    ("count", "prompt", "output"), [(10, 300, 400), (2, 240, 240), (6, 16, 700)], ids=["c", "d", "grow"]
)
def test_o23_crowded_requests_all_end_with_bounded_preemption(count: int, prompt: int, output: int) -> None:
    drive = small_pool()
    requests = [make_request(i, prompt, output) for i in range(count)]
    drive.submit(*requests)
    run_with_progress(drive)
    for request in requests:
        assert drive.ids(request.request_id) == ids_alone(request)
        assert drive.finished[request.request_id].timings.preemptions <= MAX_PREEMPTIONS


def test_o24_cancelling_a_queued_request_leaves_the_running_one_alone() -> None:
    drive = Drive(make_config(num_slots=1))
    drive.submit(make_request(1, 6, 20), make_request(2, 6, 20))
    for _ in range(4):
        drive.tick()
    (event,) = drive.cancel(2)
    assert event.request_id == 2
    drive.run()
    assert drive.ids(1) == ids_alone(make_request(1, 6, 20))
    assert {load.request.request_id for plan in drive.plans for load in plan.loads} == {1}


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_o24_a_cancel_at_any_step_ends_once_and_frees_all(steps_in_flight: int) -> None:
    alone = ids_alone(make_request(1, 40, 20))
    reasons = set()
    for num_ticks in range(30):
        drive = Drive(make_config(max_steps_in_flight=steps_in_flight))
        drive.submit(make_request(1, 40, 20), make_request(2, 6, 30))
        for _ in range(num_ticks):
            drive.tick()
        drive.cancel(1)
        assert drive.cancel(1) == [] and drive.cancel(77) == []
        drive.run()
        finished = drive.finished[1]
        reasons.add(finished.reason)
        assert finished.completion_tokens == len(drive.ids(1))
        assert drive.ids(1) == alone[: len(drive.ids(1))]
        assert drive.ids(2) == ids_alone(make_request(2, 6, 30))
        stats = drive.scheduler.stats()
        assert stats.pages_free + stats.pages_cached == stats.pages_total
    assert reasons == {FinishReason.CANCELLED, FinishReason.LENGTH}


def test_o24_cancelled_pages_are_free_within_two_steps() -> None:
    drive = Drive(make_config(prefix_cache=False))
    drive.submit(make_request(1, 30, 40), make_request(2, 6, 60))
    while not drive.ids(1):
        drive.tick()
    assert drive.scheduler.stats().pages_total - drive.scheduler.stats().pages_free >= 8 + 2
    drive.cancel(1)
    for _ in range(2):
        drive.tick()
    held = drive.scheduler.stats().pages_total - drive.scheduler.stats().pages_free
    assert held == -(-(6 + len(drive.ids(2)) + 1) // 4), "what is held is the other request's"


@pytest.mark.parametrize("is_running", [False, True])
def test_o24_all_64_cancelled_at_once(is_running: bool) -> None:
    drive = Drive(make_config(num_slots=64, num_pages=512))
    drive.submit(*(make_request(i, 6, 20) for i in range(64)))
    for _ in range(40 if is_running else 0):
        drive.tick()
    for i in range(64):
        drive.cancel(i)
    assert len(drive.finished) == 64
    drive.run()
    run_together(drive, make_request(99, 6, 5))


@pytest.mark.parametrize("chunk", [8, 16, 64])
@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 47])
def test_o26_chunks_give_the_tokens_of_one_shot(chunk: int, length: int) -> None:
    drive = Drive(make_config(chunk_tokens=chunk))
    run_together(drive, make_request(1, length, 8), make_request(2, length + 1, 8))
    covered = [
        position
        for plan in drive.plans
        for segment in plan.prefill
        if segment.slot.slot == 0
        for position in range(segment.start, segment.start + len(segment.token_ids))
    ]
    assert covered == list(range(length)), "each position once and in order"


def test_o26_a_warm_prefix_may_end_inside_a_chunk() -> None:
    drive = Drive(make_config(chunk_tokens=16))
    prompt = make_request(0, 50).prompt_ids
    run_together(drive, make_request(1, prompt[:13], 1))
    run_together(drive, make_request(2, prompt, 8))
    assert drive.finished[2].cached_tokens == 12
    first = next(p for plan in drive.plans for p in plan.prefill if p.start == 12)
    assert len(first.token_ids) == 16


def test_o26_a_cancel_between_chunks_stops_the_prompt() -> None:
    drive = Drive(make_config(chunk_tokens=8))
    drive.submit(make_request(1, 32, 8))
    drive.tick()
    events = drive.cancel(1)
    assert not any(isinstance(event, TokenEvent) for event in events)
    drive.run()
    assert len(drive.plans) == 1
