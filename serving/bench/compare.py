"""A comparison as it runs: turn after turn, one server at work and the others stopped or watched."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace.serving.bench import closed_loop
from headrace.serving.bench.compare_plan import ComparedServer, ComparedWorkload, Comparison, Turn
from headrace.serving.bench.dialect import Door
from headrace.serving.bench.native_target import NativeTarget
from headrace.serving.bench.open_loop import OpenLoop
from headrace.serving.bench.openai_target import OpenAITarget
from headrace.serving.bench.outcome import Outcome
from headrace.serving.bench.process_tree import ProcessTree
from headrace.serving.bench.server_process import ServerProcess
from headrace.serving.bench.targets import BenchError, Server, Target, contract_of, model_of

MEMORY_S = 0.5
"""Between two readings of memory, where a workload wants them."""
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A turn that was taken. start_s: monotonic, from which planned starts count; outcomes: by index. seconds: the
    whole turn, with warm-up. pss_bytes: at its end, or the most that was read; None where it cannot be. cpu_s: of the
    server's processes while it was measured, None likewise. idle_shares: of a core, that each other server used
    meanwhile. rate: requests per second that were planned, None in a closed loop."""

    turn: Turn
    outcomes: tuple[Outcome, ...]
    start_s: float
    seconds: float
    rate: float | None = None
    pss_bytes: int | None = None
    cpu_s: float | None = None
    idle_shares: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Subject:
    """A server while it is compared."""

    server: ComparedServer
    connection: Server
    process: ServerProcess
    model: str | None = None
    contract: dict[str, Any] | None = None
    ready_s: float = 0.0
    ready_pss_bytes: int | None = None
    warmed: set[str] = field(default_factory=set)

    def target(self, connections: int) -> NativeTarget | OpenAITarget:
        """A new one for each turn: a server that was stopped has let its old connections go."""
        if self.server.door is Door.NATIVE:
            return NativeTarget(self.connection, self.server.model, keeps_text=True)
        return OpenAITarget(
            self.connection,
            self.model or "",
            connections,
            door=self.server.door,
            dialect=self.server.dialect,
            extra=self.server.body,
            keeps_text=True,
        )


@dataclass(slots=True)
class ComparisonRun:
    """keys: of servers by name. logs: folder for what started servers print. environment: that they get. tell: one
    line, often. kept: called after each turn. stop: once set, no more turns are taken. until_s: monotonic second
    by which all should be done, None for never: no repetition of a workload begins that would end later, but the first.
    lost: servers that ended meanwhile, and how."""

    comparison: Comparison
    keys: Mapping[str, str | None]
    logs: Path
    environment: Mapping[str, str]
    tell: Tell = lambda _: None
    kept: Callable[[Done], None] = lambda _: None
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    until_s: float | None = None
    subjects: dict[str, Subject] = field(default_factory=dict)
    done: list[Done] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)

    async def run(self) -> None:
        """Servers are left as they were found. Raises: BenchError where one does not start, or is not there."""
        for server in self.comparison.servers:
            connection = Server(base=server.base, key=self.keys.get(server.name), limit_s=self.comparison.timeout_s)
            process = ServerProcess(server, self.logs / f"{server.name}.log", self.environment)
            self.subjects[server.name] = Subject(server=server, connection=connection, process=process)
        try:
            for subject in self.subjects.values():
                if self.stop.is_set():
                    return
                await self._start(subject)
            await self._repetitions()
        finally:
            for subject in self.subjects.values():
                await subject.process.end()

    async def _start(self, subject: Subject) -> None:
        self.tell(f"{subject.server.name}: waiting until it is ready")
        subject.ready_s = await subject.process.start()
        subject.contract = await contract_of(subject.connection)
        if subject.server.door is not Door.NATIVE:
            subject.model = subject.server.model or await model_of(subject.connection)
        tree = subject.process.tree
        subject.ready_pss_bytes = None if tree is None else tree.pss_bytes()
        subject.process.pause()

    async def _repetitions(self) -> None:
        longest_s: dict[str, float] = {}
        for turns in self.comparison.all_turns():
            workload, began_s = turns[0].workload, time.monotonic()
            needed_s = longest_s.get(workload.name)
            if self.until_s is not None and needed_s is not None and began_s + needed_s > self.until_s:
                continue  # a shorter workload may still have its turns
            rate = self._rate(workload)
            if not workload.is_closed and rate is None:
                continue  # nobody ended a request there; the report says that this workload has no turn
            for turn in turns:
                if self.stop.is_set():
                    return
                if turn.server.name not in self.lost:
                    await asyncio.sleep(self.comparison.pause_s)
                    await self._try(turn, len(turns), rate)
            longest_s[workload.name] = max(needed_s or 0.0, time.monotonic() - began_s)

    def _rate(self, workload: ComparedWorkload) -> float | None:
        """Requests per second of an open loop; of a share, by what the slowest of its servers has shown so far."""
        if workload.share_of is None:
            return workload.rate
        taking = {server.name for server in self.comparison.taking(workload)}
        slowest = slowest_per_s(self.done, workload.share_of, taking)
        return None if slowest is None else workload.share * slowest

    async def _try(self, turn: Turn, of: int, rate: float | None) -> None:
        """A server that ends, or answers nothing more, has no further turns; the others go on."""
        try:
            done = await self._take(turn, of, rate)
        except BenchError as error:
            self.lost[turn.server.name] = str(error)
            return
        self.done.append(done)
        self.kept(done)

    async def _take(self, turn: Turn, of: int, rate: float | None) -> Done:
        subject, workload = self.subjects[turn.server.name], turn.workload
        title = f"{workload.name}, repetition {turn.repetition + 1}, {turn.server.name} ({turn.place + 1} of {of}): "
        began_s = time.monotonic()
        await subject.process.awake()
        try:
            connections = workload.streams if workload.is_closed else workload.requests
            async with subject.target(connections) as target:
                self.tell(title + "warm-up")
                await self._warm(turn, subject, target)
                tree = subject.process.tree
                with self._watched(subject, workload) as watched:
                    outcomes, start_s = await self._measure(turn, target, rate, title)
                pss_bytes = None if tree is None else max(watched.pss_bytes, tree.pss_bytes() or 0) or None
        finally:
            subject.process.pause()
        return Done(
            turn=turn,
            outcomes=tuple(sorted(outcomes, key=lambda outcome: outcome.index)),
            start_s=start_s,
            seconds=time.monotonic() - began_s,
            rate=None if workload.is_closed else rate,
            pss_bytes=pss_bytes,
            cpu_s=watched.cpu_s,
            idle_shares=watched.idle_shares,
        )

    async def _warm(self, turn: Turn, subject: Subject, target: Target) -> None:
        is_whole = turn.workload.name not in subject.warmed
        subject.warmed.add(turn.workload.name)
        seed = self.comparison.seed_of(turn.workload, turn.repetition, "warm-up")
        (outcome,) = await closed_loop.run(turn.workload.warm(seed, is_whole=is_whole), target)
        if outcome.error is not None:
            raise BenchError(
                f"server {turn.server.name} does not answer the warm-up of {turn.workload.name}: {outcome.error}"
            )

    async def _measure(
        self, turn: Turn, target: Target, rate: float | None, title: str
    ) -> tuple[Sequence[Outcome], float]:
        workload, seed = turn.workload, self.comparison.seed_of(turn.workload, turn.repetition)
        if workload.is_closed:
            outcomes = await closed_loop.run(
                workload.closed(seed),
                target,
                lambda at: self.tell(
                    f"{title}{at.done} of {at.requests} requests, {at.failed} failed, {at.seconds:.0f} s"
                ),
            )
            return outcomes, min(outcome.sent_s for outcome in outcomes)
        run = await OpenLoop(
            workload=workload.opened(seed, rate or 1.0),
            target=target,
            watch=lambda at: self.tell(
                f"{title}{at.sent} of {at.requests} sent, {at.in_flight} open, {at.failed} failed, "
                f"{at.seconds:.0f} of {at.planned_s:.0f} s"
            ),
        ).run()
        return run.outcomes, run.start_s

    @contextlib.contextmanager
    def _watched(self, subject: Subject, workload: ComparedWorkload) -> "Iterator[_Watched]":
        """What the processes of all servers use meanwhile."""
        others = {
            name: other.process.tree
            for name, other in self.subjects.items()
            if other is not subject and other.process.tree is not None
        }
        tree, found = subject.process.tree, _Watched()
        before = {name: each.cpu_s() for name, each in others.items() if each is not None}
        own_s, began_s = 0.0 if tree is None else tree.cpu_s(), time.monotonic()
        reader = asyncio.create_task(_read_memory(tree, found)) if tree is not None and workload.watch_memory else None
        try:
            yield found
        finally:
            if reader is not None:
                reader.cancel()
        seconds = max(1e-9, time.monotonic() - began_s)
        found.cpu_s = None if tree is None else tree.cpu_s() - own_s
        found.idle_shares = {
            name: max(0.0, (each.cpu_s() - before[name]) / seconds) for name, each in others.items() if each is not None
        }


@dataclass(slots=True)
class _Watched:
    pss_bytes: int = 0
    cpu_s: float | None = None
    idle_shares: dict[str, float] = field(default_factory=dict)


async def _read_memory(tree: ProcessTree, found: _Watched) -> None:
    while True:
        found.pss_bytes = max(found.pss_bytes, tree.pss_bytes() or 0)
        await asyncio.sleep(MEMORY_S)


def requests_per_s(done: Done) -> float | None:
    """From the first request to the last end; None where none ended well."""
    good = [outcome for outcome in done.outcomes if outcome.error is None]
    if not good:
        return None
    return len(good) / max(1e-9, max(outcome.ended_s for outcome in done.outcomes) - done.start_s)


def slowest_per_s(done: Sequence[Done], workload: str, servers: Collection[str]) -> float | None:
    """Requests per second in a closed workload: each server's median over its turns, the least of them. None where
    none of the servers has a turn there."""
    found: dict[str, list[float]] = {}
    for each in done:
        is_one = each.turn.workload.name == workload and each.turn.server.name in servers
        rate = requests_per_s(each) if is_one else None
        if rate is not None:
            found.setdefault(each.turn.server.name, []).append(rate)
    return min((float(np.median(rates)) for rates in found.values()), default=None)
