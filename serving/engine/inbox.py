"""Commands on their way from the reader thread to the step loop; bounded, and a cancel always gets through."""

import threading
from dataclasses import dataclass

from headrace.serving.core.request import CancelReason, Rejection, RejectionReason, Request, RequestId

RETRY_AFTER_MS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """Everything that arrived since the last take: obey submits first, then cancels (a cancel follows its submit)."""

    submits: tuple[Request, ...] = ()
    cancels: tuple[tuple[RequestId, CancelReason], ...] = ()
    drain: bool = False
    probe: int | None = None
    closed: bool = False


class Inbox:
    """Thread-safe. Submits are bounded by number and by prompt tokens; cancels by the requests that are alive, since
    the edge sends one for each at most; of drains and probes only the last is kept.
    """

    def __init__(self, *, max_requests: int = 512, max_prompt_tokens: int = 1 << 20) -> None:
        self._max_requests = max_requests
        self._max_prompt_tokens = max_prompt_tokens
        self._changed = threading.Condition()
        self._submits: list[Request] = []
        self._prompt_tokens = 0
        self._cancels: dict[RequestId, CancelReason] = {}
        self._drain = False
        self._probe: int | None = None
        self._closed = False

    def submit(self, request: Request) -> Rejection | None:
        """Never blocks; a Rejection when the request does not fit (one larger than the bound fits an empty inbox)."""
        with self._changed:
            tokens = self._prompt_tokens + len(request.prompt_ids)
            if len(self._submits) >= self._max_requests or (self._submits and tokens > self._max_prompt_tokens):
                return Rejection(
                    reason=RejectionReason.QUEUE_FULL,
                    message=f"{len(self._submits)} requests already wait for the engine; try again later",
                    retry_after_ms=RETRY_AFTER_MS,
                )
            self._submits.append(request)
            self._prompt_tokens = tokens
            self._changed.notify()
            return None

    def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        """The first reason stays."""
        with self._changed:
            self._cancels.setdefault(request_id, reason)
            self._changed.notify()

    def drain(self) -> None:
        with self._changed:
            self._drain = True
            self._changed.notify()

    def probe(self, nonce: int) -> None:
        with self._changed:
            self._probe = nonce
            self._changed.notify()

    def close(self) -> None:
        """The edge is gone: nothing that comes later counts, and every take returns at once."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def take(self, *, wait: bool) -> Commands:
        """Empties the inbox; with wait, sleeps until there is something in it."""
        with self._changed:
            if wait:
                self._changed.wait_for(self._has_something)
            commands = Commands(
                submits=tuple(self._submits),
                cancels=tuple(self._cancels.items()),
                drain=self._drain,
                probe=self._probe,
                closed=self._closed,
            )
            self._submits.clear()
            self._prompt_tokens = 0
            self._cancels.clear()
            self._drain = False
            self._probe = None
            return commands

    def _has_something(self) -> bool:
        return bool(self._submits or self._cancels or self._drain or self._closed or self._probe is not None)
