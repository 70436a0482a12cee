"""What ``scripts/aot_cuda.py`` runs, each in a process that does nothing else: a compiler that dies takes one job down
and is reported."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from queue import Empty, SimpleQueue

JOB_LIMIT_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """run: a function of this module with its arguments bound, so that it can be pickled."""

    name: str
    run: Callable[[], "Outcome"]


def prepare() -> None:
    """JAX's own back end is the CPU, and XLA does not print that it finds no driver."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}


prepare()

from tests.aot import cuda_faults, matrix, steps  # noqa: E402 - JAX reads what the line above sets
from tests.aot.cuda import Failing, Outcome, check  # noqa: E402
from tests.aot.matrix import Entry, Operation  # noqa: E402
from tests.aot.steps import WholeStep  # noqa: E402


def entry(of: Entry) -> Outcome:
    """One entry of the matrix. Page writes and products with one scale per column are XLA's own on GPU."""
    is_xla = of.operation is Operation.WRITE or (of.operation is Operation.QUANT and of.dtype == "int8")
    return check(of.name, of.chip, matrix.build(of), needs_kernel=not is_xla)


def step(of: WholeStep) -> Outcome:
    return check(of.name, of.chip, steps.build_step(of), needs_kernel=True)


def fault(name: str) -> Outcome:
    """A planted fault: no failures where its check found it, else what is wrong with the check."""
    make, failing, word = cuda_faults.FAULTS[name]
    outcome = check(name, cuda_faults.CHIP, make(), needs_kernel=failing is Failing.KERNEL)
    if any(found is failing and word in what.lower() for found, what in outcome.failures):
        return replace(outcome, failures=())
    missed = (Failing.MISSED, f"the check {failing} did not find it; found: {outcome.failures or 'nothing'}")
    return replace(outcome, failures=(missed,))


def run(jobs: Sequence[Job], num_workers: int) -> Iterator[Outcome]:
    """Outcomes as they come, one for each job."""
    waiting: SimpleQueue[Job] = SimpleQueue()
    for job in jobs:
        waiting.put(job)
    done: SimpleQueue[Outcome] = SimpleQueue()
    threads = [threading.Thread(target=_serve, args=(waiting, done), daemon=True) for _ in range(num_workers)]
    for thread in threads:
        thread.start()
    for _ in jobs:
        yield done.get()


def _serve(waiting: "SimpleQueue[Job]", done: "SimpleQueue[Outcome]") -> None:
    """One thread for each process."""
    pool = None
    while True:
        try:
            job = waiting.get_nowait()
        except Empty:
            break
        pool = pool or ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        started_s = time.monotonic()
        try:
            outcome = pool.submit(job.run).result(JOB_LIMIT_S)
        except Exception as error:  # the process died, took too long, or the check itself is wrong
            died = isinstance(error, BrokenProcessPool | TimeoutError)
            what = f"{'the process' if died else 'the check'} ended with {type(error).__name__}: {error}"
            seconds = round(time.monotonic() - started_s, 2)
            outcome = Outcome(name=job.name, seconds=seconds, failures=((Failing.COMPILER, what),), kernels={})
            pool.shutdown(wait=False, cancel_futures=True)
            pool = None
        done.put(outcome)
    if pool:
        pool.shutdown()
