"""uvicorn with our sockets, limits and shutdown.

Shutdown: the first SIGTERM or SIGINT refuses new work at once and lets what runs go on, at full pace, to its end or
to the drain limit; what then still runs ends with a typed error. A second signal ends at once.
"""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import resource
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import uvicorn
from starlette.types import ASGIApp

from headrace.serving.core.errors import ConfigError
from headrace.serving.edge.access_log import AccessLog
from headrace.serving.edge.guards import ConnectionLimits, GuardedHttp, GuardedWebSocket
from headrace.serving.edge.messages import MAX_FRAME_BYTES

T = TypeVar("T")

FLUSH_S = 2.0
"""Time for last frames and close handshakes once nothing runs any more."""
SPARE_FILES = 128
"""File descriptors beside connections: listener, engine link, model files, logs."""

_log = logging.getLogger("headrace.server")


class ExitCode(IntEnum):
    """How the process ends."""

    CLEAN = 0
    START_FAILED = 1
    WORK_LOST = 3
    ENGINE_DIED = 4


class Drainable(Protocol):
    """Something that has work to finish before the server ends."""

    def begin_drain(self, limit_s: float) -> None:
        """Refuse new work from now on."""

    async def wait_idle(self) -> None:
        """Until all accepted work has ended."""

    def abort(self) -> int:
        """End what still runs with a typed error; returns how much was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """port: 0 takes a free one. tcp_user_timeout_s: unacknowledged data for so long cuts a connection (Linux); without
    it a client that stops reading blocks a write for ever. unsent_bytes: most bytes that the kernel holds unsent per
    connection, so that a slow client's backlog stays in mergeable deltas. ping_*: WebSocket keepalive.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    tls_cert: Path | None = None
    tls_key: Path | None = None
    drain_s: float = 30.0
    ping_interval_s: float = 20.0
    ping_timeout_s: float = 20.0
    keep_alive_s: int = 75
    tcp_user_timeout_s: float = 20.0
    unsent_bytes: int = 128 << 10
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)


def bind(config: ServerConfig) -> socket.socket:
    """The listening socket, bound but not yet accepting. Raises ConfigError naming host, port and remedy."""
    try:
        found = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
    except OSError as error:
        raise ConfigError(f"--host {config.host} is not an address of this machine: {error.strerror}") from None
    family, kind, protocol, _, address = sorted(found, key=lambda item: item[0] != socket.AF_INET)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _set_tcp_options(listener, config)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {config.host} port {config.port}: {error.strerror}; choose another with --port"
        ) from None
    listener.setblocking(False)
    return listener


def _set_tcp_options(listener: socket.socket, config: ServerConfig) -> None:
    """Accepted sockets inherit them."""
    tcp = socket.IPPROTO_TCP
    listener.setsockopt(tcp, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        listener.setsockopt(tcp, socket.TCP_USER_TIMEOUT, round(config.tcp_user_timeout_s * 1000))
        listener.setsockopt(tcp, socket.TCP_NOTSENT_LOWAT, config.unsent_bytes)


def url_of(config: ServerConfig, listener: socket.socket) -> str:
    """Where a browser on this machine finds the server."""
    port = listener.getsockname()[1]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(config.host, config.host)
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"{'https' if config.tls_cert else 'http'}://{host}:{port}"


class ServerControl:
    """How the rest of the process talks to a running server."""

    def __init__(self) -> None:
        self.stop_requested = asyncio.Event()
        self.stop_at_once = asyncio.Event()
        self.listening = asyncio.Event()
        self.exit_code = ExitCode.CLEAN

    def stop(self, code: ExitCode = ExitCode.CLEAN) -> None:
        """As a SIGTERM would, and as a second one when called again."""
        self.ends_with(code)
        if self.stop_requested.is_set():
            self.stop_at_once.set()
        self.stop_requested.set()

    def ends_with(self, code: ExitCode) -> None:
        """The first code that is not CLEAN is the one that the process ends with."""
        if self.exit_code is ExitCode.CLEAN:
            self.exit_code = code


async def serve(
    app: ASGIApp,
    config: ServerConfig,
    drains: Sequence[Drainable],
    *,
    listener: socket.socket | None = None,
    control: ServerControl | None = None,
    signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
) -> ExitCode:
    """Serve until a signal or control.stop(), then drain. listener: from bind(); made here when absent."""
    control = control or ServerControl()
    listener = listener or bind(config)
    server = _Server(_uvicorn_config(app, config), control.listening)
    loop = asyncio.get_running_loop()
    for number in signals:
        loop.add_signal_handler(number, _on_signal, control, number)
    serving = asyncio.create_task(server.serve([listener]))
    stop = asyncio.create_task(control.stop_requested.wait())
    try:
        await asyncio.wait((serving, stop), return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            lost = await _drain(drains, config.drain_s, control)
            if lost:
                _log.warning("ended %d running streams", lost)
                control.ends_with(ExitCode.WORK_LOST)
    finally:
        stop.cancel()
        server.should_exit = True
        if control.stop_at_once.is_set():
            server.force_exit = True
        await serving
        for number in signals:
            loop.remove_signal_handler(number)
    return control.exit_code


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run the process's main coroutine on uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def _on_signal(control: ServerControl, number: signal.Signals) -> None:
    is_second = control.stop_requested.is_set()
    _log.info("%s: %s", number.name, "ending at once" if is_second else "draining; once more ends at once")
    control.stop()


async def _drain(drains: Sequence[Drainable], limit_s: float, control: ServerControl) -> int:
    """Returns how much work was lost."""
    for drain in drains:
        drain.begin_drain(limit_s)
    idle = asyncio.create_task(_wait_all(drains))
    at_once = asyncio.create_task(control.stop_at_once.wait())
    await asyncio.wait((idle, at_once), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    at_once.cancel()
    lost = 0 if idle.done() else sum(drain.abort() for drain in drains)
    await asyncio.wait((idle,), timeout=FLUSH_S)
    idle.cancel()
    return lost


async def _wait_all(drains: Sequence[Drainable]) -> None:
    await asyncio.gather(*(drain.wait_idle() for drain in drains))


class _Server(uvicorn.Server):
    """Leaves signals to serve(), and says when it accepts connections."""

    def __init__(self, config: uvicorn.Config, listening: asyncio.Event) -> None:
        super().__init__(config)
        self._listening = listening

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listening.set()


def _uvicorn_config(app: ASGIApp, config: ServerConfig) -> uvicorn.Config:
    limits = _fit_to_files(config.limits)
    return uvicorn.Config(
        cast(Callable[..., Any], AccessLog(app)),
        http=cast(type[asyncio.Protocol], functools.partial(GuardedHttp, limits=limits)),
        ws=cast(type[asyncio.Protocol], functools.partial(GuardedWebSocket, limits=limits)),
        ws_max_size=MAX_FRAME_BYTES,
        ws_ping_interval=config.ping_interval_s,
        ws_ping_timeout=config.ping_timeout_s,
        ws_per_message_deflate=False,
        timeout_keep_alive=config.keep_alive_s,
        timeout_graceful_shutdown=round(FLUSH_S),
        ssl_certfile=config.tls_cert,
        ssl_keyfile=config.tls_key,
        lifespan="off",
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        proxy_headers=False,
        server_header=False,
    )


def _fit_to_files(limits: ConnectionLimits) -> ConnectionLimits:
    """Raise the soft limit of open files as far as needed and allowed; never accept more connections than fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return limits
    fitting = max(16, soft - SPARE_FILES)
    _log.warning("at most %d connections: the limit of open files is %d", fitting, soft)
    return dataclasses.replace(limits, max_connections=fitting)
