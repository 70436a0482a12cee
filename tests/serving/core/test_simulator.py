"""Seeds that must pass, and planted bugs that the same seeds must find."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from headrace.serving.core.shrinker import shrink
from headrace.serving.core.simulated_world import World, draw_world
from headrace.serving.core.simulator import SimulationFailure
from headrace.serving.core.world_source import world_source
from headrace.serving.engine.simulated_seed import broken_promise, run_seed, run_world
from tests.serving.core import found_worlds
from tests.serving.core.planted_bugs import BY_FAIRNESS, PLANTED, planted

NUM_SEEDS = 500
PLANTED_SEEDS = json.loads((Path(__file__).parent / "planted_seeds.json").read_text())
AT_LEAST = {
    "ended: stop": 500,
    "ended: length": 500,
    "ended: cancelled": 300,
    "ended: error": 50,
    "failed: failed_step": 30,
    "failed: non_finite_logits": 10,
    "tokens from the cache": 2_000,
    "refused: queue_full": 300,
    "refused: shutting_down": 20,
    "refused: deadline_unmeetable": 10,
    "refused: never_fits": 3,
    "deadline missed in queue": 30,
    "deadline missed in prefill": 10,
    "deadline missed in decode": 30,
    "cancelled: slow_client": 5,
    "cancels with the last sample in flight": 50,
    "slow clients given up": 50,
    "preempted: pages, swapped": 30,
    "preempted: pages, recomputed": 100,
    "preempted: fairness, recomputed": 5,
    "preempted: priority, recomputed": 3,
    "preempted: forced, recomputed": 15,
    "preempted: forced, swapped": 10,
    "pages swapped out": 100,
    "pages swapped in": 80,
    "evictions by force": 100,
    "duplicate ids": 2,
    "requests lost by a restart": 10,
    "worlds with a restart": 10,
    "worlds with clock jumps": 30,
    "worlds with a weak hash": 100,
    "worlds with an objective": 100,
    "worlds with several lanes": 100,
    "worlds in deterministic mode": 50,
}
"""Or the seeds would prove nothing about it."""


@pytest.fixture(scope="module")
def covered() -> Counter[str]:
    """By name, over all seeds, none of which may break a promise."""
    total: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        total.update(run_seed(seed).covered)
    return total


def test_no_seed_breaks_a_promise_and_the_seeds_reach_what_matters(covered: Counter[str]) -> None:
    assert {name: covered[name] for name, least in AT_LEAST.items() if covered[name] < least} == {}


def test_a_seed_replays_to_the_same_trace_in_a_process_with_other_hashes() -> None:
    code = (
        "from headrace.serving.engine.simulated_seed import run_seed\nfor s in range(20): print(run_seed(s).trace_hash)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, timeout=120
    )
    traces = done.stdout.split()
    assert traces == [run_seed(seed).trace_hash for seed in range(20)]
    assert len(set(traces)) == 20


@pytest.mark.parametrize("world", found_worlds.FOUND, ids=lambda world: str(world.seed))
def test_a_world_that_once_broke_a_promise_keeps_it(world: World) -> None:
    run_world(world)


def test_at_least_23_of_24_planted_bugs_are_found_by_the_gates_seeds() -> None:
    """By the last make simulate-bugs; the tests below see whether that still holds."""
    unfound = [bug for bug in PLANTED if not PLANTED_SEEDS.get(bug)]
    assert len(PLANTED) >= 24 and 24 * len(unfound) <= len(PLANTED), unfound
    assert max(seed for seeds in PLANTED_SEEDS.values() for seed in seeds) < NUM_SEEDS


@pytest.mark.parametrize("bug", [bug for bug in PLANTED if PLANTED_SEEDS.get(bug) and bug not in BY_FAIRNESS])
def test_the_seeds_find_a_planted_bug(bug: str) -> None:
    """The seeds that found it last come first; after a change of worlds or policy any of the gate's seeds may."""
    known = PLANTED_SEEDS.get(bug, [])
    with planted(bug), pytest.raises(SimulationFailure) as failure:
        for seed in (*known, *range(NUM_SEEDS)):
            run_seed(seed)
    text = str(failure.value)
    assert f"seed {failure.value.world.seed}, tick {failure.value.tick}: " in text and "trace " in text
    assert "NameError" not in text and "world:\nWorld(" in text


def test_a_failing_world_shrinks_to_one_that_can_be_pasted() -> None:
    with planted("sample before the last chunk"):
        seed = next(seed for seed in range(NUM_SEEDS) if broken_promise(draw_world(seed)) is not None)
        small = shrink(draw_world(seed), broken_promise, max_tries=300)
        wanted = broken_promise(draw_world(seed))
        assert broken_promise(small) == wanted
    assert len(small.arrivals) == 1
    pasted = eval(world_source(small), vars(found_worlds))
    assert pasted == small
