"""Servers as a bench sees them: our WebSocket, or any OpenAI-compatible endpoint that streams over HTTP."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx
from websockets.exceptions import WebSocketException

from headrace.serving.bench.outcome import Outcome, cached_of, clean_code, gaps_of
from headrace.serving.bench.stream_client import History, StreamClient
from headrace.serving.core.errors import ConfigError

CONNECT_S = 10.0
MAX_ERROR_BYTES = 64 << 10
"""Of the body of a refusal."""
MAX_DOCUMENT_BYTES = 4 << 20
"""Of a contract or a list of models."""
SCHEMES = {"http": "http", "https": "https", "ws": "http", "wss": "https"}


class BenchError(RuntimeError):
    """The server cannot be reached, or is none that can be asked; the text names the URL and the remedy."""


class Target(Protocol):
    """Where requests go. Use as an asynchronous context."""

    async def ask(self, index: int, body: dict[str, object]) -> Outcome:
        """One request to its end. Whatever goes wrong is in the outcome."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """base: scheme, host, port and path without a slash at its end. key: of the API, None = none. limit_s: of one
    request."""

    base: str
    key: str | None = field(default=None, repr=False)
    limit_s: float = 600.0

    @property
    def stream_url(self) -> str:
        return "ws" + self.base.removeprefix("http") + "/v1/stream"

    def client(self, connections: int) -> httpx.AsyncClient:
        headers = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        timeout = httpx.Timeout(self.limit_s, connect=CONNECT_S)
        return httpx.AsyncClient(headers=headers, limits=limits, timeout=timeout)


def base_of(url: str) -> str:
    """From a URL with or without the path of an endpoint. Raises: ConfigError."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or not parts.hostname or parts.username or parts.query or parts.fragment:
        raise ConfigError(f"{url!r} is not a server's URL, such as http://127.0.0.1:8000 (keys go into --api-key-file)")
    path = parts.path.rstrip("/").removesuffix("/v1/stream").removesuffix("/v1")
    return f"{SCHEMES[parts.scheme]}://{parts.netloc}{path}"


async def contract_of(server: Server) -> dict[str, Any] | None:
    """``/v1/contract``; None where the server has none of our kind.

    Raises: BenchError where it cannot be reached, or refuses.
    """
    found = await _document(server, "/v1/contract", may_miss=True)
    parts = ("contract", "topology", "versions")
    is_ours = found is not None and all(isinstance(found.get(part), dict) for part in parts)
    return found if is_ours else None


async def model_of(server: Server) -> str:
    """The first that it serves. Raises: BenchError."""
    found = await _document(server, "/v1/models", may_miss=False)
    try:
        return str(found["data"][0]["id"])  # type: ignore[index]
    except (KeyError, IndexError, TypeError):
        raise BenchError(f"{server.base}/v1/models names no model; give --model") from None


async def _document(server: Server, path: str, *, may_miss: bool) -> dict[str, Any] | None:
    url = server.base + path
    try:
        async with server.client(1) as client, client.stream("GET", url, timeout=CONNECT_S) as response:
            raw = await _bounded(response, MAX_DOCUMENT_BYTES)
    except httpx.HTTPError as error:
        raise BenchError(f"{url} cannot be reached: {str(error) or type(error).__name__}") from None
    if may_miss and response.status_code in (404, 405):
        return None
    if response.status_code != 200:
        raise BenchError(f"{url} answers {response.status_code} ({_code(raw, response.status_code)})")
    try:
        found = json.loads(raw)
    except ValueError:
        found = None
    if isinstance(found, dict):
        return found
    if may_miss:
        return None
    raise BenchError(f"{url} answers no JSON object")


async def _bounded(response: httpx.Response, limit: int) -> bytes:
    """At most so many bytes of the body; the rest is not read."""
    raw = b""
    async for piece in response.aiter_bytes():
        raw += piece
        if len(raw) >= limit:
            break
    return raw[:limit]


def _code(raw: bytes | str, status: int) -> str:
    """The code of an OpenAI error body."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        error = json.loads(raw)["error"]
        if code := error.get("code") or error.get("type"):
            return clean_code(code)
    return f"http_{status}"


class NativeTarget:
    """All streams on one WebSocket."""

    def __init__(self, server: Server, model: str | None) -> None:
        self._server = server
        self._model = model
        self._client = StreamClient(server.stream_url, token=server.key)

    async def __aenter__(self) -> "NativeTarget":
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._client.__aenter__()
        except (OSError, WebSocketException, TimeoutError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise BenchError(f"{self._server.stream_url} takes no stream: {reason}; see --api") from None
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.__aexit__()

    async def ask(self, index: int, body: dict[str, object]) -> Outcome:
        named = body if self._model is None else {**body, "model": self._model}
        history = await self._client.create(f"r{index}", "completion", named)
        try:
            async with asyncio.timeout(self._server.limit_s):
                await history.ended.wait()
        except TimeoutError:
            await self._client.cancel(history.id)
            error: str | None = "timeout"
        else:
            error = _fault_of(history)
        ended_s = history.frames[-1][0] if history.terminals else time.monotonic()
        if error != "timeout":  # what still comes then belongs to nobody else
            self._client.forget(history)
        deltas = [(at_s, frame) for at_s, frame in history.of_type("delta") if frame["n"]]
        times, counts = [at_s for at_s, _ in deltas], [int(frame["n"]) for _, frame in deltas]
        usage = history.terminals[0].get("usage", {}) if history.terminals else {}
        return Outcome(
            index=index,
            sent_s=history.sent_s,
            ended_s=ended_s,
            first_s=times[0] if times else None,
            error=error,
            prompt_tokens=int(usage.get("prompt_tokens", 0)),
            cached_tokens=cached_of(usage),
            output_tokens=int(usage.get("completion_tokens", sum(counts))),
            gaps_ms=gaps_of(times, counts),
        )


def _fault_of(history: History) -> str | None:
    if history.is_lost:
        return "connection_lost"
    if history.terminals[0]["type"] == "error":
        return clean_code(history.terminals[0]["error"]["code"])
    return "broken_stream" if history.faults() else None


@dataclass(slots=True)
class _Answer:
    """Of one streamed HTTP answer, while it comes."""

    times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int | None = None
    finish: object = None
    error: str | None = None

    def take(self, data: str) -> None:
        """One event of the stream, with the time of now."""
        try:
            event = json.loads(data)
            choices = event.get("choices") or [{}]
            if event.get("error"):
                self.error = _code(data, 200).replace("http_200", "unnamed")
            if choices[0].get("text"):
                self.times.append(time.monotonic())
            self.finish = choices[0].get("finish_reason") or self.finish
            if usage := event.get("usage"):
                self.prompt_tokens, self.cached_tokens = int(usage["prompt_tokens"]), cached_of(usage)
                self.output_tokens = int(usage["completion_tokens"])
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            self.error = "not_openai"


class OpenAITarget:
    """``POST /v1/completions`` with server-sent events, a connection for each stream.

    Such servers do not say how many tokens a piece of text has: gaps are those between pieces, each counted once.
    """

    def __init__(self, server: Server, model: str, streams: int) -> None:
        self._server = server
        self._fields = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        self._client = server.client(streams)

    async def __aenter__(self) -> "OpenAITarget":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def ask(self, index: int, body: dict[str, object]) -> Outcome:
        answer = _Answer()
        sent_s = time.monotonic()
        try:
            async with asyncio.timeout(self._server.limit_s):
                await self._stream(self._fields | body, answer)
        except (TimeoutError, httpx.TimeoutException):
            answer.error = "timeout"
        except httpx.HTTPError:
            answer.error = answer.error or "connection_lost"
        ended_s = time.monotonic()
        if answer.error is None and answer.finish is None:
            answer.error = "no_end"
        return Outcome(
            index=index,
            sent_s=sent_s,
            ended_s=ended_s,
            first_s=answer.times[0] if answer.times else None,
            error=answer.error,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            output_tokens=len(answer.times) if answer.output_tokens is None else answer.output_tokens,
            gaps_ms=gaps_of(answer.times, [1] * len(answer.times)),
        )

    async def _stream(self, body: dict[str, object], answer: _Answer) -> None:
        async with self._client.stream("POST", self._server.base + "/v1/completions", json=body) as response:
            if response.status_code != 200:
                answer.error = _code(await _bounded(response, MAX_ERROR_BYTES), response.status_code)
                return
            async for data in _events(response):
                answer.take(data)


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of server-sent events, each on one line, up to [DONE]; what follows is read, so that the connection can
    be used again."""
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield data
