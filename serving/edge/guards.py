"""Limits below ASGI, where uvicorn has none: connections, header bytes and time, WebSocket fragments and control
frames, and a way to close a socket whose client has stopped reading. Subclasses of uvicorn's two protocols.
"""

import asyncio
import logging
import time
from asyncio import TimerHandle
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

from uvicorn._types import ASGISendEvent
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import Frame
from websockets.http11 import Request

FORCE_CLOSE = "headrace.force_close"
"""ASGI extension of a WebSocket scope: ``force_close(code, reason)`` closes without waiting for the client to read."""

VERSION = "13"
"""Of the WebSocket protocol; there is no other."""

_log = logging.getLogger("headrace.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """max_connections: open sockets, HTTP and WebSocket together; further ones get 503.
    head_s, body_s: time for a request's head and body. max_head_bytes, max_headers: of one request.
    max_fragments, message_s: of one WebSocket message. control_per_s, control_burst: pings and pongs from one client.
    close_grace_s: how long a closing socket may keep unread bytes. linger_s: how long a refused client is still read
    from, unheeded: closing with unread bytes makes the kernel send a reset, which can destroy the answer.
    """

    max_connections: int = 2000
    head_s: float = 10.0
    body_s: float = 60.0
    max_head_bytes: int = 16 << 10
    max_headers: int = 64
    max_fragments: int = 1024
    message_s: float = 10.0
    control_per_s: float = 20.0
    control_burst: float = 50.0
    close_grace_s: float = 5.0
    linger_s: float = 1.0


class _HeadTooLarge(Exception):
    """Leaves httptools' callbacks; uvicorn then asks for the 400 that becomes a 431."""


class GuardedHttp(HttpToolsProtocol):
    """HTTP/1.1 with limits on connections, heads and bodies."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ConnectionLimits,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._deadline: TimerHandle | None = None
        self._head_bytes = 0
        self._unfinished_bytes = 0
        self._is_in_head = True
        self._is_head_too_large = False
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._refuse("503 Service Unavailable", f"the server has {self._limits.max_connections} connections")
            return
        self._expect(self._limits.head_s, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        was_in_head = self._is_in_head
        super().data_received(data)
        if was_in_head and self._is_in_head and not self._is_refused:
            # A header without end reaches no callback.
            self._unfinished_bytes += len(data)
            if self._unfinished_bytes > self._limits.max_head_bytes:
                self._is_head_too_large = True
                self.send_400_response("")

    def handle_websocket_upgrade(self) -> None:
        self._expect(None)
        if self.scope["http_version"] != "1.1":
            # uvicorn would hand it on as HTTP/1.1 (RFC 6455 4.2.1).
            self._refuse("505 HTTP Version Not Supported", "a WebSocket needs HTTP/1.1")
            return
        if not self.url.isascii():
            self.send_400_response("Invalid HTTP request received.")
            return
        super().handle_websocket_upgrade()

    def on_message_begin(self) -> None:
        self._head_bytes = self._unfinished_bytes = 0
        self._is_in_head = True
        self._expect(self._limits.head_s, self._head_is_late)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if len(self.headers) >= self._limits.max_headers:
            self._is_head_too_large = True
            raise _HeadTooLarge
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._expect(self._limits.body_s, self._body_is_late)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._expect(None)
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if self._is_head_too_large:
            limits = self._limits
            self._refuse(
                "431 Request Header Fields Too Large",
                f"at most {limits.max_headers} headers and {limits.max_head_bytes} bytes of head are accepted",
            )
        else:
            self._is_refused = True
            super().send_400_response(msg)

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > self._limits.max_head_bytes:
            self._is_head_too_large = True
            raise _HeadTooLarge

    def _head_is_late(self) -> None:
        self._refuse("408 Request Timeout", f"the head was not complete after {self._limits.head_s:g} s")

    def _body_is_late(self) -> None:
        """An answer may be under way, so the connection just ends; the application sees a disconnect."""
        self.transport.abort()

    def _refuse(self, status: str, text: str) -> None:
        self._expect(None)
        self._is_refused = True
        body = text.encode()
        self.transport.write(
            f"HTTP/1.1 {status}\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        self.loop.call_later(self._limits.linger_s, self.transport.close)

    def _expect(self, seconds: float | None, otherwise: Callable[[], None] | None = None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if seconds is not None and otherwise is not None:
            self._deadline = self.loop.call_later(seconds, otherwise)


class GuardedWebSocket(WebSocketsSansIOProtocol):
    """WebSocket with limits on fragments, message time and control frames."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ConnectionLimits,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._message_timer: TimerHandle | None = None
        self._lingers = False
        self._control_left = limits.control_burst
        self._control_at_s = time.monotonic()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_message_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # uvicorn hears of no event then; without this the connection would stay open, unanswered.
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()

    def handle_connect(self, event: Request) -> None:
        if event.headers.get_all("Sec-WebSocket-Version") == [VERSION]:
            super().handle_connect(event)
            return
        # The library answers 400 and does not name the version, as RFC 6455 4.4 demands.
        self.handshake_initiated = self.handshake_complete = self.close_sent = True
        response = self.conn.reject(HTTPStatus.UPGRADE_REQUIRED, f"Sec-WebSocket-Version must be {VERSION}.\n")
        response.headers["Sec-WebSocket-Version"] = VERSION
        response.headers["Upgrade"] = "websocket"
        self.conn.send_response(response)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.transport.close()

    async def run_asgi(self) -> None:
        cast(dict[str, Any], self.scope["extensions"])[FORCE_CLOSE] = self.force_close
        await super().run_asgi()

    def handle_parser_exception(self) -> None:
        """Say why and end our half, then read on for a moment before closing. Called again for all that still comes.

        Behind a close frame of ours there is nothing more to say, and the client's cannot be found any more.
        """
        if self._lingers:
            return
        self._lingers = True
        output = b"".join(self.conn.data_to_send())
        if not self.close_sent:
            assert self.conn.close_sent is not None
            code, reason = self.conn.close_sent.code, self.conn.close_sent.reason
            self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
            self.transport.write(output)
            self.close_sent = True
        if self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        if self.close_timer is not None:
            self.close_timer.cancel()
        self.close_timer = self.loop.call_later(self._limits.linger_s, self.transport.close)
        self._cut_later()

    async def send(self, message: ASGISendEvent) -> None:
        if self.handshake_complete:
            await self.writable.wait()
            if self.close_sent:  # by a limit or the keepalive: nothing that the application could know
                raise ClientDisconnected
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and self.close_sent:
            self.handshake_complete = True  # uvicorn would log every refused upgrade as an incomplete handshake

    def force_close(self, code: int, reason: str) -> None:
        """Queue a close frame behind what the client has not read, and cut the connection after the grace."""
        if not self.close_sent and not self.transport.is_closing():
            self.conn.send_close(code, reason)
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.close_sent = True
        self._cut_later()

    def shutdown(self) -> None:
        """The process ends; the client has linger_s to read what there is. uvicorn fails on a connection that is
        closing already."""
        if not self.transport.is_closing():
            super().shutdown()
        self.loop.call_later(self._limits.linger_s, self.transport.abort)

    def keepalive_timeout(self) -> None:
        """uvicorn tells the application only when the connection is gone, which unread bytes delay, and not why."""
        was_open = not self.close_sent and not self.transport.is_closing()
        super().keepalive_timeout()
        if was_open:
            self.queue.put_nowait({"type": "websocket.disconnect", "code": 1011, "reason": "no pong in time"})
        self._cut_later()

    def handle_text(self, event: Frame) -> None:
        self._time_message(event)
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        self._time_message(event)
        super().handle_bytes(event)

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= self._limits.max_fragments:
            self._fail(1009, "too many fragments")
            return
        if event.fin:
            self._stop_message_timer()
        super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        """uvicorn would log each text that is not UTF-8 as a fault of the server, with a traceback."""
        if self.curr_msg_data_type == "text":
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self._fail(1007, "the text is not UTF-8")
                return
        super().send_receive_event_to_app()

    def handle_ping(self) -> None:
        if self.close_sent:
            self.conn.data_to_send()  # a pong, which nobody waits for behind a close frame
        elif self._take_control():
            super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        if self._take_control():
            super().handle_pong(event)

    def _take_control(self) -> bool:
        now_s = time.monotonic()
        limits = self._limits
        earned = (now_s - self._control_at_s) * limits.control_per_s
        self._control_left = min(limits.control_burst, self._control_left + earned) - 1
        self._control_at_s = now_s
        if self._control_left >= 0:
            return True
        self._fail(1008, "too many control frames")
        return False

    def _time_message(self, event: Frame) -> None:
        if not event.fin:
            self._message_timer = self.loop.call_later(self._limits.message_s, self._message_is_late)

    def _message_is_late(self) -> None:
        self._fail(1008, f"a message took longer than {self._limits.message_s:g} s")

    def _stop_message_timer(self) -> None:
        if self._message_timer is not None:
            self._message_timer.cancel()
            self._message_timer = None

    def _fail(self, code: int, reason: str) -> None:
        self._stop_message_timer()
        self.frames = []
        if not self.close_sent and not self.transport.is_closing():
            self.conn.fail(code, reason)
            self.handle_parser_exception()

    def _cut_later(self) -> None:
        self.loop.call_later(self._limits.linger_s + self._limits.close_grace_s, self.transport.abort)
