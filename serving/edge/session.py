"""One native WebSocket without its socket: text in, frames out, nothing awaited.

The driver (stream_endpoint) feeds ``receive_text``, carries out the ``Start`` that it returns, writes what
``next_frame`` gives, and closes when ``close`` is set and no frame is left. Output is pulled: what nobody has taken
stays merged in its generation, so the memory of a slow reader is bounded by the output itself.
"""

import secrets
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from headrace.serving.core.request import CancelReason, Priority
from headrace.serving.edge import messages
from headrace.serving.edge.errors import ApiError, ErrorCode, shutting_down
from headrace.serving.edge.fields import Endpoint
from headrace.serving.edge.keys import Identity
from headrace.serving.edge.message_parts import SessionLimits
from headrace.serving.edge.messages import CloseCode
from headrace.serving.edge.session_host import SessionHost
from headrace.serving.edge.stream import ReplayBudget, ReplayLog, Stream
from headrace.serving.edge.terms import parse_priority

ENDED_IDS_KEPT = 256
"""Ids of just ended streams, for which a late cancel is not an error."""
MAX_UNREAD_ANSWERS = 4096
"""Answers to messages (pongs, errors) that may wait for the client to read."""
MAX_REASON_BYTES = 120
"""RFC 6455 allows a close reason of 123 bytes."""


class SessionState(Enum):
    AWAIT_HELLO = "await_hello"
    OPEN = "open"
    DRAINING = "draining"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """max_streams: live on one socket. resume_s: life of detached streams without a connection. replay_bytes: log of
    one detached stream. heartbeat_s: WebSocket ping interval, told to the client."""

    server: str
    max_streams: int = 64
    heartbeat_s: float = 20.0
    resume_s: float = 60.0
    replay_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Close:
    code: CloseCode
    reason: str


@dataclass(frozen=True, slots=True)
class Start:
    """Prepare this request, then call stream.started or stream.fail. expected: what hello and create expect of the
    contract. deadline_ms: from now."""

    stream: Stream
    endpoint: Endpoint
    body: Mapping[str, Any]
    tenant: str
    expected: tuple[str, ...]
    deadline_ms: int | None = None
    priority: Priority | None = None
    traceparent: str | None = None


class Session:
    """See the module's text."""

    def __init__(
        self,
        config: SessionConfig,
        host: SessionHost,
        *,
        identity: Identity | None,
        budget: ReplayBudget,
        on_output: Callable[[], None],
    ) -> None:
        """identity: who the handshake showed it to be; None: a hello must. on_output: next_frame or close changed."""
        self.secret = f"s_{secrets.token_hex(16)}"
        self.state = SessionState.AWAIT_HELLO
        self.identity = identity
        self.client = ""
        self._expected = ""  # of the contract, by hello
        self.close: Close | None = None
        self._config = config
        self._host = host
        self._budget = budget
        self._on_output = on_output
        self._answers: deque[str] = deque()
        self._live: dict[str, Stream] = {}
        self._over: dict[str, Stream] = {}  # detached and ended: kept for resume
        self._ready: dict[str, Stream] = {}  # in the order of their turns
        self._ended_ids: dict[str, None] = {}
        if identity is not None:
            self._open(identity)

    @property
    def num_streams(self) -> int:
        return len(self._live)

    @property
    def has_detached(self) -> bool:
        return bool(self._over) or any(stream.is_detached for stream in self._live.values())

    # In

    def receive_text(self, text: str) -> Start | None:
        """Handle one message; the answer, if any, comes out of next_frame."""
        if self.close is not None or self.state is SessionState.CLOSED:
            return None
        try:
            message = messages.decode(text)
        except messages.Fatal as error:
            self._close(CloseCode.NOT_JSON, str(error))
            return None
        except messages.Invalid as error:
            self._refuse(error)
            return None
        if self.state is SessionState.AWAIT_HELLO and not isinstance(message, messages.Hello):
            self._close(CloseCode.UNAUTHENTICATED, "send hello with an API key first")
            return None
        match message:
            case messages.Hello():
                self._hello(message)
            case messages.Create():
                return self._create(message)
            case messages.Cancel():
                self._cancel(message.id)
            case messages.Resume():
                self._resume(message)
            case messages.Ping():
                self._answer(messages.Pong(t=message.t))
        return None

    def receive_bytes(self) -> None:
        """A binary frame came."""
        self._close(CloseCode.NOT_JSON, "binary frames are not part of headrace.v1")

    def hello_is_late(self) -> None:
        if self.state is SessionState.AWAIT_HELLO:
            self._close(CloseCode.TOO_SLOW, "no hello in time")

    def idle_too_long(self) -> None:
        if not self._live:
            self._close(CloseCode.NORMAL, "idle")

    def begin_drain(self, deadline_ms: int) -> None:
        """Take no new stream; close when the running ones have ended."""
        if self.state is SessionState.AWAIT_HELLO:
            self._close(CloseCode.GOING_AWAY, "the server shuts down")
        elif self.state is SessionState.OPEN:
            self.state = SessionState.DRAINING
            self._answer(messages.Goaway(reason="shutdown", deadline_ms=deadline_ms))

    def abort(self) -> int:
        """End every stream with shutting_down, then close. Returns how many streams lost work."""
        streams = list(self._live.values())
        for stream in streams:
            stream.give_up(CancelReason.SHUTDOWN, shutting_down())
        self.state = SessionState.DRAINING
        self._on_output()
        return len(streams)

    def disconnected(self, reason: CancelReason) -> None:
        """The socket is gone. Cancels every stream that is not detached; detached ones run on, unseen."""
        self.state = SessionState.CLOSED
        self._answers.clear()
        self._ready.clear()
        for stream in [stream for stream in self._live.values() if not stream.is_detached]:
            del self._live[stream.id]
            stream.abandon(reason)

    def expire(self, reason: CancelReason) -> None:
        """Nobody resumed the detached streams in time: cancel and forget them."""
        for stream in (*self._live.values(), *self._over.values()):
            stream.abandon(reason)
        self._live.clear()
        self._over.clear()

    # Out

    def next_frame(self) -> str | None:
        """The next frame to write: answers first, then the streams in turn, one frame each."""
        if self._answers:
            return self._answers.popleft()
        while self._ready and self.close is None:
            stream = self._ready.pop(next(iter(self._ready)))
            frame = stream.take_frame()
            if frame is None:
                continue
            if stream.is_over:
                self._retire(stream)
            else:
                self._ready[stream.id] = stream
            return frame
        if self.state is SessionState.DRAINING and not self._live:
            self._close(CloseCode.GOING_AWAY, "the server shuts down")
        return None

    def mark_ready(self, stream: Stream) -> None:
        """Called by a stream that has something to show."""
        if self.state is not SessionState.CLOSED and stream.id in self._live:
            self._ready.setdefault(stream.id, stream)
            self._on_output()

    # Streams between sessions

    def detached(self, stream_id: str) -> Stream | None:
        """A stream of this session that may be resumed."""
        stream = self._live.get(stream_id) or self._over.get(stream_id)
        return stream if stream is not None and stream.is_detached else None

    def release(self, stream: Stream) -> None:
        """Another session takes the stream over."""
        for holder in (self._live, self._over, self._ready):
            holder.pop(stream.id, None)
        self._on_output()

    # Messages

    def _open(self, identity: Identity) -> None:
        self.identity = identity
        self.state = SessionState.OPEN
        fingerprint, numerics = self._host.contract_hashes
        self._answer(
            messages.Welcome(
                session=self.secret,
                server=self._config.server,
                models=self._host.model_names,
                features=("detach",),
                limits=SessionLimits(
                    max_streams=self._config.max_streams,
                    max_frame_bytes=messages.MAX_FRAME_BYTES,
                    max_context=self._host.max_context,
                ),
                heartbeat_s=self._config.heartbeat_s,
                resume_s=self._config.resume_s,
                contract=fingerprint,
                numerics=numerics,
            )
        )

    def _hello(self, message: messages.Hello) -> None:
        self.client = message.client
        if self.state is not SessionState.AWAIT_HELLO:
            self._expect(message.expect_contract)
            return
        identity = self._host.identify(message.token) if message.token else None
        if identity is None:
            self._close(CloseCode.UNAUTHENTICATED, "the API key is absent or wrong")
        elif not self._host.has_room_for(identity):
            self._close(CloseCode.TOO_MANY, "this key has too many open sockets")
        else:
            self._open(identity)
            self._expect(message.expect_contract)

    def _expect(self, expected: str | None) -> None:
        """From now on. What cannot be met now ends the socket; while no engine is ready each create is checked."""
        if not expected:
            return
        fault = self._host.contract_fault(expected)
        if fault is not None:
            self._answer(messages.error_frame(fault))
            self._close(CloseCode.CONTRACT_MISMATCH, "the expected contract is not served")
        self._expected = expected

    def _create(self, message: messages.Create) -> Start | None:
        assert self.identity is not None
        if message.id in self._live:
            self._duplicate(message.id)
            return None
        error = self._why_not(self.identity)
        if error is not None:
            self._answer(messages.error_frame(error, stream_id=message.id, seq=0))
            return None
        self._forget(message.id)
        log = ReplayLog(self._config.replay_bytes, self._budget) if message.detach else None
        endpoint = Endpoint(message.endpoint)
        stream = Stream(message.id, endpoint=endpoint, log=log, owner=self)
        self._live[message.id] = stream
        expected = tuple(filter(None, (self._expected, message.expect_contract)))
        priority = None if message.priority is None else parse_priority("priority", message.priority)
        return Start(
            stream,
            endpoint,
            message.body,
            self.identity.tenant,
            expected,
            message.deadline_ms,
            priority,
            message.traceparent,
        )

    def _why_not(self, identity: Identity) -> ApiError | None:
        if self.state is SessionState.DRAINING:
            return shutting_down()
        if not self._host.is_current(identity):
            return ApiError(ErrorCode.INVALID_API_KEY, "The API key of this socket is no longer accepted.")
        if len(self._live) >= self._config.max_streams:
            text = f"This socket has {self._config.max_streams} live streams, the limit; wait for one to end."
            return ApiError(ErrorCode.TOO_MANY_STREAMS, text)
        return None

    def _cancel(self, stream_id: str) -> None:
        stream = self._live.get(stream_id)
        if stream is not None:
            stream.cancel(CancelReason.CLIENT)
        elif stream_id not in self._ended_ids:
            error = ApiError(ErrorCode.UNKNOWN_ID, "This socket has no live stream with that id.", param="id")
            self._answer(messages.error_frame(error, id_rejected=stream_id))

    def _resume(self, message: messages.Resume) -> None:
        if message.id in self._live:
            self._duplicate(message.id)
            return
        error = self._take_over(message)
        if error is not None:
            self._answer(messages.error_frame(error, id_rejected=message.id))

    def _take_over(self, message: messages.Resume) -> ApiError | None:
        """Make the stream one of this session; why not, otherwise."""
        assert self.identity is not None
        if self.state is not SessionState.DRAINING and (error := self._why_not(self.identity)) is not None:
            return error
        gone = ApiError(
            ErrorCode.RESUME_GONE, "No such detached stream, or its frames from there on are gone; create it anew."
        )
        holder = self._host.find_session(message.session)
        if holder is None or holder.identity is None or holder.identity.tenant != self.identity.tenant:
            return gone
        stream = holder.detached(message.id)
        repeat = stream.replay_after(message.after) if stream is not None else None
        if stream is None or repeat is None:
            return gone
        holder.release(stream)
        self._forget(message.id)
        self._live[stream.id] = stream
        stream.move(self, repeat)
        return None

    # Small parts

    def _refuse(self, invalid: messages.Invalid) -> None:
        if self.state is SessionState.AWAIT_HELLO:
            self._close(CloseCode.UNAUTHENTICATED, "send hello with an API key first")
        elif invalid.is_create and invalid.named_id not in self._live:
            self._answer(messages.error_frame(invalid.error, stream_id=invalid.named_id, seq=0))
        else:
            self._answer(messages.error_frame(invalid.error, id_rejected=invalid.named_id))

    def _duplicate(self, stream_id: str) -> None:
        text = "A live stream of this socket has that id; it is untouched. Use another id."
        error = ApiError(ErrorCode.DUPLICATE_ID, text, param="id")
        self._answer(messages.error_frame(error, id_rejected=stream_id))

    def _answer(self, message: messages.ServerMessage) -> None:
        if len(self._answers) >= MAX_UNREAD_ANSWERS:
            self._answers.clear()
            self._close(CloseCode.TOO_MANY, f"{MAX_UNREAD_ANSWERS} answers wait unread")
            return
        self._answers.append(messages.encode(message))
        self._on_output()

    def _retire(self, stream: Stream) -> None:
        del self._live[stream.id]
        self._ended_ids[stream.id] = None
        if len(self._ended_ids) > ENDED_IDS_KEPT:
            del self._ended_ids[next(iter(self._ended_ids))]
        if stream.is_detached:
            self._over[stream.id] = stream
            if len(self._over) > self._config.max_streams:
                self._over.pop(next(iter(self._over))).abandon(CancelReason.CLIENT)

    def _forget(self, stream_id: str) -> None:
        """The id names a new stream from now on."""
        self._ended_ids.pop(stream_id, None)
        old = self._over.pop(stream_id, None)
        if old is not None:
            old.abandon(CancelReason.CLIENT)

    def _close(self, code: CloseCode, reason: str) -> None:
        if self.close is None and self.state is not SessionState.CLOSED:
            self.close = Close(code, reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore"))
            self._on_output()
