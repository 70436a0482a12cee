"""A real ``headrace serve`` process for tests."""

import queue
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import psutil

READY_TIMEOUT_S = 240.0
"""A cold compile on two loaded cores; warm starts take seconds."""
DRAIN_TIMEOUT_S = 60.0

SMALL = ("--max-streams", "4", "--context", "512", "--chunk-tokens", "64")
"""Few and small programs: what most tests need of a server is that it is a real one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveServer:
    """url: without a trailing slash. log: file with the process's standard error."""

    url: str
    process: subprocess.Popen[str]
    log: Path

    @property
    def stream_url(self) -> str:
        return self.url.replace("http", "ws", 1) + "/v1/stream"

    @property
    def engine(self) -> psutil.Process:
        return child_of(self.process.pid, "engine_process")

    def stop(self) -> int:
        """Ask it to drain and return its exit code; a server that does not end is killed and fails the test."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(DRAIN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the server did not end in {DRAIN_TIMEOUT_S} s:\n{self.log.read_text()}") from None


def child_of(pid: int, module: str) -> psutil.Process:
    """The child that runs a module of serving/app."""
    [child] = [c for c in psutil.Process(pid).children() if f"headrace.serving.app.{module}" in c.cmdline()]
    return child


def start_server(log: Path, *options: str, ready_timeout_s: float = READY_TIMEOUT_S) -> LiveServer:
    """Start it on a free port and wait for the one line on its standard output; the caller stops it."""
    return start_command(log, [sys.executable, "-m", "headrace", "serve", "--port", "0", *options], ready_timeout_s)


def start_command(log: Path, command: list[str], ready_timeout_s: float = READY_TIMEOUT_S) -> LiveServer:
    """Start a process that prints its URL as the last word of a line when it is ready."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=output, text=True, start_new_session=True
        )
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_copy_lines, args=(process, lines), daemon=True).start()
    try:
        line = lines.get(timeout=ready_timeout_s)
    except queue.Empty:
        line = ""
    url = line.split()[-1] if "http" in line else ""
    if not url:
        process.kill()
        process.wait()
        raise AssertionError(f"the server did not get ready in {ready_timeout_s} s:\n{log.read_text()}")
    return LiveServer(url=url.rstrip("/"), process=process, log=log)


def _copy_lines(process: subprocess.Popen[str], lines: queue.SimpleQueue[str]) -> None:
    """Every line of standard output, and an empty one at its end."""
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            lines.put(line)
    lines.put("")
