"""O34: no page of another site, and no name that was rebound, can drive a local server; heads are bounded."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.cases import servers
from tests.cases.five_checks import FiveChecks
from tests.cases.raw import head_of_answer, port_of, status_of, upgrade
from tests.live import LiveServer


@pytest.fixture(autouse=True, scope="module")
def checks(fake_server: LiveServer) -> Iterator[FiveChecks]:
    with servers.five_checks(fake_server) as checks:
        yield checks


def get(server: LiveServer, *headers: str, path: str = "/v1/models", host: str | None = None) -> bytes:
    host = f"127.0.0.1:{port_of(server)}" if host is None else host
    return "\r\n".join([f"GET {path} HTTP/1.1", f"Host: {host}", *headers, "", ""]).encode()


@pytest.mark.parametrize(
    ("origins", "is_ours"),
    [
        ([], True),
        (["http://127.0.0.1:PORT"], True),
        (["HTTP://127.0.0.1:PORT"], True),
        (["http://localhost:PORT"], False),  # another origin than the Host that was asked for
        (["https://127.0.0.1:PORT"], True),  # a proxy may have taken TLS off
        (["http://127.0.0.1"], False),
        (["http://127.0.0.1:1"], False),
        (["https://evil.example"], False),
        (["null"], False),
        ([""], False),
        (["http://localhost.evil.example:PORT"], False),
        (["http://127.0.0.1:PORT.evil.example"], False),
        (["http://127.0.0.1:PORT@evil.example"], False),
        (["http://evil.example#http://127.0.0.1:PORT"], False),
        (["http://127.0.0.1:PORT/path"], False),
        (["file://"], False),
        (["chrome-extension://abcdef"], False),
        (["http://127.0.0.1:PORT", "https://evil.example"], False),
        (["https://evil.example", "http://127.0.0.1:PORT"], False),
        (["http://127.0.0.1:PORT https://evil.example"], False),
    ],
    ids=str,
)
async def test_origins(fake_server: LiveServer, origins: list[str], is_ours: bool) -> None:
    port = str(port_of(fake_server))
    headers = [f"Origin: {origin.replace('PORT', port)}" for origin in origins]
    for request, good in ((get(fake_server, *headers), 200), (upgrade(fake_server, *headers), 101)):
        head = await head_of_answer(fake_server, request)
        assert status_of(head) in ((good,) if is_ours else (400, 403))
        assert "access-control-allow-origin" not in head.lower()


async def test_a_page_that_the_server_itself_gave_by_its_other_name(fake_server: LiveServer) -> None:
    host = f"localhost:{port_of(fake_server)}"
    head = await head_of_answer(fake_server, upgrade(fake_server, f"Host: {host}", f"Origin: http://{host}"))
    assert status_of(head) == 101


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("127.0.0.1:PORT", True),
        ("localhost:PORT", True),
        ("LOCALHOST:PORT", True),
        ("localhost", True),
        ("[::1]:PORT", True),
        ("localhost.:PORT", True),
        ("evil.example", False),
        ("evil.example:PORT", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example:PORT", False),
        ("localhost@evil.example", False),
        ("192.168.0.1:PORT", False),
        ("", False),
        ("localhost:PORT:1", False),
        ("localhost, evil.example", False),
    ],
    ids=str,
)
async def test_hosts(fake_server: LiveServer, host: str, is_ours: bool) -> None:
    host = host.replace("PORT", str(port_of(fake_server)))
    for request, good in (
        (get(fake_server, host=host), 200),
        (upgrade(fake_server, f"Host: {host}"), 101),
        (get(fake_server, path="/", host=host), 200),
    ):
        assert status_of(await head_of_answer(fake_server, request)) in ((good,) if is_ours else (400, 403))


@pytest.mark.parametrize(
    ("request_of", "status"),
    [
        (lambda s: upgrade(s, protocol=None), 400),
        (lambda s: upgrade(s, protocol="chat"), 400),
        (lambda s: upgrade(s, protocol="headrace.v2"), 400),
        (lambda s: upgrade(s, protocol="chat, headrace.v1"), 101),
        (lambda s: upgrade(s, path="/v1/stream/"), 404),
        (lambda s: upgrade(s, path="/v1/completions"), 404),
        (lambda s: upgrade(s, path="/"), 404),
        (lambda s: get(s, path="/v1/stream"), 404),
        (lambda s: upgrade(s, "Sec-WebSocket-Version: 12"), 426),
        (lambda s: upgrade(s, "Sec-WebSocket-Key: short"), 400),
        (lambda s: upgrade(s, "X: " + "x" * 65_536), 431),
        (lambda s: get(s, "X: " + "x" * 65_536), 431),
        (lambda s: get(s, *["X: y"] * 100), 431),
        (lambda s: get(s, path="/" + "x" * 65_536), 431),
        (lambda s: get(s, "Host: evil.example"), 403),
        (lambda s: b"OPTIONS /v1/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: https://evil.example\r\n"
         b"Access-Control-Request-Method: POST\r\n\r\n", 403),
    ],
)  # fmt: skip
async def test_what_is_refused_and_how(fake_server: LiveServer, request_of: object, status: int) -> None:
    head = await head_of_answer(fake_server, request_of(fake_server))  # type: ignore[operator]
    assert status_of(head) in ((status,) if status != 404 else (400, 403, 404)), head


def test_listening_beyond_this_machine_needs_keys_or_a_word() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        command = [sys.executable, "-m", "headrace", "serve", "--port", "0", "--host", host]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (2, "")
        assert "--api-keys" in done.stderr and "--unsafe-bind" in done.stderr
