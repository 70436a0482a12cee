"""The step loop: right tokens, overlap, frames, gauges, times, cancels, drain, probes."""

from collections import Counter

import pytest

from headrace.serving.core.events import Event
from headrace.serving.core.request import (
    CancelReason,
    FinishReason,
    RejectionReason,
    RequestId,
)
from headrace.serving.engine.messages import Stats, Step
from tests.serving.engine.bench import (
    DEVICE_S,
    HOST_S,
    NUM_EXPERTS,
    Bench,
    FakeEdge,
    close_when_idle,
    expected_ids,
    request,
)


def test_tokens_are_right_and_each_request_ends_once() -> None:
    bench = Bench()
    requests = [request(n, num_prompt=5 * n, max_tokens=3 + n) for n in range(1, 8)]
    for r in requests:
        bench.inbox.submit(r)
    edge = bench.run(close_when_idle)
    for r in requests:
        assert edge.ids(r.request_id) == expected_ids(r)
        assert [t.index for t in edge.tokens if t.request_id == r.request_id] == list(range(r.stop.max_tokens))
    assert Counter(f.request_id for f in edge.finished) == {r.request_id: 1 for r in requests}


def test_two_steps_are_in_flight_and_no_more() -> None:
    bench = Bench()
    bench.inbox.submit(request(1, max_tokens=6))
    bench.run(close_when_idle)
    assert bench.runner.calls == ["d0", "d1", "c0", "d2", "c1", "d3", "c2", "d4", "c3", "d5", "c4", "c5"]


def test_one_step_at_a_time_where_so_configured() -> None:
    bench = Bench(max_steps_in_flight=1)
    bench.inbox.submit(request(1, max_tokens=3))
    bench.run(close_when_idle)
    assert bench.runner.calls == ["d0", "c0", "d1", "c1", "d2", "c2"]


def test_one_frame_per_step_and_right_gauges_when_idle() -> None:
    bench = Bench()
    for n in (1, 2, 3):
        bench.inbox.submit(request(n))
    edge = bench.run(close_when_idle)
    assert [s.step_id for s in edge.steps] == sorted({s.step_id for s in edge.steps})
    last = edge.messages[-1]
    assert isinstance(last, Stats)
    assert (last.running, last.waiting, last.pages_free + last.pages_cached) == (0, 0, last.pages_total)
    assert last.steps == len(edge.steps)
    assert last.generation_tokens == len(edge.tokens) == 15
    assert last.prompt_tokens == 18


def test_host_and_device_time_are_told_apart() -> None:
    bench = Bench()
    bench.inbox.submit(request(1, max_tokens=6))
    edge = bench.run(close_when_idle)
    last = edge.messages[-1]
    assert isinstance(last, Stats)
    assert last.host_seconds == 6 * HOST_S
    # From the first dispatch to the last collect something is in flight all the time.
    assert last.device_seconds == 6 * HOST_S + 6 * DEVICE_S


def test_idle_time_counts_for_nobody() -> None:
    bench = Bench()
    bench.inbox.submit(request(1, max_tokens=1))

    def script(edge: FakeEdge) -> None:
        if isinstance(edge.messages[-1], Stats):
            if len(edge.finished) == 2:
                edge.inbox.close()
            else:
                bench.clock.now += 1000.0
                edge.inbox.submit(request(2, max_tokens=1))

    edge = bench.run(script)
    last = edge.messages[-1]
    assert isinstance(last, Stats)
    assert last.device_seconds == 2 * (HOST_S + DEVICE_S)


@pytest.mark.parametrize("after_messages", range(9))
def test_a_cancel_at_any_moment_ends_the_request_once(after_messages: int) -> None:
    """Before the first step, in prefill, in decode, in the step that ends it, and afterwards (O24)."""
    bench = Bench()
    victim, other = request(1, num_prompt=40, max_tokens=3), request(2, max_tokens=9)
    bench.inbox.submit(victim)
    bench.inbox.submit(other)
    if after_messages == 0:
        bench.inbox.cancel(RequestId(1), CancelReason.CLIENT)

    def script(edge: FakeEdge) -> None:
        if len(edge.messages) == after_messages:
            edge.inbox.cancel(RequestId(1), CancelReason.CLIENT)
            edge.inbox.cancel(RequestId(99), CancelReason.CLIENT)
        close_when_idle(edge)

    edge = bench.run(script)
    assert Counter(f.request_id for f in edge.finished) == {1: 1, 2: 1}
    assert edge.ids(2) == expected_ids(other)
    assert edge.ids(1) == expected_ids(victim)[: len(edge.ids(1))]
    (end,) = [f for f in edge.finished if f.request_id == 1]
    if end.reason is FinishReason.CANCELLED:
        assert end.cancel_reason is CancelReason.CLIENT
    else:
        assert edge.ids(1) == expected_ids(victim)
    index = next(i for i, s in enumerate(edge.steps) if end in s.finished)
    assert not [t for s in edge.steps[index + 1 :] for t in s.tokens if t.request_id == 1]


def test_a_mass_cancel_leaves_right_gauges_without_new_traffic() -> None:
    """O27: 64 streams dropped in one moment."""
    bench = Bench()
    for n in range(1, 65):
        bench.inbox.submit(request(n, max_tokens=20))

    def script(edge: FakeEdge) -> None:
        if len(edge.messages) == 3:
            for n in range(1, 65):
                edge.inbox.cancel(RequestId(n), CancelReason.DISCONNECT)
        close_when_idle(edge)

    edge = bench.run(script)
    last = edge.messages[-1]
    assert isinstance(last, Stats)
    assert (last.running, last.waiting, last.pages_free + last.pages_cached) == (0, 0, last.pages_total)
    assert Counter(f.request_id for f in edge.finished) == dict.fromkeys(range(1, 65), 1)
    assert sum(f.completion_tokens for f in edge.finished) == last.generation_tokens


def test_refusals_are_answered() -> None:
    bench = Bench()
    bench.inbox.submit(request(1, num_prompt=200))
    bench.inbox.submit(request(2))
    edge = bench.run(close_when_idle)
    (refused,) = edge.refused
    assert refused.request_id == 1
    assert refused.rejection.reason is RejectionReason.CONTEXT_EXCEEDED
    assert [f.request_id for f in edge.finished] == [2]


def test_drain_finishes_what_was_sent_before_and_refuses_what_comes_after() -> None:
    """O28: streams go on at full pace during the drain."""
    bench = Bench()
    bench.inbox.submit(request(1))
    bench.inbox.drain()

    def script(edge: FakeEdge) -> None:
        if len(edge.messages) == 2:
            edge.inbox.submit(request(2))
        close_when_idle(edge)

    edge = bench.run(script)
    assert edge.ids(1) == expected_ids(request(1))
    assert [f.reason for f in edge.finished] == [FinishReason.LENGTH]
    assert [(r.request_id, r.rejection.reason) for r in edge.refused] == [(2, RejectionReason.SHUTTING_DOWN)]


def test_probes_are_answered_idle_and_busy() -> None:
    bench = Bench()
    bench.inbox.probe(11)

    def script(edge: FakeEdge) -> None:
        if len(edge.messages) == 1:
            edge.inbox.submit(request(1))
        elif len(edge.messages) == 3:
            edge.inbox.probe(12)
        else:
            close_when_idle(edge)

    edge = bench.run(script)
    answers = [m for m in edge.messages if isinstance(m, Stats) and m.nonce is not None]
    assert [(m.nonce, m.running) for m in answers] == [(11, 0), (12, 1)]


def test_an_edge_that_is_gone_ends_the_loop_though_requests_run() -> None:
    bench = Bench()
    bench.inbox.submit(request(1, max_tokens=100))

    def script(edge: FakeEdge) -> None:
        if len(edge.tokens) >= 3:
            edge.inbox.close()

    edge = bench.run(script)
    assert len(edge.tokens) == 3


def test_events_and_stats_do_not_depend_on_overlap() -> None:
    outcomes: list[list[Event]] = []
    for depth in (1, 2):
        bench = Bench(max_steps_in_flight=depth)
        for n in range(1, 6):
            bench.inbox.submit(request(n, num_prompt=9 * n, max_tokens=2 * n))
        edge = bench.run(close_when_idle)
        outcomes.append(sorted(edge.tokens, key=lambda t: (t.request_id, t.index)))
    assert outcomes[0] == outcomes[1]


def reported(edge: FakeEdge) -> list[bool]:
    """Of each step: whether the experts' load follows its tokens, which do not wait for it."""
    assert all(step.stats.expert_tokens is None for step in edge.steps)
    pairs = zip(edge.messages, edge.messages[1:], strict=False)
    return [
        isinstance(after, Stats) and after.expert_tokens is not None for step, after in pairs if isinstance(step, Step)
    ]


def test_the_experts_load_comes_when_idle_and_once_a_second_while_steps_run() -> None:
    bench = Bench()
    bench.inbox.submit(request(1, num_prompt=6, max_tokens=5))
    edge = bench.run(close_when_idle)
    last = edge.messages[-1]
    assert isinstance(last, Stats) and last.expert_tokens is not None
    # The last token that was sampled was never run.
    ran = [(7 + i) % 64 for i in range(6)] + expected_ids(request(1))[:-1]
    for layer, counts in enumerate(last.expert_tokens):
        assert counts == tuple(sum((token + layer) % NUM_EXPERTS == expert for token in ran) for expert in range(8))
    assert reported(edge) == [True] * len(edge.steps)  # of 2 s each


def test_fast_steps_do_not_wait_for_the_experts_load() -> None:
    bench = Bench()
    bench.runner.step_s = 0.3
    bench.inbox.submit(request(1, num_prompt=6, max_tokens=20))
    edge = bench.run(close_when_idle)
    found = reported(edge)
    assert len(found) == 20 and 4 <= sum(found) <= 12
    assert not any(first and second for first, second in zip(found, found[1:-1], strict=False))


def test_counters_that_cannot_be_read_end_no_request() -> None:
    bench = Bench()
    bench.runner.fail_experts = RuntimeError("a step failed")
    bench.inbox.submit(request(1))
    edge = bench.run(close_when_idle)
    assert edge.ids(1) == expected_ids(request(1))
    assert reported(edge) == [False] * len(edge.steps)


def test_a_frame_without_the_experts_load_keeps_the_one_before() -> None:
    first, second = Stats(steps=1, expert_tokens=((1, 2),)), Stats(steps=2)
    assert second.after(first) == Stats(steps=2, expert_tokens=((1, 2),))
    assert first.after(second) is first
    assert Stats().after(Stats(steps=1)) == Stats()
