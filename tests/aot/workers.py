"""Compilations in processes of their own: a compiler that dies takes one of them down, and is reported."""

import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue

from tests.aot import tpu
from tests.aot.tpu import Failing, Outcome

JOB_LIMIT_S = 600.0
SHARED_MEMORY = Path("/dev/shm")
Job = Callable[[Path], Outcome]
"""Compiles something, given the folder of libtpu's dump. It is pickled: a function of a module, or a partial of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """name: of the outcome, should there be none."""

    name: str
    job: Job


def run(jobs: Sequence[Named], num_workers: int) -> Iterator[Outcome]:
    """Outcomes as they come, one for each job."""
    waiting: SimpleQueue[Named] = SimpleQueue()
    for job in jobs:
        waiting.put(job)
    done: SimpleQueue[Outcome] = SimpleQueue()
    # Dumps are many small files: in memory, and removed by this process, which outlives a compiler that dies.
    with tempfile.TemporaryDirectory(
        prefix="headrace-aot-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    ) as dumps:
        yield from _outcomes(waiting, done, len(jobs), min(num_workers, len(jobs)), Path(dumps))


def _outcomes(
    waiting: "SimpleQueue[Named]", done: "SimpleQueue[Outcome]", num_jobs: int, num_workers: int, dumps: Path
) -> Iterator[Outcome]:
    threads = [
        threading.Thread(target=_serve, args=(waiting, done, dumps / str(index)), daemon=True)
        for index in range(num_workers)
    ]
    for thread in threads:
        thread.start()
    for _ in range(num_jobs):
        yield done.get()
    for thread in threads:
        thread.join()


def _serve(waiting: "SimpleQueue[Named]", done: "SimpleQueue[Outcome]", dump: Path) -> None:
    """One thread for each process."""
    worker = None
    while True:
        try:
            named = waiting.get_nowait()
        except Empty:
            break
        worker = worker or _Worker(dump)
        started_s = time.monotonic()
        outcome = worker.do(named)
        if outcome is None:
            seconds = round(time.monotonic() - started_s, 2)
            failure = (Failing.COMPILER, f"the compiler's process {worker.end()}")
            outcome, worker = Outcome(name=named.name, seconds=seconds, failures=(failure,)), None
        done.put(outcome)
    if worker:
        worker.end()


class _Worker:
    def __init__(self, dump: Path) -> None:
        context = multiprocessing.get_context("spawn")  # forked, it would share this process's JAX
        self._here, there = context.Pipe()
        self._process = context.Process(target=_work, args=(there, dump), daemon=True)
        self._process.start()
        there.close()

    def do(self, named: Named) -> Outcome | None:
        """None: the process died, or took too long."""
        try:
            self._here.send(named.job)
            if self._here.poll(JOB_LIMIT_S):
                outcome: Outcome = self._here.recv()
                return outcome
        except (EOFError, ConnectionError):
            pass
        return None

    def end(self) -> str:
        """Stop the process; says how it had ended."""
        self._here.close()
        self._process.join(5)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
            return f"took longer than {JOB_LIMIT_S:.0f} s"
        return f"ended with {self._process.exitcode}"


def _work(pipe: Connection, dump: Path) -> None:
    tpu.prepare(dump)
    try:
        while True:
            pipe.send(pipe.recv()(dump))
    except (EOFError, ConnectionError):
        pass
