"""A scheduler and a runner that write down what they are asked and what they answer, and are else what they were."""

import platform
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Protocol

import msgspec

from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.events import Event
from headrace.serving.core.plan import StepPlan, StepResult
from headrace.serving.core.policy import POLICY_VERSION
from headrace.serving.core.request import CancelReason, Rejection, Request, RequestId
from headrace.serving.core.scheduler import Scheduler
from headrace.serving.engine.journal import (
    FORMAT,
    AnyRecord,
    Applied,
    Cancelled,
    Drained,
    Expired,
    ForcedOut,
    Header,
    Planned,
    PlanOutline,
    StepFailed,
    StepTimes,
    Submitted,
    name_events,
)
from headrace.serving.engine.ports import Clock, CompiledProgram, ExpertTokens, Progress, Runner, Ticket


class Records(Protocol):
    """Where records go."""

    def write(self, record: AnyRecord) -> None: ...


def header(config: SchedulerConfig, *, now_s: float, model_hash: str, contract: str | None = None) -> Header:
    """Of a segment that begins now."""
    return Header(
        format=FORMAT,
        version=version("headrace"),
        python=platform.python_version(),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        now_s=now_s,
        config=config,
        policy_version=POLICY_VERSION,
        model_hash=model_hash,
        contract=contract,
    )


class JournaledRunner:
    """Implements ``ports.Runner``; keeps the times of steps until their results are recorded."""

    def __init__(self, runner: Runner, clock: Clock) -> None:
        self._runner = runner
        self._clock = clock
        self._times: dict[int, StepTimes] = {}

    def warm_up(self, progress: Progress) -> tuple[CompiledProgram, ...]:
        """See ``ports.Runner``."""
        return self._runner.warm_up(progress)

    def dispatch(self, plan: StepPlan) -> Ticket:
        """See ``ports.Runner``."""
        started_s = self._clock.now_s()
        try:
            return self._runner.dispatch(plan)
        finally:
            self._times[plan.step_id] = StepTimes(dispatch_s=started_s, dispatched_s=self._clock.now_s())

    def collect(self, ticket: Ticket) -> StepResult:
        """See ``ports.Runner``."""
        started_s = self._clock.now_s()
        try:
            return self._runner.collect(ticket)
        finally:
            times = self._times[ticket.step_id]
            self._times[ticket.step_id] = msgspec.structs.replace(
                times, collect_s=started_s, collected_s=self._clock.now_s()
            )

    def expert_tokens(self) -> ExpertTokens | None:
        """See ``ports.Runner``."""
        return self._runner.expert_tokens()

    @property
    def swap_page_seconds(self) -> float | None:
        """See ``ports.Runner``."""
        return self._runner.swap_page_seconds

    def compiles_after_ready(self) -> int:
        """See ``ports.Runner``."""
        return self._runner.compiles_after_ready()

    def take_times(self, step_id: int) -> StepTimes:
        """Of a step that was dispatched; once."""
        return self._times.pop(step_id)


class JournaledScheduler(Scheduler):
    """Each call at its boundary becomes a record, after it has returned."""

    def __init__(self, config: SchedulerConfig, records: Records, runner: JournaledRunner, clock: Clock) -> None:
        super().__init__(config)
        self._records = records
        self._times_of = runner.take_times
        self._clock = clock

    def submit(self, request: Request, now_s: float) -> Rejection | None:
        """See ``Scheduler``."""
        rejection = super().submit(request, now_s)
        refused = None if rejection is None else rejection.reason
        self._records.write(Submitted(now_s=now_s, request=request, refused=refused))
        return rejection

    def cancel(self, request_id: RequestId, reason: CancelReason, now_s: float) -> list[Event]:
        """See ``Scheduler``."""
        events = super().cancel(request_id, reason, now_s)
        self._records.write(Cancelled(now_s=now_s, request_id=request_id, reason=reason, events=name_events(events)))
        return events

    def expire(self, now_s: float) -> list[Event]:
        """See ``Scheduler``."""
        events = super().expire(now_s)
        if events:
            self._records.write(Expired(now_s=now_s, events=name_events(events)))
        return events

    def preempt(self, request_id: RequestId, now_s: float) -> list[Event]:
        """See ``Scheduler``."""
        events = super().preempt(request_id, now_s)
        self._records.write(ForcedOut(now_s=now_s, request_id=request_id, events=name_events(events)))
        return events

    def drain(self) -> None:
        """See ``Scheduler``."""
        super().drain()
        self._records.write(Drained(now_s=self._clock.now_s()))

    def plan_step(self, now_s: float) -> StepPlan | None:
        """See ``Scheduler``."""
        plan = super().plan_step(now_s)
        self._records.write(Planned(now_s=now_s, plan=None if plan is None else PlanOutline.of(plan)))
        return plan

    def apply_result(self, plan: StepPlan, result: StepResult, now_s: float) -> list[Event]:
        """See ``Scheduler``."""
        events = super().apply_result(plan, result, now_s)
        sampled = result.decode + result.prefill
        self._records.write(
            Applied(
                now_s=now_s,
                step_id=plan.step_id,
                times=self._times_of(plan.step_id),
                decode=tuple([token.token_id for token in result.decode]),
                prefill=tuple([None if token is None else token.token_id for token in result.prefill]),
                non_finite=tuple([i for i, t in enumerate(sampled) if t is not None and not t.is_finite]),
                events=name_events(events),
            )
        )
        return events

    def fail_plan(self, plan: StepPlan, code: str, message: str, now_s: float) -> list[Event]:
        """See ``Scheduler``."""
        events = super().fail_plan(plan, code, message, now_s)
        times = self._times_of(plan.step_id)
        self._records.write(
            StepFailed(
                now_s=now_s,
                step_id=plan.step_id,
                code=code,
                message=message,
                times=times,
                events=name_events(events),
            )
        )
        return events
