"""The side of every rank above 0: it joins, agrees, runs the plans that come, and ends with rank 0."""

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from headrace.serving.core.plan import StepPlan
from headrace.serving.engine.host_messages import (
    Agreed,
    Beat,
    End,
    Facts,
    GaveUp,
    HasLoaded,
    Hello,
    HostsError,
    Loaded,
    Proceed,
    Reached,
    RunStep,
    ToFollower,
    Welcome,
)
from headrace.serving.engine.host_pulse import Pulse
from headrace.serving.engine.host_watch import HostLimits
from headrace.serving.engine.link import EngineLink, LinkClosed, LinkError
from headrace.serving.engine.ports import Clock, EngineFailure, Progress, Runner, Ticket

MAX_PLANS = 16
"""Rank 0 has at most two steps in flight, and no step ends before every rank has begun it."""
IDLE_S = 0.05
"""A rank that got no plan for so long collects what is in flight instead of waiting for the next."""
SIGN_S = 10.0
"""Between signs of progress to the command while others are slower."""
VERDICT_S = 2.0
"""A step that fails here may fail because another rank is gone. Rank 0 gets so long to say which."""
_DECODER: msgspec.msgpack.Decoder[ToFollower] = msgspec.msgpack.Decoder(ToFollower)


class Follower:
    """Implements ``ports.Hosts`` for one connection to rank 0. Any thread may call it, one thread runs ``follow``.

    on_end: told once, by any thread, after the welcome, that rank 0 has ended (None), or that it is lost or gives up
    (why); it has to end this process: its main thread may hang in a collective.
    """

    def __init__(
        self,
        link: EngineLink,
        rank: int,
        num_hosts: int,
        *,
        clock: Clock,
        on_end: Callable[[str | None], None],
        limits: HostLimits | None = None,
    ) -> None:
        self.rank = rank
        self.num_hosts = num_hosts
        self.service = ""
        self._link = link
        self._on_end = on_end
        self._changed = threading.Condition()
        self._num_pages: int | None = None
        self._passed: str | None = None
        self._has_ended = False
        self._reason: str | None = None
        self._steps = 0
        self._inbox: queue.Queue[StepPlan | int | None] = queue.Queue(MAX_PLANS)
        self._pulse = Pulse((0,), limits=limits or HostLimits(), clock=clock, beat=self._beat, on_lost=self._lose)

    def join(self, facts: Facts, limit_s: float) -> bool:
        """Say hello and wait for the welcome; False when the connection ended without a word.

        Raises: HostsError where rank 0 refuses, or says nothing for limit_s.
        """
        threading.Thread(target=self._read, daemon=True, name="rank-0").start()
        try:
            self._link.send(Hello(self.rank, dict(facts)))
        except LinkClosed:
            return False
        with self._changed:
            in_time = self._changed.wait_for(lambda: self.service or self._has_ended, limit_s)
            if self.service:
                self._pulse.start()
                return True
            if not in_time:
                raise HostsError(f"rank 0 has not answered for {limit_s:g} s")
            if self._reason is not None:
                raise HostsError(self._reason)
            return False

    def agree(self, mine: Loaded, progress: Progress) -> int:
        """See ``ports.Hosts``."""
        self._send(HasLoaded(mine))
        self._wait(lambda: self._num_pages is not None, "load the model", progress)
        assert self._num_pages is not None
        return self._num_pages

    def meet(self, point: str, progress: Progress) -> None:
        """See ``ports.Hosts``."""
        self._send(Reached(point))
        self._wait(lambda: self._passed == point, point, progress)

    def serves(self) -> None:
        """See ``ports.Hosts``."""
        self._pulse.serves()

    def give_up(self, reason: str) -> None:
        """See ``ports.Hosts``."""
        self._pulse.stop()
        self._send(GaveUp(reason))

    def close(self) -> None:
        """Leave a rank 0 that has not welcomed this one."""
        self._link.close()

    def probe(self, nonce: int) -> None:
        """Have ``follow`` show that it turns."""
        self._put(nonce)

    def stop(self) -> None:
        """Have ``follow`` return, or the process end where it cannot."""
        self._put(None)

    def follow(self, runner: Runner, max_steps_in_flight: int, on_probe: Callable[[int], None]) -> None:
        """Run the plans of rank 0, in their order, until ``stop``. Raises: EngineFailure."""
        in_flight: deque[Ticket] = deque()
        while True:
            try:
                item = self._inbox.get(timeout=IDLE_S if in_flight else None)
            except queue.Empty:
                self._collect(runner, in_flight)
                continue
            if item is None:
                return
            if isinstance(item, int):
                on_probe(item)
                continue
            if len(in_flight) == max_steps_in_flight:
                self._collect(runner, in_flight)
            with self._verdict():
                in_flight.append(runner.dispatch(item))
            self._steps += 1

    def _wait(self, is_done: Callable[[], bool], what: str, progress: Progress) -> None:
        """No limit: a rank 0 that is slow beats, one that is lost ends the process."""
        with self._changed:
            while not is_done():
                progress(f"waiting for the other hosts to {what}", 0, 1)
                self._changed.wait_for(is_done, SIGN_S)

    def _collect(self, runner: Runner, in_flight: deque[Ticket]) -> None:
        with self._verdict():
            runner.collect(in_flight.popleft())

    @contextlib.contextmanager
    def _verdict(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            with self._changed:
                self._changed.wait_for(lambda: self._has_ended, VERDICT_S)
            raise EngineFailure(f"a step failed on rank {self.rank} ({type(error).__name__})") from error

    def _put(self, item: StepPlan | int | None) -> None:
        try:
            self._inbox.put_nowait(item)
        except queue.Full:
            self._lose(0, f"{MAX_PLANS} plans wait on rank {self.rank}, which does not run them")

    def _send(self, message: msgspec.Struct) -> None:
        """A link that is gone is its reader's to report."""
        try:
            self._link.send(message)
        except LinkClosed:
            return

    def _beat(self) -> None:
        self._send(Beat(self._steps))

    def _read(self) -> None:
        try:
            for body in self._link.bodies():
                self._take(_decode(body))
                if self._has_ended:
                    return
            self._lose(0, "its connection ended")
        except LinkError as error:
            self._ends(f"what answers as rank 0 is not understood: {error}")

    def _take(self, message: ToFollower) -> None:
        self._pulse.heard(0)
        if isinstance(message, RunStep):
            return self._put(message.plan)
        if isinstance(message, End):
            return self._ends(message.reason)
        with self._changed:
            match message:
                case Welcome(service=service):
                    self.service = service
                case Agreed(num_pages=num_pages):
                    self._num_pages = num_pages
                case Proceed(point=point):
                    self._passed = point
            self._changed.notify_all()

    def _lose(self, rank: int, why: str) -> None:
        self._ends(f"rank {rank} is lost: {why}" if self.service else None)

    def _ends(self, reason: str | None) -> None:
        with self._changed:
            if self._has_ended:
                return
            self._has_ended = True
            self._reason = reason
            self._changed.notify_all()
        self._pulse.stop()
        if self.service:
            self._on_end(reason)


def _decode(body: bytes) -> ToFollower:
    try:
        return _DECODER.decode(body)
    except msgspec.MsgspecError as error:
        raise LinkError(f"an unreadable frame: {error}") from error
