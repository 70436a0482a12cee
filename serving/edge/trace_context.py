"""Whose trace a request belongs to: W3C headers of its HTTP request or its WebSocket's handshake, or its own frame."""

from collections.abc import Mapping
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

MAX_HEADER_CHARS = 512
"""Of traceparent and tracestate; longer ones are none of W3C's."""

_caller: ContextVar[Mapping[str, str] | None] = ContextVar("caller", default=None)


def caller() -> Mapping[str, str]:
    """traceparent and tracestate for what the current task starts, unchecked; empty where there is none."""
    return _caller.get() or {}


def set_caller(traceparent: str) -> None:
    """From here on in this task, and in those that it starts."""
    _caller.set({"traceparent": traceparent})


class TraceHeaders:
    """Wraps an application, so that ``caller`` knows the headers of its HTTP request or WebSocket handshake."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope.get("headers", ())
            if name in (b"traceparent", b"tracestate") and len(value) <= MAX_HEADER_CHARS
        }
        if found:
            _caller.set(found)  # This task and those that it starts are the connection's own.
        await self._app(scope, receive, send)
