"""Host, Origin, CORS and keys, for HTTP and WebSocket alike (O30, O34)."""

import base64
import logging
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from headrace.serving.core.errors import ConfigError
from headrace.serving.edge.access_log import AccessLog
from headrace.serving.edge.keys import ANONYMOUS, KeyRing, digest_line, new_key
from headrace.serving.edge.security import Doorkeeper, FailureLimit, SecurityLayer, SecurityPolicy, identity_of

KEY = new_key()
HOST = "localhost:8000"
Headers = list[tuple[str, str]]


class Inner:
    """The application behind the layer."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"x-app", b"1")]})
            await send({"type": "http.response.body", "body": b"ok"})
        elif scope["type"] == "websocket":
            await send({"type": "websocket.accept"})


class Answer:
    def __init__(self, messages: list[Message]) -> None:
        start = messages[0]
        self.is_accepted = start["type"] == "websocket.accept"
        self.status = 101 if self.is_accepted else start.get("status", 0)
        self.headers = {name.decode(): value.decode() for name, value in start.get("headers", ())}
        self.body = b"".join(message.get("body", b"") for message in messages[1:])


class Door:
    """A layer, and requests through it."""

    def __init__(self, **policy: Any) -> None:
        self.inner = Inner()
        self.app = SecurityLayer(self.inner, Doorkeeper(SecurityPolicy(**policy)))

    async def __call__(
        self,
        headers: Headers,
        *,
        kind: str = "websocket",
        path: str = "/v1/stream",
        method: str = "GET",
        query: str = "",
    ) -> Answer:
        scope: Scope = {
            "type": kind,
            "path": path,
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in headers],
            "client": ("10.0.0.1", 1234),
            "extensions": {"websocket.http.response": {}},
        }
        if kind == "http":
            scope["method"] = method
        sent: list[Message] = []

        async def receive() -> Message:
            raise AssertionError("the layer reads nothing")

        async def send(message: Message) -> None:
            sent.append(message)

        await AccessLog(self.app)(scope, receive, send)
        return Answer(sent)


def ring(tmp_path: Path) -> KeyRing:
    path = tmp_path / "keys"
    path.write_text(digest_line("alice", KEY))
    path.chmod(0o600)
    return KeyRing(path)


BOTH = pytest.mark.parametrize("kind", ["http", "websocket"])

# Origin

OWN, LISTED = "http://localhost:8000", "https://chat.example"


@BOTH
@pytest.mark.parametrize(
    ("origin", "default", "listed", "anyone"),
    [
        (None, True, True, True),
        (OWN, True, True, True),
        ("HTTP://LocalHost:8000", True, True, True),
        ("https://localhost:8000", True, True, True),
        ("https://evil.example", False, False, True),
        ("null", False, False, True),
        ("http://localhost", False, False, True),
        ("http://localhost:9000", False, False, True),
        ("http://localhost.evil.example:8000", False, False, True),
        ("http://localhost:8000.evil.example", False, False, True),
        ("http://localhost:8000@evil.example", False, False, True),
        ("http://localhost:8000/", False, False, True),
        ("http://127.0.0.1:8000", False, False, True),
        ("", False, False, True),
        (LISTED, False, True, True),
        ("https://CHAT.example:443", False, True, True),
        ("http://chat.example", False, False, True),
        ("https://chat.example:444", False, False, True),
        ("https://chat.example.evil", False, False, True),
        ("https://xchat.example", False, False, True),
    ],
)
async def test_origin(kind: str, origin: str | None, default: bool, listed: bool, anyone: bool) -> None:
    headers = [("Host", HOST)] + ([] if origin is None else [("Origin", origin)])
    for allowed, policy in ((default, ()), (listed, (LISTED,)), (anyone, ("*",))):
        door = Door(allow_origins=policy)
        answer = await door(headers, kind=kind)
        assert len(door.inner.scopes) == allowed
        assert answer.status == (403 if not allowed else 101 if kind == "websocket" else 200)
        if not allowed:
            assert b"--allow-origin" in answer.body and b"evil" not in answer.body


@BOTH
async def test_two_origins_are_refused(kind: str) -> None:
    answer = await Door()([("Host", HOST), ("Origin", OWN), ("Origin", OWN)], kind=kind)
    assert answer.status == 403


@pytest.mark.parametrize("origin", ["chat.example", "https://", "https://a/b", "https://a?b", "ftp", "https://a:x"])
def test_what_is_not_an_origin_is_a_configuration_error(origin: str) -> None:
    with pytest.raises(ConfigError, match="--allow-origin"):
        SecurityPolicy(allow_origins=(origin,))


# CORS


async def test_cors_for_a_listed_origin_and_nobody_else() -> None:
    door = Door(allow_origins=(LISTED,))
    answer = await door([("Host", HOST), ("Origin", LISTED)], kind="http")
    assert answer.headers["access-control-allow-origin"] == LISTED and answer.headers["vary"] == "Origin"
    assert answer.headers["x-app"] == "1"
    own = await door([("Host", HOST), ("Origin", OWN)], kind="http")
    assert "access-control-allow-origin" not in own.headers


async def test_cors_is_on_refusals_too(tmp_path: Path) -> None:
    door = Door(allow_origins=(LISTED,), keys=ring(tmp_path))
    answer = await door([("Host", HOST), ("Origin", LISTED)], kind="http", path="/v1/models")
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (401, LISTED)


async def test_preflight_needs_no_key_and_reaches_no_route(tmp_path: Path) -> None:
    door = Door(allow_origins=(LISTED,), keys=ring(tmp_path))
    asks: Headers = [
        ("Host", HOST), ("Access-Control-Request-Method", "POST"),
        ("Access-Control-Request-Headers", "authorization,x-stainless-os"),
    ]  # fmt: skip
    answer = await door([*asks, ("Origin", LISTED)], kind="http", method="OPTIONS", path="/v1/chat/completions")
    assert answer.status == 204 and not door.inner.scopes
    assert answer.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
    foreign = await door([*asks, ("Origin", "https://evil.example")], kind="http", method="OPTIONS")
    assert foreign.status == 403 and "access-control-allow-origin" not in foreign.headers


# Host


@BOTH
@pytest.mark.parametrize(
    ("host", "on_loopback", "on_all", "with_name"),
    [
        ("localhost", True, True, True),
        ("LOCALHOST:8000", True, True, True),
        ("localhost.:8000", True, True, True),
        ("127.0.0.1:8000", True, True, True),
        ("[::1]:8000", True, True, True),
        ("10.1.2.3:8000", False, True, False),
        ("[fe80::1]", False, True, False),
        ("evil.example", False, False, False),
        ("localhost.evil.example", False, False, False),
        ("evil.example#localhost", False, False, False),
        ("localhost@evil.example", False, False, False),
        ("llm.example:8000", False, False, True),
        ("", False, False, False),
        ("localhost:port", False, False, False),
        (None, False, False, False),
    ],
)
async def test_host(kind: str, host: str | None, on_loopback: bool, on_all: bool, with_name: bool) -> None:
    headers: Headers = [] if host is None else [("Host", host)]
    for allowed, policy in (
        (on_loopback, {}),
        (on_all, {"bind_host": "0.0.0.0"}),
        (with_name, {"allow_hosts": ("LLM.example",)}),
    ):
        answer = await Door(**policy)(headers, kind=kind)
        assert (answer.status != 403) == allowed
        assert b"evil" not in answer.body


async def test_host_star_lets_every_name_in_and_two_hosts_are_refused() -> None:
    door = Door(allow_hosts=("*",))
    assert (await door([("Host", "any.example")])).is_accepted
    assert (await door([("Host", HOST), ("Host", HOST)])).status == 403


@pytest.mark.parametrize("host", ["http://a", "a:80", "a/b", ""])
def test_what_is_not_a_host_is_a_configuration_error(host: str) -> None:
    with pytest.raises(ConfigError, match="--allow-host"):
        SecurityPolicy(allow_hosts=(host,))


# Keys


def bearer(key: str) -> Headers:
    return [("Host", HOST), ("Authorization", f"Bearer {key}")]


def as_subprotocol(key: str) -> Headers:
    encoded = base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")
    return [("Host", HOST), ("Sec-WebSocket-Protocol", f"headrace.v1, bearer.{encoded}")]


@BOTH
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (bearer(KEY), 0),
        ([("Host", HOST), ("Authorization", f"bearer  {KEY} ")], 0),
        (as_subprotocol(KEY), 0),
        (bearer("x" + KEY[1:]), 401),
        (bearer(KEY[:-1] + "~"), 401),
        (bearer(KEY + "é"), 401),
        (bearer("x" * 10_000), 401),
        (as_subprotocol("wrong"), 401),
        ([("Host", HOST), ("Authorization", "")], 401),
        ([("Host", HOST), ("Authorization", "Bearer ")], 401),
        ([("Host", HOST), ("Authorization", f"Basic {KEY}")], 401),
        ([("Host", HOST), ("Authorization", KEY)], 401),
        ([("Host", HOST), ("Sec-WebSocket-Protocol", "bearer.%%%")], 401),
        ([("Host", HOST), ("Sec-WebSocket-Protocol", "bearer.")], 401),
        ([*bearer(KEY), ("Authorization", f"Bearer {KEY}")], 403),
        ([*bearer("wrong"), *as_subprotocol(KEY)[1:]], 401),
    ],
)
async def test_keys(tmp_path: Path, kind: str, headers: Headers, status: int) -> None:
    door = Door(keys=ring(tmp_path))
    answer = await door(headers, kind=kind)
    if status:
        assert answer.status == status and not door.inner.scopes
        assert KEY.encode() not in answer.body
        assert status == 403 or answer.headers["www-authenticate"] == "Bearer"
    else:
        identity = identity_of(door.inner.scopes[0])
        assert identity is not None and identity.tenant == "alice"
        assert door.inner.scopes[0]["state"]["tenant"] == "alice"


@pytest.mark.parametrize(
    ("kind", "method", "path", "status"),
    [
        ("http", "GET", "/", 200),
        ("http", "GET", "/livez", 200),
        ("http", "HEAD", "/readyz", 200),
        ("http", "GET", "/health", 200),
        ("http", "POST", "/health", 401),
        ("http", "GET", "/metrics", 401),
        ("http", "GET", "/v1/models", 401),
        ("http", "POST", "/v1/chat/completions", 401),
        ("http", "GET", "/v1/stream", 401),
        ("http", "GET", "//", 401),
        ("http", "GET", "/livez/", 401),
        ("websocket", "GET", "/v1/stream", 101),
        ("websocket", "GET", "/", 401),
        ("websocket", "GET", "/v1/responses", 401),
    ],
)
async def test_what_is_open_without_a_key(tmp_path: Path, kind: str, method: str, path: str, status: int) -> None:
    door = Door(keys=ring(tmp_path))
    answer = await door([("Host", HOST)], kind=kind, method=method, path=path)
    assert answer.status == status
    if kind == "websocket" and status == 101:
        assert identity_of(door.inner.scopes[0]) is None, "it still has to say hello"


@BOTH
async def test_a_key_in_the_query_is_no_key_and_is_not_logged(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    door = Door(keys=ring(tmp_path))
    answer = await door([("Host", HOST)], kind=kind, path="/v1/models\n2026 forged", query=f"api_key={KEY}&token={KEY}")
    assert answer.status == 401
    await door(bearer(KEY), kind=kind)
    assert "/v1/models%0A2026%20forged 401" in caplog.text
    assert KEY not in caplog.text and "api_key" not in caplog.text


@BOTH
async def test_without_keys_everybody_is_anonymous(kind: str) -> None:
    door = Door()
    await door([("Host", HOST)], kind=kind)
    await door(bearer("whatever"), kind=kind)
    assert [identity_of(scope) for scope in door.inner.scopes] == [ANONYMOUS] * 2


async def test_repeated_failures_are_limited_and_a_right_key_still_passes(tmp_path: Path) -> None:
    door = Door(keys=ring(tmp_path))
    statuses = [(await door(bearer(f"guess {i}"))).status for i in range(14)]
    assert statuses[:10] == [401] * 10 and 429 in statuses[10:]
    limited = await door(bearer("again"))
    assert limited.status == 429 and limited.headers["retry-after"] == "3"
    assert (await door(bearer(KEY))).is_accepted


def test_failures_are_forgiven_with_time_and_peers_are_bounded() -> None:
    limit = FailureLimit(burst=2, refill_s=1.0, max_peers=10)
    assert [limit.fail("a", 0.0) for _ in range(3)] == [False, False, True]
    assert not limit.fail("b", 0.0)
    assert not limit.fail("a", 1.5)
    for peer in range(1000):
        limit.fail(str(peer), 2.0)
    assert len(limit._peers) == 10


async def test_other_scopes_pass() -> None:
    door = Door()
    await door.app({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert door.inner.scopes[0]["type"] == "lifespan"
