"""``GET /v1/stream``: the native WebSocket as an ASGI application around the sans-I/O session.

Per socket one reader and one writer task. The reader never stops receiving, whatever the writer waits for: uvicorn
pauses the connection between messages until the application receives again, and a paused connection sees neither
pongs nor the end of its client.
"""

import asyncio
import hashlib
import logging
import time
from collections import Counter
from dataclasses import dataclass

from starlette.types import Message, Receive, Scope, Send

from headrace.serving.core.request import CancelReason
from headrace.serving.edge.errors import ApiError, ErrorCode, shutting_down
from headrace.serving.edge.guards import FORCE_CLOSE
from headrace.serving.edge.keys import Identity
from headrace.serving.edge.messages import SUBPROTOCOL, CloseCode
from headrace.serving.edge.metrics import Metrics
from headrace.serving.edge.security import identity_of, peer_of, refuse
from headrace.serving.edge.session import Session, SessionConfig, SessionState, Start
from headrace.serving.edge.socket_meter import SocketMeter
from headrace.serving.edge.stream import ReplayBudget
from headrace.serving.edge.stream_ports import KeyCheck, StreamService
from headrace.serving.edge.terms import Terms
from headrace.serving.edge.trace_context import set_caller

MESSAGES_PER_TURN = 64
"""Messages of one socket handled before the others get their turn; receiving does not yield while some are queued."""

_log = logging.getLogger("headrace.stream")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """write_stall_s: a write that the client does not take for so long ends its socket. hello_s: time for a hello.
    idle_s: a socket without streams and messages is closed. max_unauthenticated: sockets that still owe a hello.
    max_sockets_per_key: of one tenant; not applied where there are no keys. max_parked: lost sessions with detached
    streams; the oldest is given up. replay_total_bytes: over all detached streams.
    """

    session: SessionConfig
    write_stall_s: float = 30.0
    hello_s: float = 10.0
    idle_s: float = 600.0
    max_sockets_per_key: int = 64
    max_unauthenticated: int = 128
    max_parked: int = 256
    replay_total_bytes: int = 64 << 20


class StreamEndpoint:
    """All native WebSockets of the server. Also a ``Drainable`` of serving/edge/server.py."""

    def __init__(
        self,
        service: StreamService,
        keys: KeyCheck,
        config: StreamConfig,
        *,
        metrics: Metrics | None = None,
    ) -> None:
        self.service = service
        self.keys = keys
        self.config = config
        self.budget = ReplayBudget(config.replay_total_bytes)
        self._meter = SocketMeter(metrics, sockets=lambda: self.num_sockets, streams=lambda: self.num_streams)
        self._sockets: set[_Socket] = set()
        self._by_tenant: Counter[str] = Counter()
        self._sessions: dict[bytes, Session] = {}  # by digest of the secret: open ones and parked ones
        self._parked: dict[bytes, asyncio.TimerHandle] = {}
        self._preparing: set[asyncio.Task[None]] = set()
        self._is_draining = False
        self._all_closed = asyncio.Event()
        self._all_closed.set()

    @property
    def num_sockets(self) -> int:
        return len(self._sockets)

    @property
    def num_streams(self) -> int:
        """Live streams, those of lost connections included."""
        return sum(session.num_streams for session in self._sessions.values())

    # ASGI

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            error = ApiError(ErrorCode.NOT_FOUND, "This path is a WebSocket; connect with ws:// or wss://.")
            await refuse(scope, send, error)
            return
        identity = identity_of(scope)
        error_or_none = self._why_not(scope, identity)
        if error_or_none is not None:
            await refuse(scope, send, error_or_none)
            return
        socket = _Socket(self, scope, receive, self._meter.around(send))
        self._sockets.add(socket)
        self._all_closed.clear()
        try:
            await socket.run()
        finally:
            self._sockets.discard(socket)
            if not self._sockets:
                self._all_closed.set()

    def _why_not(self, scope: Scope, identity: Identity | None) -> ApiError | None:
        """Why no socket is opened, said before the upgrade."""
        if SUBPROTOCOL not in scope.get("subprotocols", ()):
            return ApiError(ErrorCode.INVALID_VALUE, f"Offer the WebSocket subprotocol {SUBPROTOCOL}.")
        if self._is_draining:
            return shutting_down()
        if identity is None:
            waiting = sum(socket.session.state is SessionState.AWAIT_HELLO for socket in self._sockets)
            if waiting >= self.config.max_unauthenticated:
                text = "Too many sockets wait for a hello; send the key in the handshake."
                return ApiError(ErrorCode.RATE_LIMITED, text, retry_after_ms=1000)
        elif not self.has_room_for(identity):
            text = f"This key has {self.config.max_sockets_per_key} open sockets, the limit; one carries many streams."
            return ApiError(ErrorCode.RATE_LIMITED, text, retry_after_ms=1000)
        return None

    # For sockets

    def has_room_for(self, identity: Identity) -> bool:
        return not identity.tenant or self._by_tenant[identity.tenant] < self.config.max_sockets_per_key

    def opened(self, session: Session) -> None:
        """The session is authenticated: it counts for its tenant, and can be found for a resume."""
        assert session.identity is not None
        self._by_tenant[session.identity.tenant] += 1
        self._sessions[_digest(session.secret)] = session

    def closed(self, session: Session, code: int) -> None:
        """The socket is gone; a session with detached streams is kept for resume_s."""
        self._meter.closed(code)
        if session.identity is None:
            return
        self._by_tenant[session.identity.tenant] -= 1
        key = _digest(session.secret)
        if self._is_draining or not session.has_detached:
            self._drop(key, CancelReason.SHUTDOWN if self._is_draining else CancelReason.DISCONNECT)
            return
        if len(self._parked) >= self.config.max_parked:
            self._drop(next(iter(self._parked)), CancelReason.DISCONNECT)
        loop = asyncio.get_running_loop()
        self._parked[key] = loop.call_later(self.config.session.resume_s, self._drop, key, CancelReason.DISCONNECT)

    def keep(self, task: asyncio.Task[None]) -> None:
        """Requests in preparation belong to their streams, which may outlive the socket."""
        self._preparing.add(task)
        task.add_done_callback(self._preparing.discard)

    def find_session(self, secret: str) -> Session | None:
        return self._sessions.get(_digest(secret))

    def _drop(self, key: bytes, reason: CancelReason) -> None:
        timer = self._parked.pop(key, None)
        if timer is not None:
            timer.cancel()
        session = self._sessions.pop(key, None)
        if session is not None:
            session.expire(reason)

    # Shutdown

    def begin_drain(self, limit_s: float) -> None:
        """Refuse new sockets and streams; sockets close when their streams have ended. Streams of lost connections
        are cancelled: nobody can come back for them."""
        self._is_draining = True
        for key in list(self._parked):
            self._drop(key, CancelReason.SHUTDOWN)
        for socket in self._sockets:
            socket.session.begin_drain(round(limit_s * 1000))

    async def wait_idle(self) -> None:
        """Until every socket is closed."""
        await self._all_closed.wait()

    def abort(self) -> int:
        """End what still runs with shutting_down and close 1001. Returns how many streams lost work."""
        return sum(socket.session.abort() for socket in self._sockets)


class _Socket:
    """One connection: two tasks and a few timers around a session. It is the session's host."""

    def __init__(self, endpoint: StreamEndpoint, scope: Scope, receive: Receive, send: Send) -> None:
        self._endpoint = endpoint
        self._scope = scope
        self._receive = receive
        self._send = send
        self._peer = peer_of(scope)
        self._output = asyncio.Event()
        self._last_message_s = time.monotonic()
        self._is_counted = False
        self.session = Session(
            endpoint.config.session,
            self,
            identity=identity_of(scope),
            budget=endpoint.budget,
            on_output=self._output.set,
        )

    # SessionHost

    @property
    def model_names(self) -> tuple[str, ...]:
        return self._endpoint.service.model_names

    @property
    def max_context(self) -> int:
        return self._endpoint.service.max_context

    @property
    def contract_hashes(self) -> tuple[str | None, str | None]:
        return self._endpoint.service.contract_hashes

    def contract_fault(self, expected: str) -> ApiError | None:
        try:
            self._endpoint.service.check_expected((expected,))
        except ApiError as error:
            return error
        return None

    def identify(self, key: str) -> Identity | None:
        return self._endpoint.keys.identify(key, self._peer)

    def has_room_for(self, identity: Identity) -> bool:
        return self._endpoint.has_room_for(identity)

    def is_current(self, identity: Identity) -> bool:
        return self._endpoint.keys.is_current(identity)

    def find_session(self, secret: str) -> Session | None:
        return self._endpoint.find_session(secret)

    # Running

    async def run(self) -> None:
        """Until the connection is over, whoever ends it."""
        await self._send({"type": "websocket.accept", "subprotocol": SUBPROTOCOL})
        self._count_if_open()
        loop = asyncio.get_running_loop()
        config = self._endpoint.config
        hello_timer = loop.call_later(config.hello_s, self.session.hello_is_late)
        idle_timer = asyncio.create_task(self._watch_idle(config.idle_s))
        reader = asyncio.create_task(self._read())
        writer = asyncio.create_task(self._write())
        reason, code = CancelReason.DISCONNECT, 1006
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            closed = writer.result() if writer.done() else None
            if closed == CloseCode.TOO_SLOW:
                reason = CancelReason.SLOW_CLIENT
            code = await reader if closed is None else closed
        finally:
            hello_timer.cancel()
            for task in (reader, writer, idle_timer):
                task.cancel()
            self.session.disconnected(reason)
            if self._is_counted:
                self._endpoint.closed(self.session, code)
            _log.debug("%s closed %d, client %s", self._peer, code, self.session.client or "unnamed")

    async def _read(self) -> int:
        """Feed the session. Ends when the client is gone; returns the close code."""
        count = 0
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                return int(message.get("code", 1006))
            if message["type"] != "websocket.receive":
                continue
            self._last_message_s = time.monotonic()
            self._handle(message)
            close = self.session.close
            if close is not None and close.code is CloseCode.TOO_MANY:
                return self._cut(close.code, close.reason)  # the writer hangs, so it cannot
            count += 1
            if count % MESSAGES_PER_TURN == 0:
                await asyncio.sleep(0)

    def _handle(self, message: Message) -> None:
        text = message.get("text")
        if text is None:
            self.session.receive_bytes()
            return
        start = self.session.receive_text(text)
        self._count_if_open()
        if start is not None:
            terms = Terms(deadline_ms=start.deadline_ms, priority=start.priority, arrival_s=self._last_message_s)
            task = asyncio.create_task(self._prepare(start, terms))
            start.stream.preparing(task.cancel)
            self._endpoint.keep(task)

    async def _prepare(self, start: Start, terms: Terms) -> None:
        """Prepare and submit a request; tokenizing and templates run off the loop, inside the service."""
        stream = start.stream
        if start.traceparent is not None:
            set_caller(start.traceparent)
        try:
            job = await self._endpoint.service.start(
                start.endpoint, start.body, tenant=start.tenant, terms=terms, expected=start.expected
            )
        except ApiError as error:
            stream.fail(error)
        except Exception:
            _log.exception("a request failed before it was admitted")
            stream.fail(ApiError(ErrorCode.INTERNAL, "The server failed to prepare the request."))
        else:
            stream.started(job)

    async def _write(self) -> int | None:
        """Write what the session gives, until the socket is closed; returns the close code. None: the connection is
        lost, and the reader hears how."""
        try:
            return await self._write_all()
        except OSError:
            return None

    async def _write_all(self) -> int:
        session = self.session
        while True:
            frame = session.next_frame()
            if frame is not None:
                if not await self._send_in_time({"type": "websocket.send", "text": frame}):
                    return self._cut(CloseCode.TOO_SLOW, "the client does not read")
            elif session.close is not None:
                close = session.close
                sent = await self._send_in_time(
                    {"type": "websocket.close", "code": int(close.code), "reason": close.reason}
                )
                return int(close.code) if sent else self._cut(close.code, close.reason)
            else:
                self._output.clear()
                await self._output.wait()

    async def _send_in_time(self, message: Message) -> bool:
        """Whether the connection took the message before the stall limit."""
        try:
            async with asyncio.timeout(self._endpoint.config.write_stall_s):
                await self._send(message)
        except TimeoutError:
            return False
        return True

    def _cut(self, code: CloseCode, reason: str) -> int:
        """Close without waiting for a client that does not read."""
        force_close = self._scope.get("extensions", {}).get(FORCE_CLOSE)
        if force_close is not None:
            force_close(int(code), reason)
        return int(code)

    async def _watch_idle(self, idle_s: float) -> None:
        while True:
            left_s = self._last_message_s + idle_s - time.monotonic()
            if left_s <= 0:
                self.session.idle_too_long()
                left_s = idle_s
            await asyncio.sleep(left_s)

    def _count_if_open(self) -> None:
        if not self._is_counted and self.session.identity is not None:
            self._is_counted = True
            self._endpoint.opened(self.session)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
