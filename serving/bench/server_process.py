"""Servers of a comparison on this machine: started, waited for, stopped while others are measured, ended."""

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import httpx

from headrace.serving.bench.compare_plan import ComparedServer
from headrace.serving.bench.process_tree import ProcessTree, has_proc
from headrace.serving.bench.targets import BenchError
from headrace.serving.core.errors import ConfigError

POLL_S = 0.25
END_S = 20.0
"""For an orderly end, before it is killed."""
MAX_LOG_LINES = 15
"""Of a server that did not start, in the error."""


class ServerProcess:
    """One server: ours to start and end where it has a command, else only to stop and continue, or to ask.

    log: file for what a started one prints. environment: what it gets before its own variables.
    """

    def __init__(self, server: ComparedServer, log: Path, environment: Mapping[str, str]) -> None:
        self._server = server
        self._log = log
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self.tree: ProcessTree | None = None
        if server.pid is not None:
            self.tree = ProcessTree(server.pid)
        if server.stops and not has_proc():
            raise ConfigError(f'server {server.name}: to stop it needs /proc, which Linux has; give idle = "run"')
        if self.tree is not None and has_proc():
            self.tree.check()

    async def start(self) -> float:
        """Until it is ready, in seconds. Raises: BenchError with the end of its log."""
        began_s = time.monotonic()
        if self._server.command:
            self._launch()
        elif self._server.stops:
            self.resume()
        await self._ready(began_s)
        return time.monotonic() - began_s

    def _launch(self) -> None:
        try:
            with self._log.open("wb") as output:
                self._process = subprocess.Popen(
                    list(self._server.command),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**self._environment, **self._server.env},
                    start_new_session=True,
                )
        except OSError as error:
            raise BenchError(f"server {self._server.name}: {self._server.command[0]}: {error.strerror}") from None
        self.tree = ProcessTree(self._process.pid)

    async def _ready(self, began_s: float) -> None:
        url = self._server.base + (self._server.ready or self._server.dialect.ready)
        last = "no answer"
        async with httpx.AsyncClient(timeout=5.0) as client:
            while time.monotonic() - began_s < self._server.ready_s:
                if self._process is not None and self._process.poll() is not None:
                    raise BenchError(
                        f"server {self._server.name} ended with {self._process.returncode} when it should be ready"
                        f"{self._end_of_log()}"
                    )
                if self._process is None and self.tree is not None and has_proc() and not self.tree.pids():
                    raise BenchError(f"server {self._server.name}: its process {self.tree.root} has ended")
                try:
                    status = (await client.get(url)).status_code
                except httpx.HTTPError as error:
                    last = type(error).__name__
                else:
                    if status in (200, 401, 403):  # it is there; whether it likes the key is found when it is asked
                        return
                    last = f"status {status}"
                await asyncio.sleep(POLL_S)
        raise BenchError(
            f"server {self._server.name}: {url} was not ready after {self._server.ready_s:g} s ({last})"
            f"{self._end_of_log()}"
        )

    async def awake(self) -> None:
        """Continued, and answering again. Raises: BenchError."""
        self.resume()
        await self._ready(time.monotonic())

    def pause(self) -> None:
        """Stopped where it may be; else nothing."""
        if self._server.stops and self.tree is not None:
            self.tree.pause()

    def resume(self) -> None:
        if self._server.stops and self.tree is not None:
            self.tree.resume()

    async def end(self) -> None:
        """One that was started is ended, first by SIGTERM; another is left running."""
        self.resume()
        if self._process is None or self.tree is None:
            return
        tree, process = self.tree, self._process
        pids = tree.pids()
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        until_s = time.monotonic() + END_S
        while process.poll() is None and time.monotonic() < until_s:
            await asyncio.sleep(POLL_S)
        for pid in {*pids, *tree.pids()} if process.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def _end_of_log(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").splitlines()[-MAX_LOG_LINES:]
        except OSError:
            return ""
        return f"; the end of {self._log}:\n" + "\n".join(lines) if lines else f"; {self._log} is empty"
