"""One life of one engine process: spawn it, exchange frames, notice its end, bury it."""

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from headrace.serving.edge.child_process import spawn
from headrace.serving.engine.link import FrameDecoder, LinkError, decode_to_edge, encode_frame
from headrace.serving.engine.messages import ToEdge, ToEngine

log = logging.getLogger(__name__)

REAP_POLL_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaunch:
    """How to start an engine: command gets ``--fd N`` appended; first_frame is what it reads before anything else.

    Options travel in the frame, not in argv, where every user of the machine could read them.
    """

    command: tuple[str, ...]
    first_frame: bytes


class EngineConnection(asyncio.Protocol):
    """The edge's end of the link. Callbacks run on the loop: on_message per frame, then on_lost exactly once.

    Nothing here waits for the engine: frames are taken the moment they arrive, so the engine's writes never block for
    long, and the write buffer is bounded by whoever calls ``send`` (``unsent_bytes``).
    """

    def __init__(self, on_message: Callable[[ToEdge], None], on_lost: Callable[[str], None]) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._decoder = FrameDecoder()
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._is_lost = False
        self._closed = asyncio.Event()

    async def open(self, launch: EngineLaunch) -> None:
        """Spawn it and connect.

        Raises OSError when the process cannot be started; nothing is left behind then.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = spawn(launch.command, theirs.fileno())
            ours.setblocking(False)
            loop = asyncio.get_running_loop()
            self._transport, _ = await loop.create_unix_connection(lambda: self, sock=ours)
        except BaseException:
            ours.close()
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            raise
        self._transport.write(launch.first_frame)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def unsent_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def send(self, message: ToEngine) -> None:
        """Never blocks; nothing happens when the link is gone. Raises LinkError for a message over the frame limit."""
        frame = encode_frame(message)
        if self._transport is not None and not self._is_lost:
            self._transport.write(frame)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._decoder.feed(data):
                if self._is_lost:
                    return
                self._on_message(decode_to_edge(body))
        except LinkError as error:
            self.give_up(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed.set()
        self.give_up("the engine process closed its link")

    def give_up(self, reason: str) -> None:
        """Count the engine as lost now; reap() ends the process."""
        if self._is_lost:
            return
        self._is_lost = True
        if self._transport is not None:
            self._transport.abort()
        self._on_lost(reason)

    def kill(self) -> None:
        """SIGKILL: also ends a stopped process."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def reap(self, grace_s: float) -> str:
        """Wait for the process, kill it after grace_s; how it ended, in words. Call after the link is lost."""
        process = self._process
        if process is None:
            return "never started"
        await self._closed.wait()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + grace_s
        was_killed = False
        try:
            while process.poll() is None:
                if loop.time() >= deadline_s and not was_killed:
                    self.kill()
                    was_killed = True
                await asyncio.sleep(REAP_POLL_S)
        finally:
            if process.returncode is None:
                process.kill()
                process.wait()
        return describe_exit(process.returncode)


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
