"""A native WebSocket as a target: many requests over few sockets, and the server's own times in each ``done``."""

import asyncio
import time
from dataclasses import replace
from typing import Any

from websockets.exceptions import WebSocketException

from headrace.serving.bench.outcome import (
    MAX_KEPT_CHARS,
    Outcome,
    cached_of,
    clean_code,
    clean_id,
    gaps_of,
    is_refusal,
    pauses_of,
    server_times,
)
from headrace.serving.bench.stream_client import History, StreamClient
from headrace.serving.bench.targets import AS_SOON_AS_ASKED, CONNECT_S, BenchError, Server, Terms


class NativeTarget:
    """sockets: of each tenant that has a key of its own, and of all others together; requests take turns on them. A
    socket that was lost is opened again by the next request that needs it."""

    def __init__(self, server: Server, model: str | None, *, sockets: int = 1, keeps_text: bool = False) -> None:
        self._kept_chars = MAX_KEPT_CHARS if keeps_text else 0
        self._server = server
        self._model = model
        groups: list[str | None] = [None, *server.keys]
        self._sockets = {
            group: [_Socket(server.stream_url, server.key_of(group)) for _ in range(sockets)] for group in groups
        }
        self._turns = dict.fromkeys(groups, 0)

    async def __aenter__(self) -> "NativeTarget":
        has_only_tenants = bool(self._server.keys) and self._server.key is None
        try:
            for group, sockets in self._sockets.items():
                if group is not None or not has_only_tenants:
                    for socket in sockets:
                        await socket.client()
        except ConnectionError as error:
            raise BenchError(f"{self._server.stream_url} takes no stream: {error}; see --api") from None
        return self

    async def __aexit__(self, *_: object) -> None:
        for sockets in self._sockets.values():
            for socket in sockets:
                await socket.close()

    def _next_socket(self, tenant: str | None) -> "_Socket":
        group = tenant if tenant in self._sockets else None
        sockets = self._sockets[group]
        self._turns[group] = (self._turns[group] + 1) % len(sockets)
        return sockets[self._turns[group]]

    async def ask(self, index: int, body: dict[str, object], terms: Terms = AS_SOON_AS_ASKED) -> Outcome:
        named = body if self._model is None else {**body, "model": self._model}
        history = History(f"r{index}", time.monotonic())
        client: StreamClient | None = None
        error: str | None = None
        is_cancelled = False
        try:
            async with asyncio.timeout(self._server.limit_s):
                client = await self._next_socket(terms.tenant).client()
                history = await client.create(history.id, "completion", named, **terms.envelope)
                is_cancelled = await _cancelled(client, history, terms.cancel_s)
                await history.ended.wait()
        except TimeoutError:
            error = "timeout"
            if client is not None:
                await client.cancel(history.id)
        except ConnectionError:
            error = "connection_lost"
        else:
            error = _fault_of(history)
            client.forget(history)  # what comes after a timeout belongs to nobody else
        found = _outcome(index, history, terms, error, is_cancelled)
        return replace(found, text=_text_of(history)[: self._kept_chars]) if self._kept_chars else found


async def _cancelled(client: StreamClient, history: History, cancel_s: float | None) -> bool:
    """Whether it was cancelled, because it went on until then."""
    if cancel_s is None:
        return False
    try:
        async with asyncio.timeout(max(0.0, cancel_s - time.monotonic())):
            await history.ended.wait()
    except TimeoutError:
        await client.cancel(history.id)
        return True
    return False


def _outcome(index: int, history: History, terms: Terms, error: str | None, is_cancelled: bool) -> Outcome:
    end: dict[str, Any] = history.terminals[0] if history.terminals else {}
    deltas = [(at_s, frame) for at_s, frame in history.of_type("delta") if frame["n"]]
    times, counts = [at_s for at_s, _ in deltas], [int(frame["n"]) for _, frame in deltas]
    usage = end.get("usage", {})
    detail = end.get("error", {})
    created = history.of_type("created")
    gaps = gaps_of(times, counts)
    return Outcome(
        index=index,
        planned_s=terms.planned_s,
        sent_s=history.sent_s,
        ended_s=history.frames[-1][0] if end else time.monotonic(),
        first_s=times[0] if times else None,
        last_s=times[-1] if times else None,
        error=error,
        is_refused=bool(detail) and not times and is_refusal(error, detail.get("type"), end.get("status")),
        is_cancelled=is_cancelled,
        retry_after_ms=end.get("retry_after_ms"),
        tenant=terms.tenant,
        request_id=clean_id(created[0][1].get("request_id")) if created else None,
        server=server_times(end.get("metrics")),
        prompt_tokens=int(usage.get("prompt_tokens", 0)),
        cached_tokens=cached_of(usage),
        output_tokens=int(usage.get("completion_tokens", sum(counts))),
        first_tokens=counts[0] if counts else 0,
        gaps_ms=gaps,
        pauses_ms=gaps if len(gaps) == len(times) - 1 else pauses_of(times),
    )


def _text_of(history: History) -> str:
    return "".join(str(frame.get("text", "")) for _, frame in history.of_type("delta"))


def _fault_of(history: History) -> str | None:
    if history.is_lost:
        return "connection_lost"
    if history.terminals[0]["type"] == "error":
        return clean_code(history.terminals[0]["error"]["code"])
    return "broken_stream" if history.faults() else None


class _Socket:
    """One WebSocket, opened when it is needed."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url
        self._key = key
        self._client: StreamClient | None = None
        self._opening = asyncio.Lock()

    async def client(self) -> StreamClient:
        """Raises: ConnectionError with what went wrong."""
        async with self._opening:
            if self._client is None or self._client.is_closed:
                await self.close()
                client = StreamClient(self._url, token=self._key)
                try:
                    async with asyncio.timeout(CONNECT_S):
                        await client.__aenter__()
                except (OSError, WebSocketException, TimeoutError, ValueError) as error:
                    raise ConnectionError(str(error) or type(error).__name__) from None
                self._client = client
            return self._client

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.__aexit__()
