"""A few seeds of the worlds about fairness and isolation; make simulate runs a thousand of each."""

import pytest

from headrace.serving.core.simulated_fairness import fairness
from headrace.serving.core.simulated_isolation import isolation
from headrace.serving.engine.fake_runner import FakeRunner, WrongKV
from tests.serving.core.planted_bugs import BY_FAIRNESS, planted
from tests.serving.core.test_simulator import PLANTED_SEEDS

NUM_FAIRNESS_SEEDS = 50


def test_short_requests_shares_and_the_lowest_class_get_what_is_promised() -> None:
    assert [fairness(seed).broken for seed in range(2)] == [()] * 2


@pytest.mark.parametrize("bug", BY_FAIRNESS)
def test_an_unfair_scheduler_is_found(bug: str) -> None:
    seeds = (*PLANTED_SEEDS.get(bug, ()), *range(NUM_FAIRNESS_SEEDS))
    with planted(bug):
        assert any(fairness(seed).broken for seed in seeds)


def test_another_tenants_prompts_leave_no_trace_and_ones_own_do() -> None:
    found = [isolation(seed, lambda config: FakeRunner(config, vocab_size=16)) for seed in range(40)]
    assert [each.broken for each in found if each.broken] == []
    assert sum(each.hits for each in found) > 200


def test_a_cache_without_namespaces_is_found() -> None:
    """Digest and contents each keep tenants apart, so both have to forget them."""
    with planted("namespace not compared"), planted("hash without the namespace"):
        found = []
        for seed in range(10):
            try:
                found.append(isolation(seed, lambda config: FakeRunner(config, vocab_size=16)).is_isolated)
            except WrongKV:
                found.append(False)
    assert False in found
