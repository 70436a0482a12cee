"""What native WebSockets cost and how they end, for the metrics: open ones, bytes that wait for clients, stalls."""

import time
from collections.abc import Callable

from starlette.types import Message, Send

from headrace.serving.edge.messages import CloseCode
from headrace.serving.edge.metrics import Metrics

STALL_S = 0.1
"""A write that takes less waits for the event loop or the kernel, not for a client that does not read."""
_COUNTED_CODES = frozenset({*CloseCode, 1005, 1006})
"""Clients may send thousands of codes of their own; they share one label."""


class SocketMeter:
    """metrics: None = nothing is counted. sockets, streams: how many there are now."""

    def __init__(self, metrics: Metrics | None, *, sockets: Callable[[], int], streams: Callable[[], int]) -> None:
        self._metrics = metrics
        self._waiting_bytes = 0
        if metrics is not None:
            metrics.ws_connections.set_function(sockets)
            metrics.ws_streams.set_function(streams)
            metrics.ws_waiting_bytes.set_function(lambda: self._waiting_bytes)

    def around(self, send: Send) -> Send:
        """The same, measured. What waits for its turn behind a write is merged in the streams, and is not counted."""
        metrics = self._metrics
        if metrics is None:
            return send

        async def measured(message: Message) -> None:
            text = message.get("text", "")
            size = len(text) if text.isascii() else len(text.encode())
            self._waiting_bytes += size
            started_s = time.monotonic()
            try:
                await send(message)
            finally:
                self._waiting_bytes -= size
                took_s = time.monotonic() - started_s
                if took_s > STALL_S:
                    metrics.ws_stalled_seconds.inc(took_s)

        return measured

    def closed(self, code: int) -> None:
        """With what code."""
        if self._metrics is not None:
            self._metrics.ws_closes.labels(str(code) if code in _COUNTED_CODES else "other").inc()
