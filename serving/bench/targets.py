"""Servers as a bench sees them, whichever door it takes: what a target answers, a server's contract and models."""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx

from headrace.serving.bench.outcome import Outcome, clean_code
from headrace.serving.core.errors import ConfigError

CONNECT_S = 10.0
MAX_ERROR_BYTES = 64 << 10
"""Of the body of a refusal."""
MAX_DOCUMENT_BYTES = 4 << 20
"""Of a contract or a list of models."""
SCHEMES = {"http": "http", "https": "https", "ws": "http", "wss": "https"}


class BenchError(RuntimeError):
    """The server cannot be reached, or is none that can be asked; the text names the URL and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Of one request, beside its body. planned_s, cancel_s: seconds of the monotonic clock; None: whenever it is sent,
    never. tenant: whose key is used. priority and deadline_ms are the server's to honour."""

    planned_s: float | None = None
    cancel_s: float | None = None
    tenant: str | None = None
    priority: int | str | None = None
    deadline_ms: int | None = None

    @property
    def envelope(self) -> dict[str, object]:
        """What a server's WebSocket is told of them, beside the body."""
        told = {"priority": self.priority, "deadline_ms": self.deadline_ms}
        return {name: value for name, value in told.items() if value is not None}

    @property
    def headers(self) -> dict[str, str]:
        """What our server is told over HTTP."""
        found = {} if self.deadline_ms is None else {"x-headrace-deadline-ms": str(self.deadline_ms)}
        return found | ({"x-headrace-priority": self.priority} if isinstance(self.priority, str) else {})

    @property
    def body_fields(self) -> dict[str, object]:
        """A priority that is a number is a body field, as other servers have it."""
        return {"priority": self.priority} if isinstance(self.priority, int) else {}


AS_SOON_AS_ASKED = Terms()


class Target(Protocol):
    """Where requests go. Use as an asynchronous context."""

    async def ask(self, index: int, body: dict[str, object], terms: Terms = AS_SOON_AS_ASKED) -> Outcome:
        """One request to its end. Whatever goes wrong is in the outcome."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """base: scheme, host, port and path without a slash at its end. key: of the API, None = none. keys: of tenants by
    name, for requests that name one; another's has key. limit_s: of one request."""

    base: str
    key: str | None = field(default=None, repr=False)
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    limit_s: float = 600.0

    @property
    def stream_url(self) -> str:
        return "ws" + self.base.removeprefix("http") + "/v1/stream"

    def key_of(self, tenant: str | None) -> str | None:
        return self.key if tenant is None else self.keys.get(tenant, self.key)

    def client(self, connections: int) -> httpx.AsyncClient:
        key = self.key or next(iter(self.keys.values()), None)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
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
            raw = await bounded(response, MAX_DOCUMENT_BYTES)
    except httpx.HTTPError as error:
        raise BenchError(f"{url} cannot be reached: {str(error) or type(error).__name__}") from None
    if may_miss and response.status_code in (404, 405):
        return None
    if response.status_code != 200:
        raise BenchError(f"{url} answers {response.status_code} ({code_of(raw, response.status_code)})")
    try:
        found = json.loads(raw)
    except ValueError:
        found = None
    if isinstance(found, dict):
        return found
    if may_miss:
        return None
    raise BenchError(f"{url} answers no JSON object")


async def bounded(response: httpx.Response, limit: int) -> bytes:
    """At most so many bytes of the body; the rest is not read."""
    raw = b""
    async for piece in response.aiter_bytes():
        raw += piece
        if len(raw) >= limit:
            break
    return raw[:limit]


def code_of(raw: bytes | str, status: int) -> str:
    """The code of an OpenAI error body."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        error = json.loads(raw)["error"]
        if code := error.get("code") or error.get("type"):
            return clean_code(code)
    return f"http_{status}"


def type_of(raw: bytes | str) -> object:
    """Of an OpenAI error body; None where it has none."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        return json.loads(raw)["error"].get("type")
    return None


def retry_hint_of(raw: bytes | str) -> int | None:
    """``retry_after_ms`` in an error body, for errors in the middle of a stream, which have no headers."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return max(0, int(json.loads(raw)["error"]["retry_after_ms"]))
    return None
