"""The step loop: drain inbox, plan, dispatch, collect the previous step, apply, emit."""

import logging
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import msgspec

from headrace.serving.core.errors import InvariantError
from headrace.serving.core.events import Event, Finished, Preempted, TokenEvent
from headrace.serving.core.plan import StepPlan, StepResult
from headrace.serving.core.request import CancelReason, Rejection, Request, RequestId
from headrace.serving.core.scheduler import Scheduler
from headrace.serving.engine.inbox import Commands, Inbox
from headrace.serving.engine.messages import STEP_TOKEN_BOUNDS, Refused, Stats, Step, ToEdge
from headrace.serving.engine.ports import Clock, EngineFailure, ExpertTokens, Runner, Ticket

log = logging.getLogger(__name__)

STEP_FAILED = "step_failed"
"""error_code of requests whose step raised; others go on."""
EXPERT_READ_S = 1.0
"""Least time between two readings of the experts' counters while steps run: a reading waits for the steps in flight."""
MAX_FAILURES_IN_ROW = 3
"""A failed step may take the one that overlaps it down too; a third in a row shows a broken runner."""


class Outlet(Protocol):
    """Where the engine's messages go."""

    def send(self, message: ToEdge) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What one collected step made known."""

    step_id: int
    events: list[Event]


@dataclass(frozen=True, slots=True)
class _InFlight:
    plan: StepPlan
    ticket: Ticket | Exception
    dispatched_s: float


class StepLoop:
    """A scheduler and a runner with up to two steps in flight. No threads, sockets or waiting for work.

    blocked_seconds: time spent waiting in ``collect``. device_seconds: wall time in which at least one step was in
    flight. Both only grow. last_step_id: of the last collected step, 0 before the first.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, clock: Clock, *, max_steps_in_flight: int = 2) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._max_steps_in_flight = max_steps_in_flight
        self._in_flight: deque[_InFlight] = deque()
        self._busy_since_s = 0.0
        self._failures_in_row = 0
        self._has_failed = False
        self.last_step_id = 0
        self._step_tokens = [0] * (len(STEP_TOKEN_BOUNDS) + 2)
        self.blocked_seconds = 0.0
        self.device_seconds = 0.0

    def submit(self, request: Request) -> Rejection | None:
        return self._scheduler.submit(request, self._clock.now_s())

    def cancel(self, request_id: RequestId, reason: CancelReason) -> list[Event]:
        """An id that is not alive changes nothing."""
        return self._scheduler.cancel(request_id, reason, self._clock.now_s())

    @property
    def is_idle(self) -> bool:
        return not self._in_flight and self._scheduler.is_idle

    def turn(self) -> StepOutput | None:
        """Dispatch what fits, then collect and apply the oldest step in flight; None when there was nothing to do.

        Raises EngineFailure or InvariantError when it cannot go on: every request is lost then.
        """
        expired = self._dispatch()
        if self._in_flight:
            output = self._collect()
            return StepOutput(step_id=output.step_id, events=expired + output.events)
        if not self._scheduler.is_idle:
            raise InvariantError("requests wait, nothing is in flight, and the scheduler plans no step")
        return StepOutput(step_id=self.last_step_id, events=expired) if expired else None

    def _dispatch(self) -> list[Event]:
        """Events of requests whose deadline had passed before a step was planned."""
        # After a failed dispatch nothing is planned until the failure had its turn: the rows of the next plan would
        # build on it. After a failed step nothing is planned until the step that overlapped it is collected: that
        # one may fail for the same reason, and would pass it on to the rows of every next plan.
        if self._has_failed and self._in_flight:
            return []
        self._has_failed = False
        events: list[Event] = []
        while len(self._in_flight) < self._max_steps_in_flight and not self._has_failed_dispatch():
            now_s = self._clock.now_s()
            events += self._scheduler.expire(now_s)
            plan = self._scheduler.plan_step(now_s)
            if plan is None:
                break
            if not self._in_flight:
                self._busy_since_s = now_s
            ticket: Ticket | Exception
            try:
                ticket = self._runner.dispatch(plan)
            except (InvariantError, EngineFailure):
                raise
            except Exception as error:
                ticket = error
            self._in_flight.append(_InFlight(plan, ticket, now_s))
        return events

    def _has_failed_dispatch(self) -> bool:
        return bool(self._in_flight) and isinstance(self._in_flight[-1].ticket, Exception)

    def _collect(self) -> StepOutput:
        step = self._in_flight.popleft()
        self.last_step_id = step.plan.step_id
        started_s = self._clock.now_s()
        outcome: StepResult | Exception
        if isinstance(step.ticket, Exception):
            outcome = step.ticket
        else:
            try:
                outcome = self._runner.collect(step.ticket)
            except (InvariantError, EngineFailure):
                raise
            except Exception as error:
                outcome = error
        now_s = self._clock.now_s()
        self.blocked_seconds += now_s - started_s
        self.device_seconds += now_s - self._busy_since_s
        self._busy_since_s = now_s
        if isinstance(outcome, Exception):
            self._has_failed = True
            events = self._fail(step.plan, outcome, now_s)
        else:
            self._failures_in_row = 0
            num_tokens = step.plan.num_tokens
            self._step_tokens[bisect_left(STEP_TOKEN_BOUNDS, num_tokens)] += 1
            self._step_tokens[-1] += num_tokens
            events = self._scheduler.apply_result(step.plan, outcome, now_s)
        return StepOutput(step_id=step.plan.step_id, events=events)

    def _fail(self, plan: StepPlan, error: Exception, now_s: float) -> list[Event]:
        log.error("step %d failed", plan.step_id, exc_info=error)
        self._failures_in_row += 1
        if self._failures_in_row >= MAX_FAILURES_IN_ROW:
            raise EngineFailure(
                f"{self._failures_in_row} steps in a row failed; the last: {describe(error)}"
            ) from error
        return self._scheduler.fail_plan(
            plan, STEP_FAILED, f"the step that held this request failed ({type(error).__name__})", now_s
        )

    def check_idle(self) -> None:
        """Count the pages and slots; every one must be free or cached now. Raises InvariantError."""
        self._scheduler.check()

    def drain(self) -> None:
        """Refuse new work from here on."""
        self._scheduler.drain()

    def expert_tokens(self) -> ExpertTokens | None:
        """See ``ports.Runner``; None also where a step in flight fails, which its ``collect`` will report."""
        started_s = self._clock.now_s()
        try:
            return self._runner.expert_tokens()
        except InvariantError:
            raise
        except Exception as error:
            log.warning("the experts' counters cannot be read: %s", describe(error))
            return None
        finally:
            self.blocked_seconds += self._clock.now_s() - started_s

    def stats(
        self,
        *,
        host_seconds: float = 0.0,
        nonce: int | None = None,
        expert_tokens: ExpertTokens | None = None,
    ) -> Stats:
        s = self._scheduler.stats()
        return Stats(
            running=s.running,
            waiting=s.waiting,
            pages_total=s.pages_total,
            pages_free=s.pages_free,
            pages_cached=s.pages_cached,
            steps=s.steps,
            prompt_tokens=s.prompt_tokens,
            generation_tokens=s.generation_tokens,
            prefix_queries_tokens=s.prefix_queries_tokens,
            prefix_hits_tokens=s.prefix_hits_tokens,
            preemptions=s.preemptions,
            preemptions_swapped=s.preemptions_swapped,
            preemptions_recomputed=s.preemptions_recomputed,
            swap_pages_total=s.swap_pages_total,
            swap_pages_used=s.swap_pages_used,
            deadline_misses=s.deadline_misses,
            queued_prompt_tokens=s.queued_prompt_tokens,
            decode_step_ms=s.decode_step_ms,
            prefill_token_ms=s.prefill_token_ms,
            compiles_after_ready=self._runner.compiles_after_ready(),
            device_seconds=self.device_seconds,
            host_seconds=host_seconds,
            nonce=nonce,
            step_tokens=tuple(self._step_tokens),
            expert_tokens=expert_tokens,
        )


class JournalState(Protocol):
    """What ``journal_file.JournalFile`` reports."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def stopped_by(self) -> str | None: ...


class Engine:
    """The step loop behind an inbox and a link. host_seconds: time of turns with work outside ``collect``."""

    def __init__(
        self, loop: StepLoop, clock: Clock, inbox: Inbox, outlet: Outlet, journal: JournalState | None = None
    ) -> None:
        self._journal = journal
        self._loop = loop
        self._clock = clock
        self._inbox = inbox
        self._outlet = outlet
        self._host_seconds = 0.0
        self._experts_read_s = clock.now_s()

    def run(self) -> None:
        """Until the edge is gone (inbox closed). Raises EngineFailure, InvariantError or LinkClosed."""
        was_busy = False
        while True:
            commands = self._inbox.take(wait=self._loop.is_idle)
            if commands.closed:
                return
            started_s = self._clock.now_s()
            blocked_before_s = self._loop.blocked_seconds
            was_busy |= self._obey(commands)
            output = self._loop.turn()
            if output is not None:
                was_busy = True
                self._emit(output.events, [])
                self._report_experts()
            waited_s = self._loop.blocked_seconds - blocked_before_s
            self._host_seconds += self._clock.now_s() - started_s - waited_s
            if was_busy and self._loop.is_idle:
                # Check the books in production too, and leave the right gauges behind.
                self._loop.check_idle()
                self._outlet.send(self._stats(expert_tokens=self._loop.expert_tokens()))
                was_busy = False
            if commands.probe is not None:
                self._outlet.send(self._stats(nonce=commands.probe))

    def _obey(self, commands: Commands) -> bool:
        """True when something changed."""
        refused: list[Refused] = []
        events: list[Event] = []
        for request in commands.submits:
            rejection = self._loop.submit(request)
            if rejection is not None:
                refused.append(Refused(request_id=request.request_id, rejection=rejection))
        for request_id, reason in commands.cancels:
            events += self._loop.cancel(request_id, reason)
        if commands.drain:
            self._loop.drain()
        if events or refused:
            # Ahead of the step: a refusal or a cancel need not wait for it.
            self._emit(events, refused)
        return bool(commands.submits or events)

    def _report_experts(self) -> None:
        """If it is due; behind the step's tokens, which need not wait for the reading."""
        now_s = self._clock.now_s()
        if now_s - self._experts_read_s < EXPERT_READ_S:
            return
        self._experts_read_s = now_s
        expert_tokens = self._loop.expert_tokens()
        if expert_tokens is not None:
            self._outlet.send(self._stats(expert_tokens=expert_tokens))

    def _stats(self, *, nonce: int | None = None, expert_tokens: ExpertTokens | None = None) -> Stats:
        stats = self._loop.stats(host_seconds=self._host_seconds, nonce=nonce, expert_tokens=expert_tokens)
        if self._journal is None:
            return stats
        return msgspec.structs.replace(
            stats, journal_bytes=self._journal.num_bytes, journal_stopped=self._journal.stopped_by is not None
        )

    def _emit(self, events: list[Event], refused: list[Refused]) -> None:
        self._outlet.send(
            Step(
                step_id=self._loop.last_step_id,
                tokens=tuple(e for e in events if isinstance(e, TokenEvent)),
                finished=tuple(e for e in events if isinstance(e, Finished)),
                refused=tuple(refused),
                preempted=tuple(e for e in events if isinstance(e, Preempted)),
                stats=self._stats(),
            )
        )


def describe(error: BaseException) -> str:
    """One short line for a client or an operator; tracebacks stay in the log."""
    first_line = str(error).strip().partition("\n")[0][:300]
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
