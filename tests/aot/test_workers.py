"""Processes that compile: an outcome for each job, also for one that takes its process down."""

import functools
import os
from pathlib import Path

from tests.aot.outcome import Failing, Outcome
from tests.aot.tpu import prepare
from tests.aot.workers import Named, run


def job(name: str, exit_code: int | None, dump: Path) -> Outcome:
    assert dump.parent.is_dir() and str(dump) in os.environ["LIBTPU_INIT_ARGS"]
    if exit_code is not None:
        os._exit(exit_code)
    return Outcome(name=name, seconds=0.5, failures=())


def test_a_dead_compiler_is_one_failure_and_the_other_jobs_go_on() -> None:
    exits = {"first": None, "dies": 3, "last": None}
    jobs = [Named(name=name, job=functools.partial(job, name, exit_code)) for name, exit_code in exits.items()]
    outcomes = {outcome.name: outcome for outcome in run(jobs, 1, prepare)}
    assert set(outcomes) == set(exits)
    assert outcomes["first"].failures == outcomes["last"].failures == ()
    ((failing, what),) = outcomes["dies"].failures
    assert failing is Failing.COMPILER and "ended with 3" in what


def test_no_jobs_no_processes() -> None:
    assert list(run([], 2, prepare)) == []
