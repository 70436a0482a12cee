"""The edge's view of the engine: submit, cancel, watch, restart. JAX-free; everything runs on one event loop.

Each submitted request gets exactly one terminal callback (Finished, Refused or EngineLost) and nothing after it,
whatever happens to the engine process.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from headrace.serving.core.events import Finished, TokenEvent
from headrace.serving.core.request import CancelReason, Rejection, RejectionReason, Request, RequestId
from headrace.serving.edge.engine_connection import EngineConnection, EngineLaunch
from headrace.serving.edge.preemption_counts import PreemptionCounts
from headrace.serving.engine.lifecycle import Backoff, EngineState, ProgressLimits, Watchdog
from headrace.serving.engine.messages import (
    Cancel,
    Drain,
    Failed,
    Probe,
    Ready,
    Refused,
    Starting,
    Stats,
    Step,
    Submit,
    ToEdge,
)

log = logging.getLogger(__name__)

MAX_UNSENT_BYTES = 16 << 20
"""An engine that has not read so much is behind by many requests: more of them are refused at once."""
CANCEL_GRACE_S = 1.0
"""How long a drain waits for the terminal events of what it cancelled."""


@dataclass(frozen=True, slots=True)
class EngineLost:
    """Terminal: the engine died or got stuck; what the request would have become is unknown."""

    request_id: RequestId


EngineEvent = TokenEvent | Finished | Refused | EngineLost
Sink = Callable[[EngineEvent], None]


class EngineUnavailable(RuntimeError):
    """The engine takes no requests in this state; nothing was sent, and the sink will not be called."""

    def __init__(self, state: EngineState) -> None:
        super().__init__(f"the engine is {state}")
        self.state = state


class EngineStartError(RuntimeError):
    """The engine ended before it was ready; the text says why."""


class EngineClient:
    """Starts one engine process and speaks with it.

    restart: start anew, with exponential back-off, after an engine that had been ready died; an engine that never
    got ready is not tried again. exit_grace_s: how long a process may take to end before SIGKILL.
    """

    def __init__(
        self,
        launch: EngineLaunch,
        *,
        restart: bool = False,
        limits: ProgressLimits | None = None,
        exit_grace_s: float = 1.0,
    ) -> None:
        self._launch = launch
        self._restart = restart
        self._limits = limits or ProgressLimits()
        self._exit_grace_s = exit_grace_s
        self._state = EngineState.DEAD
        self._failure: str | None = None
        self._ready_info: Ready | None = None
        self._stats = Stats()
        self.preemptions = PreemptionCounts()
        self._sinks: dict[RequestId, Sink] = {}
        self._cancelled: set[RequestId] = set()
        self._last_id = 0
        self._connection: EngineConnection | None = None
        self._watchdog: Watchdog | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._open_probe: int | None = None
        self._num_probes = 0
        self._num_restarts = 0
        self._was_ready = False
        self._stopping = False
        self._supervisor: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()
        self._settled = asyncio.Event()
        self._empty = asyncio.Event()
        self._ended = asyncio.Event()
        self._on_state: list[Callable[[EngineState], None]] = []
        self._on_progress: list[Callable[[Starting], None]] = []

    # What is known

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def failure(self) -> str | None:
        """Why the engine last died, for the operator; None while nothing has."""
        return self._failure

    @property
    def ready_info(self) -> Ready | None:
        """Of the engine that runs now; None before it is ready and after it died."""
        return self._ready_info

    @property
    def stats(self) -> Stats:
        """Last reported; all zero when no engine runs."""
        return self._stats

    @property
    def in_flight(self) -> int:
        """Requests submitted and not ended."""
        return len(self._sinks)

    @property
    def queue_depth(self) -> int:
        """Requests in flight beyond the rows of a step: those that wait."""
        ready = self._ready_info
        slots = 0 if ready is None else ready.num_lanes * ready.num_slots
        return max(0, len(self._sinks) - slots)

    @property
    def num_restarts(self) -> int:
        return self._num_restarts

    @property
    def pid(self) -> int | None:
        return None if self._connection is None else self._connection.pid

    def on_state_change(self, callback: Callable[[EngineState], None]) -> None:
        """Called on the loop after each change, before the sinks of a dead engine hear of it."""
        self._on_state.append(callback)

    def on_progress(self, callback: Callable[[Starting], None]) -> None:
        """Called for each sign of progress before ready."""
        self._on_progress.append(callback)

    # Requests

    def next_request_id(self) -> RequestId:
        """Never the same twice, over restarts too."""
        self._last_id += 1
        return RequestId(self._last_id)

    def submit(self, request: Request, sink: Sink) -> None:
        """Send a request; sink is called on the loop, never from inside this call.

        Raises EngineUnavailable unless the engine is ready.
        """
        if self._state is not EngineState.READY or self._connection is None:
            raise EngineUnavailable(self._state)
        request_id = request.request_id
        self._sinks[request_id] = sink
        self._empty.clear()
        if self._connection.unsent_bytes > MAX_UNSENT_BYTES:
            rejection = Rejection(
                reason=RejectionReason.QUEUE_FULL,
                message="the engine is behind with reading requests; try again later",
                retry_after_ms=1000,
            )
            asyncio.get_running_loop().call_soon(self._end, request_id, Refused(request_id, rejection))
        else:
            self._connection.send(Submit(request))

    def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        """The terminal event still comes through the sink. Unknown, ended and cancelled ids change nothing."""
        if request_id in self._sinks and request_id not in self._cancelled and self._connection is not None:
            self._cancelled.add(request_id)
            self._connection.send(Cancel(request_id, reason))

    def cancel_all(self, reason: CancelReason) -> int:
        """Cancel whatever is in flight; how many requests had not been cancelled before."""
        running = [request_id for request_id in self._sinks if request_id not in self._cancelled]
        for request_id in running:
            self.cancel(request_id, reason)
        return len(running)

    async def wait_idle(self) -> None:
        """Until no request is in flight."""
        if self._sinks:
            await self._empty.wait()

    # Life

    async def start(self) -> None:
        """Spawn the engine and return; ``wait_ready`` waits for it. Raises OSError when it cannot be spawned."""
        if self._supervisor is not None:
            raise RuntimeError("this client was started before")
        await self._open()
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")

    async def wait_ready(self) -> None:
        """Raises EngineStartError when the engine is dead for good instead."""
        while self._ready_info is None:
            if self._ended.is_set():
                raise EngineStartError(self._failure or "the engine was stopped")
            await self._settled.wait()

    async def wait_failed(self) -> str:
        """Until the engine is dead for good (never, with restart, once it was ready); why it died."""
        await self._ended.wait()
        return self._failure or "the engine was stopped"

    async def drain(self, limit_s: float) -> int:
        """Refuse new requests, let those in flight run up to limit_s, then cancel the rest with SHUTDOWN.

        Returns how many were cut. The engine still runs afterwards.
        """
        if self._state is EngineState.READY and self._connection is not None:
            self._connection.send(Drain())
            self._set_state(EngineState.DRAINING)
        if await self._wait_empty(limit_s):
            return 0
        cut = self.cancel_all(CancelReason.SHUTDOWN)
        await self._wait_empty(CANCEL_GRACE_S)
        return cut

    async def stop(self, *, drain_s: float = 0.0) -> int:
        """Drain, end the process, leave nothing behind. Returns how many requests were cut. May be called twice."""
        self._stopping = True
        cut = await self.drain(drain_s) if self._sinks or self._state is EngineState.READY else 0
        if self._connection is not None:
            self._connection.give_up("the server stops")
        if self._supervisor is not None:
            if self._connection is None:
                self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
        self._ended.set()
        self._settled.set()
        return cut

    async def _wait_empty(self, limit_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wait_idle(), limit_s)
        return not self._sinks

    # One engine after the other

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        connection = EngineConnection(self._take, self._mourn)
        self._lost.clear()
        self._open_probe = None
        self._watchdog = Watchdog(self._limits, loop.time())
        await connection.open(self._launch)
        self._connection = connection
        self._set_state(EngineState.STARTING)
        self._tick = loop.call_later(self._limits.tick_s, self._watch)

    async def _supervise(self) -> None:
        backoff = Backoff()
        loop = asyncio.get_running_loop()
        try:
            while True:
                started_s = loop.time()
                await self._bury()
                if self._stopping or not self._restart or not self._was_ready:
                    return
                await self._reopen(backoff, loop.time() - started_s)
        finally:
            self._ended.set()
            self._settled.set()

    async def _bury(self) -> None:
        """Wait until the engine is lost, then until its process is gone."""
        await self._lost.wait()
        connection, self._connection = self._connection, None
        if connection is not None:
            how = await connection.reap(self._exit_grace_s)
            if self._stopping:
                self._failure = None
            else:
                self._failure = f"{self._failure} ({how})"
                log.error("engine lost: %s", self._failure)

    async def _reopen(self, backoff: Backoff, ran_s: float) -> None:
        while True:
            delay_s = backoff.delay_s(ran_s)
            log.warning("starting the engine again in %.1f s", delay_s)
            await asyncio.sleep(delay_s)
            self._num_restarts += 1
            try:
                return await self._open()
            except OSError as error:
                self._failure = f"the engine cannot be started: {error.strerror}"
                ran_s = 0.0

    def _watch(self) -> None:
        """Each tick: ask an idle engine for a sign of life, give a silent one up."""
        connection, watchdog = self._connection, self._watchdog
        if connection is None or watchdog is None or self._state is EngineState.DEAD:
            return
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        if self._state is not EngineState.STARTING:
            watchdog.owes(bool(self._sinks) or self._open_probe is not None, now_s)
        if watchdog.should_probe(now_s):
            self._num_probes += 1
            self._open_probe = self._num_probes
            connection.send(Probe(self._num_probes))
        if watchdog.is_stuck(now_s):
            connection.kill()
            connection.give_up(f"no progress for {now_s - watchdog.last_frame_s:.1f} s")
            return
        self._tick = loop.call_later(self._limits.tick_s, self._watch)

    # Frames

    def _take(self, message: ToEdge) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._watchdog is not None:
            self._watchdog.frame_came(now_s)
        match message:
            case Step():
                self._stats = message.stats.after(self._stats)
                self.preemptions.add(message.preempted)
                for token in message.tokens:
                    if (sink := self._sinks.get(token.request_id)) is not None:
                        _call(sink, token)
                for finished in message.finished:
                    self._end(finished.request_id, finished)
                for refused in message.refused:
                    self._end(refused.request_id, refused)
            case Refused():
                self._end(message.request_id, message)
            case Stats():
                self._stats = message.after(self._stats)
                if message.nonce is not None and message.nonce == self._open_probe:
                    self._open_probe = None
            case Starting():
                for callback in self._on_progress:
                    callback(message)
            case Ready():
                self._become_ready(message, now_s)
            case Failed():
                self._stopping |= message.is_wanted
                if self._connection is not None:
                    self._connection.give_up(message.message)

    def _become_ready(self, ready: Ready, now_s: float) -> None:
        if self._watchdog is not None:
            self._watchdog.started()
            self._watchdog.owes(False, now_s)
        self._ready_info = ready
        self._was_ready = True
        self._settled.set()
        self._set_state(EngineState.READY)

    def _mourn(self, reason: str) -> None:
        """The engine is lost: not ready from this moment, and every stream hears of it, before anything is awaited."""
        self._failure = reason
        self._ready_info = None
        self._stats = Stats()
        self._settled.clear()
        if self._tick is not None:
            self._tick.cancel()
        self._lost.set()
        self._set_state(EngineState.DEAD)
        for request_id in tuple(self._sinks):
            self._end(request_id, EngineLost(request_id))

    def _end(self, request_id: RequestId, event: EngineEvent) -> None:
        sink = self._sinks.pop(request_id, None)
        self._cancelled.discard(request_id)
        if not self._sinks:
            self._empty.set()
        if sink is not None:
            _call(sink, event)

    def _set_state(self, state: EngineState) -> None:
        if state is self._state:
            return
        self._state = state
        for callback in self._on_state:
            callback(state)


def _call(sink: Sink, event: EngineEvent) -> None:
    """One stream's fault stays its own."""
    try:
        sink(event)
    except Exception:
        log.exception("a stream failed to take a %s", type(event).__name__)
