"""Workloads from a few numbers: what is drawn, and that nothing depends on anything else."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from headrace.serving.bench.make_workload import Lengths, Share, WorkloadPlan, make_workload, parse_lengths
from headrace.serving.bench.workload_file import parse_workload
from headrace.serving.core.errors import ConfigError

PLAN = WorkloadPlan(
    phases=((50.0, 40.0),),
    prompt=parse_lengths("lognormal:60:0.5"),
    max_tokens=parse_lengths("uniform:4:8"),
    tenants=(Share(name="gold", share=3), Share(name="free", share=1)),
    prefixes=(Share(name="system", share=1, length=20), Share(name=None, share=1)),
    cancel_share=0.1,
    deadline_ms=900,
    seed=5,
)


def test_a_workload_has_the_rate_and_the_shares_of_its_plan() -> None:
    found = make_workload(PLAN)
    number = len(found.requests)
    gaps = np.diff([request.at_s for request in found.requests])
    # 2,000 expected with a deviation of 45; of exponential gaps the deviation is the mean.
    assert abs(number - 2_000) < 225 and found.duration_s == 40 and 0.9 < np.std(gaps) / np.mean(gaps) < 1.1
    tenants = Counter(request.tenant for request in found.requests)
    assert set(tenants) == {"gold", "free"} and 0.7 < tenants["gold"] / number < 0.8
    assert 0.45 < sum(request.shared_prefix == "system" for request in found.requests) / number < 0.55
    assert 0.07 < sum(request.cancel_after_s == 1.0 for request in found.requests) / number < 0.13
    words = [request.prompt.words or 0 for request in found.requests]
    assert 55 < np.median(words) < 65 and max(words) <= 960 and 0.45 < np.std(np.log(words)) < 0.55
    assert Counter(request.max_tokens for request in found.requests).keys() == {4, 5, 6, 7, 8}
    assert {request.deadline_ms for request in found.requests} == {900}
    assert "50 requests/s for 40 s (poisson), prompts of lognormal:60:0.5:960 words" in found.description


def test_a_workload_can_be_read_again_and_comes_again() -> None:
    found = make_workload(PLAN)
    assert parse_workload("\n".join(found.lines()).encode(), "w") == found == make_workload(PLAN)
    assert make_workload(replace(PLAN, seed=6)).hash != found.hash


def test_each_aspect_draws_from_a_stream_of_its_own() -> None:
    before, after = make_workload(PLAN), make_workload(replace(PLAN, prompt=parse_lengths("9"), tenants=()))
    for name in ("at_s", "max_tokens", "shared_prefix", "cancel_after_s"):
        assert [getattr(one, name) for one in before.requests] == [getattr(one, name) for one in after.requests]


def test_drawn_answers_have_seeds_and_greedy_ones_none() -> None:
    drawn = make_workload(replace(PLAN, temperature=0.5, requests=3, ignore_eos=False)).requests
    assert [request.sampling for request in drawn] == [{"temperature": 0.5, "seed": seed} for seed in (5, 6, 7)]
    assert make_workload(PLAN).requests[0].sampling == {"temperature": 0.0, "ignore_eos": True}


def test_even_arrivals_and_phases() -> None:
    even = replace(PLAN, arrivals="uniform", phases=((2.0, 2.0), (4.0, 1.0), (1.0, 2.0)))
    times = [request.at_s for request in make_workload(even).requests]
    assert times == [0, 0.5, 1, 1.5, 2, 2.25, 2.5, 2.75, 3, 4]
    five = make_workload(replace(even, phases=((2.0, 1.0),), requests=5))
    assert [request.at_s for request in five.requests] == [0, 0.5, 1, 1.5, 2] and five.duration_s == 2.5
    ids = make_workload(replace(even, is_words=False, requests=1))
    assert ids.requests[0].prompt.tokens is not None and ids.prefixes["system"].tokens == 20
    rates = make_workload(replace(PLAN, phases=((20.0, 20.0), (100.0, 20.0))))
    early = sum(request.at_s < 20 for request in rates.requests)
    assert 320 < early < 480 and 1_800 < len(rates.requests) - early < 2_200


def test_lengths() -> None:
    assert parse_lengths("7").fixed == 7 and parse_lengths("uniform:2:9") == Lengths(low=2, high=9)
    cut = parse_lengths("lognormal:100:2:150")
    drawn = [cut.draw(random.Random(seed)) for seed in range(200)]
    assert max(drawn) == 150 and min(drawn) >= 1 and parse_lengths(str(cut)) == cut
    for text in ("", "0", "x", "uniform:9:2", "uniform:0:2", "lognormal:5:9", "lognormal:50:1:20", "1000001", "-1"):
        with pytest.raises(ConfigError, match="length"):
            parse_lengths(text)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"phases": ()}, "give --rate with --duration or --requests, --phase, or --trace"),
        ({"phases": ((0.0, 1.0),)}, "a rate is above 0"),
        ({"phases": ((1.0, float("nan")),)}, "a time above 0"),
        ({"phases": ((1e5, 1e5),)}, "requests are planned; a workload has at most 1,000,000"),
        ({"requests": 0}, "--requests is 0"),
        ({"arrivals": "x"}, "--arrivals is 'x'; there are poisson, uniform"),
        ({"tenants": (Share(name="a", share=0),)}, "must not all be 0"),
        ({"temperature": float("nan")}, "--temperature is nan; it must be from 0 to 100"),
        ({"seed": -1}, "--seed is -1"),
        ({"cancel_share": 1.5}, "--cancel-share is 1.5"),
    ],
    ids=str,
)
def test_what_cannot_be_planned_is_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replace(PLAN, **changes)  # type: ignore[arg-type]


def test_a_time_without_a_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="no request falls into the planned time"):
        make_workload(replace(PLAN, phases=((0.001, 0.001),)))
