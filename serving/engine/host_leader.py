"""Rank 0's side of an engine over several hosts: who joins, what all agree on, the plans, and how it ends."""

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping

import msgspec

from headrace.serving.core.plan import StepPlan
from headrace.serving.engine.host_messages import (
    Agreed,
    Beat,
    End,
    GaveUp,
    HasLoaded,
    Hello,
    HostsError,
    Loaded,
    Proceed,
    Reached,
    RunStep,
    ToLeader,
    Welcome,
    what_differs,
)
from headrace.serving.engine.host_pulse import Pulse
from headrace.serving.engine.host_watch import HostLimits
from headrace.serving.engine.link import EngineLink, LinkClosed, LinkError, encode_frame
from headrace.serving.engine.ports import Clock, Progress

log = logging.getLogger(__name__)

FAREWELL_S = 0.5
"""How long rank 0 waits for the others' ends; the edge kills an engine that takes a second."""
SIGN_S = 10.0
"""Between signs of progress to the edge while rank 0 waits for others."""
_DECODER: msgspec.msgpack.Decoder[ToLeader] = msgspec.msgpack.Decoder(ToLeader)


class Leader:
    """Implements ``ports.Hosts`` for rank 0. Any thread may call it.

    links: by rank, each of a follower that has said hello and nothing else. names: where they are, for errors.
    service: HOST:PORT that JAX's coordination service will have. on_lost: told once, by any thread, that a rank is
    lost, and has to end this process: its main thread may hang in a collective.
    """

    rank = 0

    def __init__(
        self,
        links: Mapping[int, EngineLink],
        names: Mapping[int, str],
        service: str,
        *,
        clock: Clock,
        on_lost: Callable[[str], None],
        limits: HostLimits | None = None,
    ) -> None:
        self.num_hosts = 1 + len(links)
        self.service = service
        self._links = links
        self._names = names
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._loaded: dict[int, Loaded] = {}
        self._reached: dict[int, str] = {}
        self._has_ended = False
        self._steps = 0
        self._readers = [
            threading.Thread(target=self._read, args=(rank,), daemon=True, name=f"rank-{rank}") for rank in links
        ]
        self._pulse = Pulse(links, limits=limits or HostLimits(), clock=clock, beat=self._beat, on_lost=self._lose)

    def start(self) -> None:
        """Welcome everybody, and begin to watch."""
        for thread in self._readers:
            thread.start()
        self._send_all(Welcome(self.service))
        self._pulse.start()

    def agree(self, mine: Loaded, progress: Progress) -> int:
        """See ``ports.Hosts``."""
        self._wait(lambda: self._links.keys() - self._loaded.keys(), "load the model", progress)
        for rank, loaded in sorted(self._loaded.items()):
            difference = what_differs(mine, loaded)
            if difference is not None:
                raise HostsError(f"rank {rank} ({self._names[rank]}) does not fit rank 0: {difference}")
        num_pages = min(loaded.num_pages for loaded in (mine, *self._loaded.values()))
        self._send_all(Agreed(num_pages))
        return num_pages

    def meet(self, point: str, progress: Progress) -> None:
        """See ``ports.Hosts``."""
        self._wait(lambda: {rank for rank in self._links if self._reached.get(rank) != point}, point, progress)
        self._send_all(Proceed(point))

    def serves(self) -> None:
        """See ``ports.Hosts``."""
        self._pulse.serves()

    def run_step(self, plan: StepPlan) -> int:
        """Have the others run a step; how many there were with it."""
        self._steps += 1
        self._send_all(RunStep(plan))
        return self._steps

    def waits_for(self, steps: int | None) -> None:
        """The main thread waits for the last of so many steps; None = for none."""
        self._pulse.waits_for(steps)

    def give_up(self, reason: str) -> None:
        """See ``ports.Hosts``."""
        self._end(End(reason))

    def farewell(self) -> None:
        """All has been served: the others end too, and well."""
        self._end(End(None))
        for thread in self._readers:
            thread.join(FAREWELL_S / len(self._readers))
        for link in self._links.values():
            link.close()

    def _end(self, message: End) -> None:
        self._has_ended = True
        self._pulse.stop()
        self._send_all(message)

    def _wait(self, missing: Callable[[], set[int]], what: str, progress: Progress) -> None:
        """Until no rank is missing. No limit: a rank that is slow beats, one that is lost ends the process."""
        with self._changed:
            while ranks := missing():
                text = f"waiting for {name_ranks(ranks)} to {what}"
                progress(text, len(self._links) - len(ranks), len(self._links))
                self._changed.wait(SIGN_S)

    def _send_all(self, message: msgspec.Struct) -> None:
        """A link that is gone is its reader's to report."""
        frame = encode_frame(message)
        for link in self._links.values():
            with contextlib.suppress(LinkClosed):
                link.send_frame(frame)

    def _beat(self) -> None:
        self._send_all(Beat())

    def _read(self, rank: int) -> None:
        try:
            for body in self._links[rank].bodies():
                message = _decode(body)
                if isinstance(message, GaveUp):
                    return self._end_with(f"rank {rank} ({self._names[rank]}) gave up: {message.reason}")
                self._take(rank, message)
            self._lose(rank, "its connection ended")
        except LinkError as error:
            self._lose(rank, str(error))

    def _take(self, rank: int, message: ToLeader) -> None:
        self._pulse.heard(rank, message.steps if isinstance(message, Beat) else 0)
        with self._changed:
            match message:
                case HasLoaded(loaded=loaded):
                    self._loaded[rank] = loaded
                case Reached(point=point):
                    self._reached[rank] = point
                case Hello():
                    raise LinkError("it said hello twice")
            self._changed.notify_all()

    def _lose(self, rank: int, why: str) -> None:
        self._end_with(f"rank {rank} ({self._names[rank]}) is lost: {why}")

    def _end_with(self, reason: str) -> None:
        with self._changed:
            if self._has_ended:
                return
            self._has_ended = True
        log.error("%s", reason)
        self._end(End(reason))
        self._on_lost(reason)


def name_ranks(ranks: set[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _decode(body: bytes) -> ToLeader:
    try:
        return _DECODER.decode(body)
    except msgspec.MsgspecError as error:
        raise LinkError(f"it sent an unreadable frame: {error}") from error
