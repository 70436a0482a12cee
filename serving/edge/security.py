"""Who may talk to the server: one ASGI layer around every route, for HTTP and WebSocket alike.

In this order: Host (DNS rebinding), Origin (any web page may open a WebSocket to localhost; the same-origin rule does
not cover it), CORS, API key. A refused WebSocket gets a real HTTP status before the upgrade. Keys come in the
Authorization header or, for browsers, as a second subprotocol; never in the query, which ends in logs.
"""

import base64
import binascii
import ipaddress
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.serving.core.errors import ConfigError
from headrace.serving.edge.errors import ApiError, ErrorCode
from headrace.serving.edge.keys import ANONYMOUS, Identity, KeyRing
from headrace.serving.edge.messages import BEARER_PREFIX

OPEN_PATHS = frozenset({"/", "/livez", "/readyz", "/health"})
"""Read without a key: health checks, and the page, which asks for the key itself. /metrics is not among them:
scrapers can send a bearer token, and a proxy would make every peer look local."""
HELLO_PATHS = frozenset({"/v1/stream"})
"""WebSockets that may open without a key, because a hello brings it."""

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
CORS_MAX_AGE_S = 600

_HEADER_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?: *, *[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
_EXPOSED = b"retry-after, retry-after-ms, x-headrace-contract, x-request-id"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityPolicy:
    """bind_host: what the server listens on. allow_hosts: further names for the Host header, "*" for all.
    allow_origins: origins of other sites (``https://chat.example``), "*" for all; they drive the WebSocket check and
    CORS alike. keys: None lets everybody in.

    Raises ConfigError for an origin or host that cannot be one.
    """

    bind_host: str = "127.0.0.1"
    allow_hosts: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    keys: KeyRing | None = None

    def __post_init__(self) -> None:
        for origin in self.allow_origins:
            if origin not in ("*", "null") and _origin(origin) is None:
                raise ConfigError(
                    f"--allow-origin {origin!r} is not an origin; write scheme://host or scheme://host:port"
                )
        for host in self.allow_hosts:
            if host != "*" and (_host(host) is None or ":" in host.strip("[]") and not host.startswith("[")):
                raise ConfigError(f"--allow-host {host!r} is not a host name; write it without scheme and port")


class FailureLimit:
    """Limits answers to wrong keys per peer: burst at once, then one per refill_s. A right key always passes, for
    behind a proxy all clients are one peer; guessing a 256-bit key is hopeless anyway. What is limited is log and work.
    """

    def __init__(self, *, burst: int = 10, refill_s: float = 3.0, max_peers: int = 4096) -> None:
        self._burst = burst
        self._refill_s = refill_s
        self._max_peers = max_peers
        self._peers: OrderedDict[str, tuple[float, float]] = OrderedDict()  # failures, at time

    def fail(self, peer: str, now_s: float) -> bool:
        """Count a failure; whether the peer is over its limit."""
        failures, at_s = self._peers.pop(peer, (0.0, now_s))
        failures = max(0.0, failures - (now_s - at_s) / self._refill_s)
        is_over = failures >= self._burst
        self._peers[peer] = (failures if is_over else failures + 1, now_s)
        if len(self._peers) > self._max_peers:
            self._peers.popitem(last=False)
        return is_over


@dataclass(slots=True)
class _Headers:
    """The few headers that decide, each with all its values."""

    values: dict[bytes, list[bytes]] = field(default_factory=dict)

    @staticmethod
    def of(scope: Scope) -> "_Headers":
        wanted = (b"host", b"origin", b"authorization", b"sec-websocket-protocol")
        found: dict[bytes, list[bytes]] = {name: [] for name in wanted}
        for name, value in scope["headers"]:
            if name in found:
                found[name].append(value)
        return _Headers(found)

    def one(self, name: bytes) -> str | None:
        """The only value; None when absent. Raises ApiError when repeated."""
        values = self.values[name]
        if len(values) > 1:
            raise ApiError(ErrorCode.FORBIDDEN, f"The {name.decode()} header must not be repeated.")
        return values[0].decode("latin-1").strip() if values else None


def identity_of(scope: Scope) -> Identity | None:
    """Who the request is from, after the layer; None on a WebSocket that still has to say hello."""
    identity: Identity | None = scope["state"]["identity"]
    return identity


class Doorkeeper:
    """The checks of one policy, for the layer and for keys that come in a hello."""

    def __init__(self, policy: SecurityPolicy, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys = policy.keys
        self._clock = clock
        self._failures = FailureLimit()
        self._hosts = {host.lower().strip("[]") for host in (*LOOPBACK_NAMES, policy.bind_host, *policy.allow_hosts)}
        self._origins = {_origin(origin) or origin for origin in policy.allow_origins}
        self._takes_any_address = policy.bind_host not in LOOPBACK_NAMES

    def identify(self, key: str | bytes, peer: str) -> Identity | None:
        """Whose key it is; None for a wrong one, which is counted against the peer."""
        return self._judge(key, peer)[0]

    def is_current(self, identity: Identity) -> bool:
        """Whether the identity's key is still accepted."""
        return self._keys is None or self._keys.is_current(identity)

    def check_host(self, headers: _Headers) -> str:
        """The Host header, when it names this server. Raises ApiError."""
        text = headers.one(b"host")
        host = _host(text) if text else None
        if text is None or host is None:
            raise ApiError(ErrorCode.FORBIDDEN, "The request has no valid Host header.")
        if "*" not in self._hosts and host not in self._hosts and not (self._takes_any_address and _is_address(host)):
            raise ApiError(
                ErrorCode.FORBIDDEN,
                "The Host header does not name this server, as after DNS rebinding; start it with --allow-host NAME "
                "if clients reach it under another name.",
            )
        return text

    def check_origin(self, headers: _Headers, host: str) -> str | None:
        """The Origin of another site that is allowed; None for no Origin (not a browser) and for our own."""
        text = headers.one(b"origin")
        if text is None:
            return None
        origin = _origin(text)
        if origin is not None and _origin(f"{origin.split('://')[0]}://{host}") == origin:
            return None
        if "*" in self._origins or (origin or text) in self._origins:
            return text
        raise ApiError(
            ErrorCode.FORBIDDEN,
            "Pages of this Origin may not use this server; start it with --allow-origin ORIGIN to let them.",
        )

    def cors(self, origin: str) -> dict[bytes, bytes]:
        """Response headers for an allowed Origin."""
        if "*" in self._origins:
            return {b"access-control-allow-origin": b"*", b"access-control-expose-headers": _EXPOSED}
        return {
            b"access-control-allow-origin": origin.encode("latin-1"),
            b"access-control-expose-headers": _EXPOSED,
            b"vary": b"Origin",
        }

    def authenticate(self, scope: Scope, headers: _Headers) -> Identity | None:
        """Who it is; None for a WebSocket that will say hello. Raises ApiError."""
        if self._keys is None:
            return ANONYMOUS
        key = _key(headers)
        if key is None:
            is_read = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
            if is_read and scope["path"] in OPEN_PATHS:
                return ANONYMOUS
            if scope["type"] == "websocket" and scope["path"] in HELLO_PATHS:
                return None
            raise ApiError(ErrorCode.INVALID_API_KEY, "An API key is required; send Authorization: Bearer KEY.")
        identity, is_over_limit = self._judge(key, peer_of(scope))
        if identity is not None:
            return identity
        if is_over_limit:
            raise ApiError(ErrorCode.RATE_LIMITED, "Too many wrong API keys from this address.", retry_after_ms=3000)
        raise ApiError(ErrorCode.INVALID_API_KEY, "The API key is wrong.")

    def _judge(self, key: str | bytes, peer: str) -> tuple[Identity | None, bool]:
        """The identity, or None and whether the peer has failed too often."""
        if self._keys is None:
            return ANONYMOUS, False
        identity = self._keys.identify(key)
        return identity, identity is None and self._failures.fail(peer, self._clock())


class SecurityLayer:
    """Wraps an application. Adds ``identity`` and ``tenant`` to scope["state"]."""

    def __init__(self, app: ASGIApp, doorkeeper: Doorkeeper) -> None:
        self._app = app
        self._doorkeeper = doorkeeper

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        door = self._doorkeeper
        cors: dict[bytes, bytes] = {}
        try:
            headers = _Headers.of(scope)
            origin = door.check_origin(headers, door.check_host(headers))
            if origin is not None:
                cors = door.cors(origin)
                if _is_preflight(scope):
                    await _preflight(scope, send, cors)
                    return
            identity = door.authenticate(scope, headers)
        except ApiError as error:
            await refuse(scope, send, error, cors)
            return
        scope.setdefault("state", {})
        scope["state"]["identity"] = identity
        scope["state"]["tenant"] = identity.tenant if identity is not None else ""
        await self._app(scope, receive, _with_headers(send, cors) if cors and scope["type"] == "http" else send)


def peer_of(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else ""


async def refuse(scope: Scope, send: Send, error: ApiError, extra: Mapping[bytes, bytes] | None = None) -> None:
    """Answer with the error: over HTTP, or in place of a WebSocket upgrade."""
    headers = {
        b"content-type": b"application/json",
        b"connection": b"close",
        **{name.encode(): value.encode() for name, value in error.headers().items()},
        **(extra or {}),
    }
    if error.status == 401:
        headers[b"www-authenticate"] = b"Bearer"
    await _respond(scope, send, error.status, headers, orjson.dumps(error.body()))


async def _respond(scope: Scope, send: Send, status: int, headers: Mapping[bytes, bytes], body: bytes) -> None:
    prefix = ""
    if scope["type"] == "websocket":
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": 1008})
            return
        prefix = "websocket."
    listed = [*headers.items(), (b"content-length", str(len(body)).encode())]
    await send({"type": f"{prefix}http.response.start", "status": status, "headers": listed})
    await send({"type": f"{prefix}http.response.body", "body": body})


def _is_preflight(scope: Scope) -> bool:
    return (
        scope["type"] == "http"
        and scope["method"] == "OPTIONS"
        and any(name == b"access-control-request-method" for name, _ in scope["headers"])
    )


async def _preflight(scope: Scope, send: Send, cors: Mapping[bytes, bytes]) -> None:
    headers = {
        **cors,
        b"access-control-allow-methods": b"GET, POST, OPTIONS",
        b"access-control-max-age": str(CORS_MAX_AGE_S).encode(),
    }
    for name, value in scope["headers"]:
        if name == b"access-control-request-headers" and _HEADER_NAMES.fullmatch(value):
            headers[b"access-control-allow-headers"] = value
        if name == b"access-control-request-private-network" and value == b"true":
            headers[b"access-control-allow-private-network"] = b"true"
    await _respond(scope, send, 204, headers, b"")


def _with_headers(send: Send, extra: Mapping[bytes, bytes]) -> Send:
    async def send_with(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *extra.items()]}
        await send(message)

    return send_with


def _key(headers: _Headers) -> bytes | None:
    """The key that the request carries; None when it carries none. Raises ApiError when it cannot be read."""
    authorization = headers.one(b"authorization")
    if authorization is not None:
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiError(ErrorCode.INVALID_API_KEY, "The Authorization header must be 'Bearer KEY'.")
        return key.strip().encode("latin-1")
    for value in headers.values[b"sec-websocket-protocol"]:
        for offered in value.decode("latin-1").split(","):
            if offered.strip().startswith(BEARER_PREFIX):
                return _unbase64(offered.strip().removeprefix(BEARER_PREFIX))
    return None


def _unbase64(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise ApiError(ErrorCode.INVALID_API_KEY, f"{BEARER_PREFIX}… must be the key in unpadded base64url.") from None


_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}


def _origin(text: str) -> str | None:
    """scheme://host:port in lower case with its port; None for what is not an origin ("null" among it)."""
    try:
        parts = urlsplit(text.lower())
        port = parts.port
    except ValueError:
        return None
    if not parts.hostname or not parts.scheme or parts.username is not None or parts.path or parts.query:
        return None
    if parts.fragment or "?" in text or "#" in text:
        return None
    scheme = {"ws": "http", "wss": "https"}.get(parts.scheme, parts.scheme)
    return f"{scheme}://{parts.hostname}:{port if port is not None else _PORTS.get(scheme, 0)}"


def _host(text: str) -> str | None:
    """The name in a Host header in lower case, without port and brackets."""
    if any(character in text for character in "/?#@\\, \t"):
        return None
    try:
        parts = urlsplit(f"//{text.lower()}")
        _ = parts.port
    except ValueError:
        return None
    return parts.hostname.rstrip(".") if parts.hostname else None


def _is_address(host: str) -> bool:
    """DNS rebinding needs a name; an address cannot be rebound."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
