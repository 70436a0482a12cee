"""How the hosts of an engine find each other: rank 0 listens at one address, the others connect and say hello.

Whoever else connects is bounded: in number, in time and in bytes, before a frame of his is looked at.
"""

import contextlib
import logging
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from headrace.serving.engine.host_follower import Follower
from headrace.serving.engine.host_leader import Leader, name_ranks
from headrace.serving.engine.host_messages import (
    MAX_HELLO_BYTES,
    End,
    Facts,
    Hello,
    HostPlace,
    HostsError,
    first_difference,
    format_address,
    parse_address,
)
from headrace.serving.engine.host_watch import HostLimits
from headrace.serving.engine.link import EngineLink, FrameDecoder, LinkError, encode_frame
from headrace.serving.engine.ports import Clock, Progress

log = logging.getLogger(__name__)

HELLO_S = 10.0
"""A connection that has not said hello for so long is closed."""
MAX_STRANGERS = 64
"""Connections that have not said hello; one more closes the oldest."""
BACKLOG = 128
TICK_S = 0.5
CONNECT_S = 5.0
RETRY_S = 0.5
SIGN_S = 10.0
"""Between signs of progress while ranks are missing."""
WELCOME_MARGIN_S = 5.0
_DECODER: msgspec.msgpack.Decoder[Hello] = msgspec.msgpack.Decoder(Hello)


@dataclass(slots=True)
class _Arrival:
    """One connection. rank: None until it said hello."""

    sock: socket.socket
    name: str
    since_s: float
    decoder: FrameDecoder
    rank: int | None = None


class Gathering:
    """Rank 0 while ranks are missing: one listening socket and the connections to it, served by one thread.

    facts: what every rank must have in common. Raises: HostsError where it cannot listen.
    """

    def __init__(self, place: HostPlace, facts: Facts, clock: Clock) -> None:
        self._place = place
        self._facts = facts
        self._clock = clock
        self._arrivals: list[_Arrival] = []
        self._selector = selectors.DefaultSelector()
        self._listener = listen(place.coordinator)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def run(self, progress: Progress) -> dict[int, tuple[EngineLink, str]]:
        """Link and name of every other rank, as soon as all are there.

        Raises: HostsError naming ranks that are missing after join_s, or what is different on one that came; whoever is
        there is told.
        """
        try:
            self._wait(progress)
        except HostsError as error:
            for arrival in list(self._arrivals):
                self._dismiss(arrival, str(error))
            raise
        finally:
            self._selector.close()
            self._listener.close()
            for arrival in self._arrivals:
                if arrival.rank is None:
                    arrival.sock.close()
        return {
            arrival.rank: (EngineLink(arrival.sock, peer=f"rank {arrival.rank}"), arrival.name)
            for arrival in self._arrivals
            if arrival.rank is not None
        }

    def _wait(self, progress: Progress) -> None:
        started_s = self._clock.now_s()
        shown: tuple[set[int], float] | None = None
        while missing := self._missing():
            now_s = self._clock.now_s()
            if now_s - started_s >= self._place.join_s:
                raise HostsError(
                    f"{name_ranks(missing)} did not come to {self._place.coordinator} within {self._place.join_s:g} s; "
                    f"start the same command there with its own --rank"
                )
            if shown is None or shown[0] != missing or now_s - shown[1] >= SIGN_S:
                there = self._place.num_hosts - len(missing)
                progress(f"waiting for {name_ranks(missing)} at {self._place.coordinator}", there, there + len(missing))
                shown = missing, now_s
            for key, _ in self._selector.select(TICK_S):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
            self._drop_silent()

    def _missing(self) -> set[int]:
        return set(range(1, self._place.num_hosts)) - {arrival.rank for arrival in self._arrivals}

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError:
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        strangers = [arrival for arrival in self._arrivals if arrival.rank is None]
        if len(strangers) >= MAX_STRANGERS:
            self._drop(strangers[0])
        name = format_address(address[0], address[1])
        arrival = _Arrival(sock, name, self._clock.now_s(), FrameDecoder(MAX_HELLO_BYTES))
        self._arrivals.append(arrival)
        self._selector.register(sock, selectors.EVENT_READ, arrival)

    def _read(self, arrival: _Arrival) -> None:
        try:
            data = arrival.sock.recv(MAX_HELLO_BYTES)
            if not data:
                raise LinkError("it left" if arrival.rank is None else f"rank {arrival.rank} left before all had come")
            bodies = arrival.decoder.feed(data)
            if not bodies:
                return
            if arrival.rank is not None or len(bodies) > 1 or arrival.decoder.is_inside_frame:
                raise LinkError("it spoke out of turn")
            hello = _DECODER.decode(bodies[0])
        except BlockingIOError:
            return
        except (OSError, LinkError, msgspec.MsgspecError) as error:
            log.warning("%s, which came to %s, is turned away: %s", arrival.name, self._place.coordinator, error)
            return self._drop(arrival)
        self._greet(arrival, hello)

    def _greet(self, arrival: _Arrival, hello: Hello) -> None:
        there = {other.rank: other.name for other in self._arrivals}
        difference = first_difference(self._facts, hello.facts)
        if difference is not None:
            reason = f"rank {hello.rank} ({arrival.name}) does not fit rank 0: {difference}"
            self._dismiss(arrival, reason)
            raise HostsError(reason)
        if not 0 < hello.rank < self._place.num_hosts:
            self._dismiss(arrival, f"--rank {hello.rank} must be from 1 to {self._place.num_hosts - 1}")
        elif hello.rank in there:
            self._dismiss(arrival, f"rank {hello.rank} is there already, at {there[hello.rank]}")
        else:
            arrival.rank = hello.rank

    def _drop_silent(self) -> None:
        oldest_s = self._clock.now_s() - HELLO_S
        for arrival in [a for a in self._arrivals if a.rank is None and a.since_s < oldest_s]:
            log.warning("%s came to %s and said nothing", arrival.name, self._place.coordinator)
            self._drop(arrival)

    def _dismiss(self, arrival: _Arrival, reason: str) -> None:
        """With a word, as far as it fits into the kernel's buffer."""
        log.error("%s", reason)
        with contextlib.suppress(OSError):
            arrival.sock.send(encode_frame(End(reason)))
        self._drop(arrival)

    def _drop(self, arrival: _Arrival) -> None:
        self._arrivals.remove(arrival)
        self._selector.unregister(arrival.sock)
        arrival.sock.close()


def listen(coordinator: str) -> socket.socket:
    """Raises: HostsError naming --coordinator."""
    host, port = parse_address(coordinator)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(BACKLOG)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise HostsError(
            f"--coordinator {coordinator}: rank 0 cannot listen there ({error.strerror or error}); it is an address of "
            f"rank 0's own host that the others reach, with a free port"
        ) from error
    return sock


def free_port(host: str) -> int:
    """Of an address of this machine, for a listener that is about to be made."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as sock:
        sock.bind(address)
        port: int = sock.getsockname()[1]
        return port


def lead(
    place: HostPlace,
    facts: Facts,
    clock: Clock,
    on_lost: Callable[[str], None],
    progress: Progress,
    limits: HostLimits | None = None,
) -> Leader:
    """Rank 0: wait for all the others and welcome them. Raises: HostsError."""
    joined = Gathering(place, facts, clock).run(progress)
    host, _ = parse_address(place.coordinator)
    leader = Leader(
        {rank: link for rank, (link, _) in joined.items()},
        {rank: name for rank, (_, name) in joined.items()},
        format_address(host, free_port(host)),
        clock=clock,
        on_lost=on_lost,
        limits=limits,
    )
    leader.start()
    return leader


def join(
    place: HostPlace,
    facts: Facts,
    clock: Clock,
    on_end: Callable[[str | None], None],
    progress: Progress,
    limits: HostLimits | None = None,
) -> Follower:
    """Another rank: find rank 0, which may not be there yet, and be welcomed. Raises: HostsError."""
    address = parse_address(place.coordinator)
    started_s = clock.now_s()
    why = "nobody listens"
    progress(f"looking for rank 0 at {place.coordinator}", 0, 1)
    while clock.now_s() - started_s < place.join_s:
        try:
            sock = socket.create_connection(address, timeout=CONNECT_S)
        except OSError as error:
            why = error.strerror or str(error)
            time.sleep(RETRY_S)
            continue
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = EngineLink(sock, peer="rank 0")
        follower = Follower(link, place.rank, place.num_hosts, clock=clock, on_end=on_end, limits=limits)
        progress(f"waiting for the other hosts at {place.coordinator}", 0, 1)
        try:
            if follower.join(facts, place.join_s + WELCOME_MARGIN_S):
                return follower
        except HostsError as error:
            raise HostsError(f"{place.coordinator}: {error}") from error
        finally:
            if not follower.service:
                follower.close()
        why = "it hung up"
        time.sleep(RETRY_S)
    raise HostsError(
        f"rank 0 was not found at {place.coordinator} within {place.join_s:g} s ({why}); start it there with the same "
        f"--coordinator and --rank 0"
    )
