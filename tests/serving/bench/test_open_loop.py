"""An open loop against a target of known answers: plans are kept whatever happens; and figures by hand."""

import asyncio
import time
from dataclasses import replace

import pytest

from headrace.serving.bench.objective import parse_objective
from headrace.serving.bench.open_figures import goodput, open_figures, waits
from headrace.serving.bench.open_loop import OpenLoop, OpenRun, OpenStanding
from headrace.serving.bench.outcome import Outcome
from headrace.serving.bench.targets import AS_SOON_AS_ASKED, Terms
from headrace.serving.bench.workload_file import PlannedRequest, Prompt, WorkloadFile


def planned(at_s: float, **changes: object) -> PlannedRequest:
    return PlannedRequest(at_s=at_s, prompt=Prompt(words=3), max_tokens=4, **changes)  # type: ignore[arg-type]


class SlowTarget:
    """Answers nothing until it is told, or at once."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.asked: list[tuple[int, Terms, float]] = []
        self.bodies: list[dict[str, object]] = []
        self.answer = asyncio.Event()
        if at_once:
            self.answer.set()

    async def ask(self, index: int, body: dict[str, object], terms: Terms = AS_SOON_AS_ASKED) -> Outcome:
        sent_s = time.monotonic()
        self.asked.append((index, terms, sent_s))
        self.bodies.append(body)
        await self.answer.wait()
        return Outcome(index=index, planned_s=terms.planned_s, sent_s=sent_s, ended_s=time.monotonic())


async def test_requests_start_when_planned_though_nobody_answers() -> None:
    requests = [planned(at_s) for at_s in (0, 0.1, 0.1, 0.2)]
    requests[1] = replace(requests[1], tenant="a", priority=2, deadline_ms=9, cancel_after_s=0.5)
    workload = WorkloadFile(requests=tuple(requests), duration_s=0.2)
    target, seen = SlowTarget(), list[OpenStanding]()
    running = asyncio.create_task(OpenLoop(workload=workload, target=target, watch=seen.append).run())
    while len(target.asked) < 4:
        await asyncio.sleep(0.01)
    target.answer.set()
    run = await running
    assert [outcome.index for outcome in run.outcomes] == [0, 1, 2, 3]
    for request, (index, terms, sent_s) in zip(requests, target.asked, strict=True):
        assert terms.planned_s == run.start_s + request.at_s and 0 <= sent_s - terms.planned_s < 5
        assert target.bodies[index] == workload.body(index)
    terms = target.asked[1][1]
    assert (terms.tenant, terms.envelope) == ("a", {"priority": 2, "deadline_ms": 9})
    assert terms.cancel_s == pytest.approx(run.start_s + 0.6) and target.asked[0][1].envelope == {}
    assert seen[0].sent == 0 and seen[0].requests == 4 and seen[0].good is None
    assert run.seconds >= 0.2 and run.cpu_s > 0


async def test_a_run_that_is_stopped_keeps_what_was_offered() -> None:
    workload = WorkloadFile(requests=tuple(planned(at_s) for at_s in (0, 0, 30)), duration_s=60)
    target = SlowTarget()
    loop = OpenLoop(workload=workload, target=target)
    running = asyncio.create_task(loop.run())
    while len(target.asked) < 2:
        await asyncio.sleep(0.01)
    loop.stop.set()
    await asyncio.sleep(0.05)
    assert not running.done()  # what runs is waited for
    target.answer.set()
    run = await running
    assert run.stopped_s is not None and 0 < run.stopped_s < 20
    part = run.offered(workload)
    assert (len(part.requests), part.duration_s) == (2, run.stopped_s)
    assert open_figures(run, part, None)["requests"] == 2


async def test_warm_up_comes_before_and_has_other_prompts() -> None:
    workload = WorkloadFile(requests=(planned(0, tenant="a"),), duration_s=1)
    target = SlowTarget(at_once=True)
    await OpenLoop(workload=workload, target=target, warmup=2).run()
    assert [index for index, _, _ in target.asked] == [-1, -2, 0]
    assert target.asked[0][1] == Terms(tenant="a")
    prompts = [str(body["prompt"]) for body in target.bodies]
    assert len(set(prompts)) == 3 and {len(prompt.split()) for prompt in prompts} == {3}


async def test_what_exceeds_the_limit_in_flight_is_not_sent_and_counts_as_never_answered() -> None:
    workload = WorkloadFile(requests=tuple(planned(0) for _ in range(5)), duration_s=1)
    target = SlowTarget()
    loop = OpenLoop(workload=workload, target=target, max_in_flight=2)
    running = asyncio.create_task(loop.run())
    while len(target.asked) < 2:
        await asyncio.sleep(0.01)
    target.answer.set()
    run = await running
    assert [outcome.error for outcome in run.outcomes] == [None, None, "not_sent", "not_sent", "not_sent"]
    found = open_figures(run, workload, None)
    assert found["first_token"]["never"] == 5 and found["whole_answer"]["never"] == 3
    assert "3 requests were not sent: more were open than --max-in-flight allows" in found["client"]["warnings"]


def test_what_never_came_is_infinite() -> None:
    whole = waits([4.0, 1.0, 3.0, 2.0, 5.0], 0)
    assert (whole["p50_ms"], whole["p95_ms"], whole["mean_ms"], whole["max_ms"]) == (3.0, 4.8, 3.0, 5.0)
    part = waits([1.0] * 90 + [2.0] * 4, 6)
    assert (part["count"], part["never"], part["p50_ms"]) == (100, 6, 1.0)
    assert part["p95_ms"] is part["p99_ms"] is part["mean_ms"] is part["max_ms"] is None
    assert waits([], 0)["p50_ms"] is None and waits([], 3)["never"] == 3
    assert waits([7.0, 9.0], 1)["p50_ms"] == 9.0  # the place is a value's own: what never came is not touched


def test_a_burst_is_not_answered_in_no_time() -> None:
    outcomes = [replace(answered(0, first_ms=500 * number), index=number) for number in range(1, 5)]
    found = goodput(outcomes, 1.0, 100.0, parse_objective("ttft=1.5s"))
    assert (found["good"], found["per_s"]) == (3, pytest.approx(3 / 1.9, abs=0.001))


def answered(index: int, *, first_ms: float, late_ms: float = 0.0, **changes: object) -> Outcome:
    """From its planned second on: the first token after first_ms, three more 100 ms apart."""
    start_s = 100.0 + index
    values: dict[str, object] = {
        "planned_s": start_s, "sent_s": start_s + late_ms / 1000, "first_s": start_s + first_ms / 1000,
        "last_s": start_s + first_ms / 1000 + 0.3, "ended_s": start_s + first_ms / 1000 + 0.4, "prompt_tokens": 3,
        "output_tokens": 4, "first_tokens": 1, "gaps_ms": (100.0,) * 3, "pauses_ms": (100.0,) * 3,
        "server": {"first_token_ms": first_ms - 50, "preemptions": 1},
    }  # fmt: skip
    return Outcome(index=index, **{**values, **changes})  # type: ignore[arg-type]


def refused(index: int, code: str, after_ms: float, **changes: object) -> Outcome:
    start_s = 100.0 + index
    return Outcome(
        index=index, planned_s=start_s, sent_s=start_s, ended_s=start_s + after_ms / 1000, error=code,
        **changes,  # type: ignore[arg-type]
    )  # fmt: skip


def test_figures_by_hand() -> None:
    outcomes = (
        answered(0, first_ms=500, tenant="a"),
        answered(1, first_ms=1500, tenant="a", late_ms=200),
        refused(2, "queue_full", 10, is_refused=True, retry_after_ms=700, tenant="b"),
        refused(3, "queue_full", 30, is_refused=True, retry_after_ms=900, tenant="b"),
        refused(4, "timeout", 5000, tenant="b"),
        answered(5, first_ms=5000, is_cancelled=True, tenant="a"),
    )
    requests = [planned(float(index), tenant=outcome.tenant) for index, outcome in enumerate(outcomes)]
    requests[5] = replace(requests[5], cancel_after_s=1.0)
    workload = WorkloadFile(requests=tuple(requests), duration_s=10)
    run = OpenRun(outcomes=outcomes, start_s=100.0, seconds=20.0, cpu_s=19.0)
    found = open_figures(run, workload, parse_objective("ttft=1s,itl=200ms"))
    assert (found["requests"], found["offered_per_s"], found["answered"]) == (6, 0.6, 2)
    assert (found["refused"], found["failed"], found["cancels"]) == (2, 1, {"planned": 1, "sent": 1})
    # Two answered, one timed out: of the accepted ones the third never came.
    assert found["first_token"]["count"] == 3 and found["first_token"]["never"] == 1
    assert found["first_token"]["p50_ms"] == pytest.approx(1500) and found["first_token"]["p95_ms"] is None
    assert found["whole_answer"]["never"] == 1 and found["mean_gap"]["p50_ms"] == pytest.approx(100)
    assert found["largest_pause"]["max_ms"] == 100 and found["inter_token"]["count"] == 6
    refusals = found["errors"]["queue_full"]
    assert (refusals["count"], refusals["refusals"], refusals["latency"]["p50_ms"]) == (2, 2, pytest.approx(20))
    assert refusals["retry_after"]["max_ms"] == 900 and found["errors"]["timeout"]["retry_after"] is None
    good = found["goodput"]
    assert (good["good"], good["of"], good["share"], good["per_s"]) == (1, 5, 0.2, 0.1)
    assert (found["seconds"], found["output_tokens"], found["output_tokens_per_s"]) == (20.0, 12, 0.6)
    line = found["timeline"]
    assert [row["at_s"] for row in line] == [0, 1, 2, 3, 4, 5] and [row["good"] for row in line] == [1, 0, 0, 0, 0, 0]
    assert [row["refused"] for row in line] == [0, 0, 1, 1, 0, 0] and line[4]["first_token"]["never"] == 1
    assert good["missed"] == {"answer": 3, "ttft": 1} and good["share_interval"][0] < 0.2 < good["share_interval"][1]
    assert found["server"]["first_token_ms"]["count"] == 2 and found["server"]["preemptions"]["sum"] == 2
    # 50 ms before the first token for one, 50 less the 200 that the client was late for the other.
    assert found["server"]["outside_ms"]["max_ms"] == pytest.approx(50)
    assert len(found["client"]["warnings"]) == 2 and "95% of a core" in found["client"]["warnings"][1]
    assert {name: part["requests"] for name, part in found["tenants"].items()} == {"a": 3, "b": 3}
    assert found["tenants"]["a"]["goodput"]["of"] == 2 and found["tenants"]["b"]["goodput"]["share"] == 0
