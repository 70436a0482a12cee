"""One log line per request: who, what path, how it ended, how long. Never a query string, a header or a body."""

import logging
import time
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.serving.edge.security import peer_of

_log = logging.getLogger("headrace.access")
_QUIET_PATHS = frozenset({"/livez", "/readyz", "/health", "/metrics"})
MAX_PATH_CHARS = 200


class AccessLog:
    """Wraps an application. Probes and scrapes are logged at DEBUG, everything else at INFO."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        level = logging.DEBUG if scope.get("path") in _QUIET_PATHS else logging.INFO
        if scope["type"] not in ("http", "websocket") or not _log.isEnabledFor(level):
            await self._app(scope, receive, send)
            return
        outcome = "no answer"

        async def send_and_note(message: Message) -> None:
            nonlocal outcome
            kind = message["type"]
            if kind in ("http.response.start", "websocket.http.response.start"):
                outcome = str(message["status"])
            elif kind == "websocket.accept":
                outcome = "101"
            elif kind == "websocket.close":
                outcome = f"{outcome} closed {message.get('code', 1000)}"
            await send(message)

        started_s = time.monotonic()
        try:
            await self._app(scope, receive, send_and_note)
        finally:
            method = "WS" if scope["type"] == "websocket" else scope["method"]
            path = quote(scope["path"][:MAX_PATH_CHARS])
            _log.log(
                level, "%s %s %s %s %.0f ms", peer_of(scope), method, path, outcome,
                (time.monotonic() - started_s) * 1e3,
            )  # fmt: skip
