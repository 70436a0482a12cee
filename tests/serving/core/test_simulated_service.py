"""The real scheduler in simulated time, against times worked out by hand."""

from dataclasses import replace

import pytest

from headrace.serving.core.cost_model import CostModel, ProgramCost, program_name
from headrace.serving.core.request import (
    CancelReason,
    FinishReason,
    RejectionReason,
    Request,
    RequestId,
    SamplingParams,
    StopRule,
)
from headrace.serving.core.simulated_service import OpenGate, ServiceRequest, simulate_service
from tests.serving.core.driver import make_config

CONFIG = make_config(num_slots=2, num_pages=65, page_size=4, block_tokens=4, chunk_tokens=16, max_context=128)


def cost(*, host_s: float = 0.0, edge_s: float = 0.0, spread: tuple[float, ...] = (1.0,)) -> CostModel:
    """10 ms a step, 1 ms a prompt token."""
    each = ProgramCost(base_s=0.010, row_s=0.0, token_s=0.001, context_s=0.0, spread=spread, num_steps=1)
    return CostModel(programs={program_name(b): each for b in CONFIG.buckets}, host_s=(host_s,), edge_s=(edge_s,))


def planned(
    index: int, at_s: float = 0.0, *, prompt: int = 8, outputs: int = 4, cancel_after_s: float | None = None
) -> ServiceRequest:
    request = Request(
        request_id=RequestId(index),
        prompt_ids=tuple(100 * index + i for i in range(prompt)),
        sampling=SamplingParams(),
        stop=StopRule(max_tokens=outputs),
    )
    return ServiceRequest(at_s=at_s, request=request, cancel_after_s=cancel_after_s)


def test_a_request_alone_takes_the_sum_of_its_steps() -> None:
    (one,), _ = simulate_service([planned(0, 1.0)], CONFIG, cost(edge_s=0.005), [OpenGate()])
    assert one.first_token_ms == pytest.approx(5 + 10 + 8)
    assert one.gaps_ms == pytest.approx([10, 10, 10])
    assert one.finished is not None and one.finished.reason == FinishReason.LENGTH


def test_the_loop_takes_its_time_unless_a_step_covers_it() -> None:
    one_in_flight = replace(CONFIG, max_steps_in_flight=1)
    (alone,), _ = simulate_service([planned(0)], one_in_flight, cost(host_s=0.002), [OpenGate()])
    assert alone.gaps_ms == pytest.approx([12, 12, 12])
    (overlapped,), _ = simulate_service([planned(0)], CONFIG, cost(host_s=0.002), [OpenGate()])
    assert overlapped.gaps_ms == pytest.approx([10, 10, 10])


def test_requests_queue_for_slots_and_go_to_the_replica_with_less_to_do() -> None:
    many = [planned(i, outputs=50) for i in range(4)]
    queued, _ = simulate_service(many, CONFIG, cost(), [OpenGate()])
    assert max(o.first_token_ms or 0 for o in queued) > 400
    spread, samples = simulate_service(many, CONFIG, cost(), [OpenGate(), OpenGate()])
    assert [o.replica for o in spread] == [0, 1, 0, 1]
    assert max(o.first_token_ms or 0 for o in spread) < 100
    assert {sample.replica for sample in samples} == {0, 1}


def test_cancels_and_refusals_are_what_the_scheduler_says() -> None:
    outcomes, _ = simulate_service(
        [planned(0, outputs=50, cancel_after_s=0.1), planned(1, prompt=128)], CONFIG, cost(), [OpenGate()]
    )
    assert outcomes[0].finished is not None and outcomes[0].finished.cancel_reason == CancelReason.CLIENT
    assert 0.1 <= outcomes[0].ended_s < 0.13
    assert outcomes[1].refused is not None and outcomes[1].refused.reason == RejectionReason.CONTEXT_EXCEEDED


def test_a_seed_draws_the_spread_and_another_draws_another() -> None:
    def firsts(seed: int) -> list[float | None]:
        wide = cost(spread=(0.5, 1.0, 2.0))
        outcomes, _ = simulate_service([planned(i, i / 10) for i in range(5)], CONFIG, wide, [OpenGate()], seed=seed)
        return [outcome.first_token_ms for outcome in outcomes]

    assert firsts(1) == firsts(1) != firsts(2)
