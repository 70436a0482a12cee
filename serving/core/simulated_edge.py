"""The edge of a simulation: clients that read slowly or not at all, behind buffers that merge what is unsent."""

from dataclasses import dataclass, field

from headrace.serving.core.events import Event, Finished, Preempted, TokenEvent
from headrace.serving.core.request import FinishReason, Request, RequestId
from headrace.serving.core.simulated_world import Reader


class Broken(AssertionError):
    """A broken promise. invariant: I1 … I12, as the list of the simulator names them."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")


def need(holds: bool, invariant: str, text: str) -> None:
    """Raises: Broken."""
    if not holds:
        raise Broken(invariant, text)


@dataclass(frozen=True, slots=True)
class Delta:
    """One frame. seq: 0, 1, 2, … of its stream."""

    seq: int
    tokens: tuple[TokenEvent, ...]


@dataclass(slots=True)
class SendBuffer:
    """Of one stream: all that is unsent is one delta, so its size is bounded by the output itself. Then the end."""

    unsent: list[TokenEvent] = field(default_factory=list)
    next_seq: int = 0

    def put(self, event: TokenEvent) -> None:
        self.unsent.append(event)

    def take(self) -> Delta | None:
        """Everything new in one frame."""
        if not self.unsent:
            return None
        delta = Delta(self.next_seq, tuple(self.unsent))
        self.next_seq += 1
        self.unsent = []
        return delta


@dataclass(slots=True)
class Client:
    """tokens, preempted: as the engine reported them. received: what came through the buffer. is_lost: the engine died
    before the end."""

    request: Request
    reader: Reader
    submitted_us: int
    cancel_after: int | None = None
    tokens: list[TokenEvent] = field(default_factory=list)
    preempted: list[Preempted] = field(default_factory=list)
    finished: Finished | None = None
    is_lost: bool = False
    is_closed: bool = False
    buffer: SendBuffer = field(default_factory=SendBuffer)
    received: list[Delta] = field(default_factory=list)
    waits_since: int | None = None
    stopped_at: int | None = None

    @property
    def is_live(self) -> bool:
        return self.finished is None and not self.is_lost

    @property
    def num_received(self) -> int:
        return sum(len(delta.tokens) for delta in self.received)

    def reads_at(self, tick: int) -> bool:
        reader = self.reader
        if reader.stops_after is not None and self.num_received >= reader.stops_after:
            if self.stopped_at is None:
                self.stopped_at = tick
            if tick < self.stopped_at + reader.stops_ticks:
                return False
        return tick % reader.period == 0


class SimulatedEdge:
    """All streams. stall_ticks: how long unsent tokens may wait for their reader."""

    def __init__(self, stall_ticks: int) -> None:
        self.clients: dict[RequestId, Client] = {}
        self.num_stalled = 0
        self._stall_ticks = stall_ticks
        self._open: dict[RequestId, Client] = {}
        """Streams that have something to send, or may get it."""

    def open(self, client: Client) -> None:
        self.clients[client.request.request_id] = self._open[client.request.request_id] = client

    @property
    def live(self) -> list[Client]:
        return [client for client in self._open.values() if client.is_live]

    def take(self, event: Event) -> Client:
        """One event of the engine."""
        client = self.clients.get(event.request_id)
        if client is None:
            raise Broken("I4", f"an event for request {event.request_id}, which was never accepted")
        need(not client.is_lost, "I4", f"request {event.request_id} has an event after its engine died")
        need(client.finished is None, "I4", f"request {event.request_id} has an event after its end")
        if isinstance(event, TokenEvent):
            need(event.index == len(client.tokens), "I5", f"request {event.request_id} repeats or skips a token")
            client.tokens.append(event)
            client.buffer.put(event)
        elif isinstance(event, Preempted):
            need(event.num_pages > 0, "I4", f"request {event.request_id} was preempted without a page")
            client.preempted.append(event)
        else:
            client.finished = event
        return client

    def turn(self, tick: int) -> list[RequestId]:
        """Let everybody read who does. Returns live requests whose clients have not read for too long."""
        stalled = []
        for request_id, client in list(self._open.items()):
            need(len(client.buffer.unsent) <= client.request.stop.max_tokens, "I8", "a send buffer holds too much")
            if client.reads_at(tick):
                delta = client.buffer.take()
                if delta is not None:
                    client.received.append(delta)
                client.waits_since = None
            elif client.buffer.unsent:
                if client.waits_since is None:
                    client.waits_since = tick
                if tick - client.waits_since >= self._stall_ticks:
                    client.is_closed = True
                    self.num_stalled += 1
                    if client.is_live:
                        stalled.append(request_id)
            if client.is_closed or not (client.is_live or client.buffer.unsent):
                del self._open[request_id]
                self._check_received(client)
        return stalled

    @property
    def is_idle(self) -> bool:
        return not self._open

    def _check_received(self, client: Client) -> None:
        """At the end of a stream: a closed one got a beginning, every other got all."""
        name = f"request {client.request.request_id}"
        need(
            [delta.seq for delta in client.received] == list(range(len(client.received))), "I5", f"{name}: seq has gaps"
        )
        received = [token for delta in client.received for token in delta.tokens]
        if client.is_closed:
            need(received == client.tokens[: len(received)], "I5", f"{name} received other tokens than were generated")
        else:
            need(received == client.tokens, "I5", f"{name} did not receive what was generated")
        finished = client.finished
        if (
            finished is not None
            and finished.reason in (FinishReason.STOP, FinishReason.LENGTH)
            and not client.is_closed
        ):
            need(len(received) == finished.completion_tokens, "I5", f"{name}: usage differs from what was received")
