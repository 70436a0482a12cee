"""Compilations in processes of their own: a compiler that dies takes one of them down, and is reported."""

import functools
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue

from tests.aot.outcome import Failing, Outcome, failed

JOB_LIMIT_S = 900.0
SHARED_MEMORY = Path("/dev/shm")
Job = Callable[[Path], Outcome]
"""Compiles something, given a folder for the compiler's dump. It is pickled: a function of a module, or a partial."""
Prepare = Callable[[Path], None]
"""Comes first in a process, with that folder."""


def no_preparation(dump: Path) -> None:
    """For compilers whose dump is asked for with each compilation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """name: of the outcome, should there be none."""

    name: str
    job: Job


def run(jobs: Sequence[Named], num_workers: int, prepare: Prepare) -> Iterator[Outcome]:
    """Outcomes as they come, one for each job."""
    waiting: SimpleQueue[Named] = SimpleQueue()
    for job in jobs:
        waiting.put(job)
    done: SimpleQueue[Outcome] = SimpleQueue()
    # Dumps are many small files: in memory, and removed by this process, which outlives a compiler that dies.
    with tempfile.TemporaryDirectory(
        prefix="headrace-aot-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    ) as dumps:
        start = functools.partial(_Worker, prepare=prepare)
        yield from _outcomes(waiting, done, len(jobs), min(num_workers, len(jobs)), Path(dumps), start)


def _outcomes(
    waiting: "SimpleQueue[Named]",
    done: "SimpleQueue[Outcome]",
    num_jobs: int,
    num_workers: int,
    dumps: Path,
    start: "Callable[[Path], _Worker]",
) -> Iterator[Outcome]:
    threads = [
        threading.Thread(target=_serve, args=(waiting, done, dumps / str(index), start), daemon=True)
        for index in range(num_workers)
    ]
    for thread in threads:
        thread.start()
    for _ in range(num_jobs):
        yield done.get()
    for thread in threads:
        thread.join()


def _serve(
    waiting: "SimpleQueue[Named]", done: "SimpleQueue[Outcome]", dump: Path, start: "Callable[[Path], _Worker]"
) -> None:
    """One thread for each process."""
    worker = None
    while True:
        try:
            named = waiting.get_nowait()
        except Empty:
            break
        worker = worker or start(dump)
        started_s = time.monotonic()
        outcome = worker.do(named)
        if outcome is None:
            what = f"the compiler's process {worker.end()}"
            outcome, worker = failed(named.name, started_s, Failing.COMPILER, what), None
        done.put(outcome)
    if worker:
        worker.end()


class _Worker:
    def __init__(self, dump: Path, prepare: Prepare) -> None:
        context = multiprocessing.get_context("spawn")  # forked, it would share this process's JAX
        self._here, there = context.Pipe()
        self._process = context.Process(target=_work, args=(there, dump, prepare), daemon=True)
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


def _work(pipe: Connection, dump: Path, prepare: Prepare) -> None:
    prepare(dump)
    try:
        while True:
            pipe.send(pipe.recv()(dump))
    except (EOFError, ConnectionError):
        pass
