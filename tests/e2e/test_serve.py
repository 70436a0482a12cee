"""``headrace serve`` as a process: what it holds, how it starts, and how it ends. Most tests use the fake runner."""

import json
import re
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from websockets import ConnectionClosed, Subprotocol
from websockets.sync.client import ClientConnection, connect

from headrace.serving.app.build import FakeOptions
from headrace.serving.edge.keys import digest_line, new_key
from headrace.serving.edge.server import ExitCode
from tests.live import LiveServer, child_of, start_command

VOCAB_SIZE = 49152
WAIT_S = 60.0

SERVE = """
import json, sys
from pathlib import Path
from rich.console import Console
from headrace.serving.app.build import EngineOptions, FakeOptions
from headrace.serving.app.options import ServeOptions
from headrace.serving.app.serve import run_server
path, fake, serve = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
engine = EngineOptions(model=path, num_slots=8, context=2048, chunk_tokens=64, fake=FakeOptions(**fake))
serve |= {name: Path(serve[name]) for name in ("api_keys", "tls_cert", "tls_key") if name in serve}
options = ServeOptions(model_name="fake", model_path=Path(path), engine=engine, port=0, **serve)
sys.exit(run_server(options, Console(stderr=True)))
"""

SLOW_BURIAL = """
import asyncio
from headrace.serving.edge.engine_connection import EngineConnection
reap = EngineConnection.reap
async def slow_reap(self, grace_s):
    await asyncio.sleep(2)
    return await reap(self, grace_s)
EngineConnection.reap = slow_reap
"""
"""As on a machine that is busy with other things."""

StartFake = Callable[..., LiveServer]


def fake_command(path: Path, fake: FakeOptions, options: dict[str, Any], first: str = "") -> list[str]:
    """first: code that runs before the server does."""
    settings = asdict(fake)
    return [sys.executable, "-c", first + SERVE, str(path), json.dumps(settings), json.dumps(options)]


@pytest.fixture
def start_fake(tmp_path: Path, smollm2_path: Path) -> Iterator[StartFake]:
    """Starts a server with a fake runner: real processes and sockets, tokens without meaning."""
    started: list[LiveServer] = []

    def start(
        *, step_ms: float = 5.0, fault: str | None = None, num_experts: int = 0, first: str = "", **options: Any
    ) -> LiveServer:
        fake = FakeOptions(vocab_size=VOCAB_SIZE, step_ms=step_ms, fault=fault, num_experts=num_experts)
        started.append(start_command(tmp_path / "log", fake_command(smollm2_path, fake, options, first)))
        return started[-1]

    yield start
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait()


class Stream:
    """One request on a socket of its own."""

    def __init__(self, socket: ClientConnection, max_tokens: int) -> None:
        """Returns when the first token has come."""
        self.socket = socket
        body = {"prompt": "to the mill", "max_tokens": max_tokens, "ignore_eos": True}
        socket.send(json.dumps({"type": "create", "id": "r", "endpoint": "completion", "body": body}))
        self.next("delta")

    def next(self, *types: str) -> dict[str, Any]:
        while True:
            frame: dict[str, Any] = json.loads(self.socket.recv(timeout=WAIT_S))
            if frame["type"] in types:
                return frame

    def end(self) -> dict[str, Any]:
        return self.next("done", "error")


@pytest.fixture
def open_stream() -> Iterator[Callable[[LiveServer, int], Stream]]:
    with ExitStack() as stack:

        def start(server: LiveServer, max_tokens: int) -> Stream:
            connection = connect(server.stream_url, subprotocols=[Subprotocol("headrace.v1")], open_timeout=WAIT_S)
            return Stream(stack.enter_context(connection), max_tokens)

        yield start


OpenStream = Callable[[LiveServer, int], Stream]


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def gauge(exposition: str, name: str) -> float:
    [value] = re.findall(rf"^{name}{{[^}}]*}} (\S+)$", exposition, re.MULTILINE)
    return float(value)


def mapped(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_only_the_engine_process_has_jax(live_server: LiveServer) -> None:
    assert "jaxlib" in mapped(live_server.engine.pid)
    assert "jaxlib" not in mapped(live_server.process.pid)


def test_a_port_in_use_is_said_before_anything_is_loaded(live_server: LiveServer) -> None:
    port = live_server.url.rpartition(":")[2]
    command = [sys.executable, "-m", "headrace", "serve", "--port", port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 2
    assert f"port {port}" in done.stderr and "choose another with --port" in done.stderr
    assert "loading weights" not in done.stderr and "Traceback" not in done.stderr


def test_wrong_files_are_said_before_anything_is_loaded(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("")
    for options, says in (
        (("--api-keys", str(empty)), "has no keys"),
        (("--tls-cert", str(empty), "--tls-key", str(empty)), "do not work"),
        (("--allow-origin", "example.org"), "is not an origin"),
        (("--page-size", "0"), "at least 1"),
        (("--host", "0.0.0.0"), "--unsafe-bind"),
    ):
        command = [sys.executable, "-m", "headrace", "serve", "--port", "0", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
        assert (done.returncode, done.stdout) == (2, "")
        assert says in done.stderr and "Traceback" not in done.stderr
        assert "loading weights" not in done.stderr


def test_a_model_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(60))
    done = subprocess.run([sys.executable, "-m", "headrace", "serve", path], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert str(path) in done.stderr and "Traceback" not in done.stderr


def test_an_engine_that_does_not_start_ends_the_server(smollm2_path: Path) -> None:
    command = fake_command(smollm2_path, FakeOptions(vocab_size=VOCAB_SIZE, fault="fail_start"), {})
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert (done.returncode, done.stdout) == (ExitCode.START_FAILED, "")
    assert "fault fail_start" in done.stderr and "Traceback" not in done.stderr


def test_a_signal_while_it_starts(tmp_path: Path, smollm2_path: Path) -> None:
    """A slow start is a person's most likely moment for Ctrl-C."""
    command = [sys.executable, "-m", "headrace", "serve", "--port", "0", str(smollm2_path), "--no-compile-cache"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    seen = next(line for line in process.stderr if "loading weights" in line or "Error" in line)
    assert "loading weights" in seen
    engine = child_of(process.pid, "engine_process")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out) == (0, "")
    assert "Traceback" not in err, err
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE


def test_sigterm_lets_running_streams_end(start_fake: StartFake, open_stream: OpenStream) -> None:
    server = start_fake()
    stream = open_stream(server, 300)
    server.process.send_signal(signal.SIGTERM)
    assert stream.next("goaway")["reason"]
    end = stream.end()
    assert end["type"] == "done" and end["usage"]["completion_tokens"] == 300
    assert server.process.wait(WAIT_S) == ExitCode.CLEAN


def test_what_outlasts_the_drain_ends_with_a_typed_error(start_fake: StartFake, open_stream: OpenStream) -> None:
    server = start_fake(drain_s=0.2)
    streams = [open_stream(server, 1900) for _ in range(3)]
    server.process.send_signal(signal.SIGTERM)
    for stream in streams:
        end = stream.end()
        assert (end["type"], end["error"]["code"]) == ("error", "shutting_down")
    assert server.process.wait(WAIT_S) == ExitCode.WORK_LOST


def test_a_second_signal_ends_at_once(start_fake: StartFake, open_stream: OpenStream) -> None:
    server = start_fake(drain_s=600.0)
    stream = open_stream(server, 1900)
    server.process.send_signal(signal.SIGTERM)
    stream.next("goaway")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(WAIT_S) == ExitCode.WORK_LOST


def test_a_killed_engine_ends_every_stream_and_the_server(start_fake: StartFake, open_stream: OpenStream) -> None:
    server = start_fake()
    streams = [open_stream(server, 1900) for _ in range(8)]
    server.engine.kill()
    for stream in streams:
        end = stream.end()
        assert (end["type"], end["status"], end["error"]["code"]) == ("error", 503, "engine_lost")
    assert server.process.wait(WAIT_S) == ExitCode.ENGINE_DIED


def test_a_signal_just_behind_the_loss_does_not_hide_it(start_fake: StartFake, open_stream: OpenStream) -> None:
    """Nothing is left to drain, so that the signal alone would end the server before the engine is buried."""
    server = start_fake(first=SLOW_BURIAL)
    stream = open_stream(server, 1900)
    server.engine.kill()
    assert stream.end()["error"]["code"] == "engine_lost"
    stream.socket.close()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(WAIT_S) == ExitCode.ENGINE_DIED


def test_a_killed_engine_comes_back_where_asked_to(start_fake: StartFake, open_stream: OpenStream) -> None:
    server = start_fake(restart_engine=True)
    stream = open_stream(server, 1900)
    server.engine.kill()
    assert stream.end()["error"]["code"] == "engine_lost"
    assert httpx.get(server.url + "/readyz").status_code == 503
    assert httpx.get(server.url + "/livez").status_code == 200
    until(lambda: httpx.get(server.url + "/readyz").status_code == 200)
    assert open_stream(server, 20).end()["type"] == "done"
    assert server.stop() == ExitCode.CLEAN


def test_keys_are_asked_for_on_every_door(start_fake: StartFake, tmp_path: Path) -> None:
    key = new_key()
    (tmp_path / "keys").write_text(digest_line("ann", key) + "\n")
    server = start_fake(api_keys=str(tmp_path / "keys"))
    body = {"prompt": "to the mill", "max_tokens": 3}
    answer = httpx.post(server.url + "/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    answer = httpx.post(server.url + "/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200
    for path, status in (("/", 200), ("/readyz", 200), ("/metrics", 401), ("/v1/models", 401)):
        assert httpx.get(server.url + path).status_code == status
    with connect(server.stream_url, subprotocols=[Subprotocol("headrace.v1")], open_timeout=WAIT_S) as socket:
        socket.send(json.dumps({"type": "hello", "token": key}))
        assert json.loads(socket.recv(timeout=WAIT_S))["type"] == "welcome"
    with connect(server.stream_url, subprotocols=[Subprotocol("headrace.v1")], open_timeout=WAIT_S) as socket:
        socket.send(json.dumps({"type": "hello", "token": key[:-1]}))
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=WAIT_S)
        assert socket.close_code == 4401
    assert key not in server.log.read_text()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_tls(start_fake: StartFake, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key, "-out", cert]
    subprocess.run([*command, *subject], check=True, capture_output=True)
    server = start_fake(tls_cert=str(cert), tls_key=str(key))
    trust = ssl.create_default_context(cafile=cert)
    assert server.url.startswith("https://")
    assert httpx.get(server.url + "/readyz", verify=trust).status_code == 200
    with connect(server.stream_url, subprotocols=[Subprotocol("headrace.v1")], ssl=trust) as socket:
        assert json.loads(socket.recv(timeout=WAIT_S))["type"] == "welcome"


def test_sockets_and_streams_are_counted(start_fake: StartFake, open_stream: OpenStream) -> None:
    server = start_fake()
    stream = open_stream(server, 1900)
    text = httpx.get(server.url + "/metrics").text
    assert gauge(text, "headrace_ws_connections") == 1
    assert gauge(text, "headrace_ws_streams_active") == 1
    stream.socket.close(4999)
    until(lambda: gauge(httpx.get(server.url + "/metrics").text, "headrace_ws_connections") == 0)
    text = httpx.get(server.url + "/metrics").text
    assert gauge(text, "headrace_ws_streams_active") == 0
    assert re.search(r'headrace_ws_closes_total{[^}]*code="other"[^}]*} 1.0', text)


def test_nothing_is_left_behind(start_fake: StartFake) -> None:
    server = start_fake()
    engine = server.engine
    assert server.stop() == ExitCode.CLEAN
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE


def test_bench_measures_a_server_and_its_experts_are_counted(start_fake: StartFake, tmp_path: Path) -> None:
    server, file = start_fake(num_experts=4), tmp_path / "bench.json"
    work = ("--streams", "2", "--requests", "4", "--warmup", "0", "--prompt-tokens", "20", "--max-tokens", "8")
    command = [sys.executable, "-m", "headrace", "bench", server.url, *work, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert (found["figures"]["prompt_tokens"], found["figures"]["output_tokens"]) == (80, 32)
    assert found["figures"]["whole_answer"]["p50_ms"] >= 8 * 5  # steps of 5 ms
    assert found["server"]["contract"]["topology"]["device_kind"] == "fake"
    values: list[float] = []

    def all_counted() -> bool:
        """Of each request all tokens but the last are run."""
        scraped = httpx.get(server.url + "/metrics").text
        values[:] = map(float, re.findall(r"^headrace_expert_tokens_total{.*} (\S+)$", scraped, re.MULTILINE))
        return sum(values) == 4 * (20 + 7)

    until(all_counted)
    assert len(values) == 4
