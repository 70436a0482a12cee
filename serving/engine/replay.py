"""Runs the scheduler again from a journal, and holds every plan and all events against what was recorded."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version

from headrace.serving.core.errors import ConfigError, InvariantError
from headrace.serving.core.events import Event
from headrace.serving.core.plan import SampledToken, StepPlan, StepResult
from headrace.serving.core.policy import POLICY_VERSION
from headrace.serving.core.scheduler import Scheduler
from headrace.serving.engine.journal import (
    AnyRecord,
    Applied,
    Cancelled,
    Drained,
    End,
    Expired,
    ForcedOut,
    Header,
    JournalError,
    Planned,
    PlanOutline,
    StepFailed,
    Submitted,
    Torn,
    name_events,
)

MAX_SHOWN = 8
"""Rows of one field that a difference lists on each side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """What one part of a record says on each side; rows that both have are left out."""

    part: str
    recorded: str
    replayed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first record whose replay says something else. record: counted from 1 through the file. segment: from 1."""

    record: int
    segment: int
    now_s: float
    what: str
    parts: tuple[SideBySide, ...] = ()


@dataclass(slots=True, kw_only=True)
class ReplayReport:
    """steps: plans whose digests were compared, the last one included. notes: what else a reader should know.

    Nothing behind a difference is run: it would follow from it.
    """

    segments: int = 0
    records: int = 0
    commands: int = 0
    steps: int = 0
    generated_tokens: int = 0
    notes: list[str] = field(default_factory=list)
    difference: Difference | None = None


class _Differs(Exception):
    def __init__(self, what: str, parts: Sequence[SideBySide] = ()) -> None:
        super().__init__(what)
        self.what = what
        self.parts = tuple(parts)


def replay(records: Iterable[AnyRecord]) -> ReplayReport:
    """Until the end or the first difference. Raises: what the iteration raises; JournalError for records that no
    engine writes in this order."""
    report = ReplayReport()
    segment: _Segment | None = None
    for record in records:
        report.records += 1
        if isinstance(record, Header):
            report.segments += 1
            _note_header(report, record)
            segment = _Segment(_scheduler_of(record), report)
            continue
        if segment is None:
            raise JournalError("the journal begins with another record than a header")
        try:
            segment.take(record)
        except _Differs as error:
            report.difference = _difference(report, record, error.what, error.parts)
        except InvariantError as error:
            report.difference = _difference(report, record, f"the scheduler refuses the record: {error}")
        if report.difference is not None:
            break
    return report


def _difference(report: ReplayReport, record: AnyRecord, what: str, parts: tuple[SideBySide, ...] = ()) -> Difference:
    now_s = getattr(record, "now_s", 0.0)
    return Difference(record=report.records, segment=report.segments, now_s=now_s, what=what, parts=parts)


class _Segment:
    """One life of an engine."""

    def __init__(self, scheduler: Scheduler, report: ReplayReport) -> None:
        self._scheduler = scheduler
        self._report = report
        self._plans: dict[int, StepPlan] = {}

    def take(self, record: AnyRecord) -> None:
        """Raises: _Differs, InvariantError, JournalError."""
        scheduler, report = self._scheduler, self._report
        match record:
            case Submitted():
                report.commands += 1
                rejection = scheduler.submit(record.request, record.now_s)
                refused = None if rejection is None else rejection.reason
                if refused != record.refused:
                    side = SideBySide(part="refused", recorded=str(record.refused), replayed=str(refused))
                    raise _Differs(f"request {record.request.request_id} was answered otherwise", (side,))
            case Cancelled():
                report.commands += 1
                events = scheduler.cancel(record.request_id, record.reason, record.now_s)
                _compare_events(f"the cancel of request {record.request_id}", record.events, events)
            case Expired():
                _compare_events("a deadline that passed", record.events, scheduler.expire(record.now_s))
            case ForcedOut():
                events = scheduler.preempt(record.request_id, record.now_s)
                _compare_events(f"the preemption of request {record.request_id}", record.events, events)
            case Drained():
                report.commands += 1
                scheduler.drain()
            case Planned():
                self._plan(record)
            case Applied():
                report.generated_tokens += len(record.decode) + sum(t is not None for t in record.prefill)
                plan = self._take_plan(record.step_id)
                events = scheduler.apply_result(plan, _result(record), record.now_s)
                _compare_events(f"the result of step {record.step_id}", record.events, events)
            case StepFailed():
                plan = self._take_plan(record.step_id)
                events = scheduler.fail_plan(plan, record.code, record.message, record.now_s)
                _compare_events(f"the failure of step {record.step_id}", record.events, events)
            case Torn(num_bytes=size):
                report.notes.append(f"segment {report.segments} ends in {size} bytes of a record that was cut off")
            case End(reason=reason):
                report.notes.append(f"segment {report.segments} ends: {reason}")
            case Header():
                raise AssertionError("a header begins another segment")

    def _plan(self, record: Planned) -> None:
        plan = self._scheduler.plan_step(record.now_s)
        replayed = None if plan is None else PlanOutline.of(plan)
        self._report.steps += record.plan is not None
        if record.plan is not None and replayed is not None and record.plan.digest == replayed.digest:
            if plan is not None:
                self._plans[plan.step_id] = plan
        elif record.plan is not None or replayed is not None:
            raise _Differs(*_compare_plans(record.plan, replayed))

    def _take_plan(self, step_id: int) -> StepPlan:
        if step_id not in self._plans:
            raise JournalError(f"the journal has a result of step {step_id}, which is not in flight")
        return self._plans.pop(step_id)


def _scheduler_of(record: Header) -> Scheduler:
    try:
        return Scheduler(record.config)
    except ConfigError as error:
        raise JournalError(f"the scheduler of this version refuses the recorded configuration: {error}") from None


def _note_header(report: ReplayReport, record: Header) -> None:
    for what, theirs, ours in (
        ("version", record.version, version("headrace")),
        ("scheduler policy", str(record.policy_version), str(POLICY_VERSION)),
    ):
        if theirs != ours:
            report.notes.append(
                f"segment {report.segments} was recorded with {what} {theirs}, and this is {ours}: plans may differ "
                f"for that reason alone"
            )


def _result(record: Applied) -> StepResult:
    wrong = set(record.non_finite)

    def token(index: int, token_id: int) -> SampledToken:
        return SampledToken(token_id=token_id, is_finite=index not in wrong)

    offset = len(record.decode)
    return StepResult(
        step_id=record.step_id,
        decode=tuple(token(i, t) for i, t in enumerate(record.decode)),
        prefill=tuple(None if t is None else token(offset + i, t) for i, t in enumerate(record.prefill)),
    )


def _compare_events(what: str, recorded: str, events: Sequence[Event]) -> None:
    """Of the recorded ones only the digest is known."""
    replayed = name_events(events)
    if recorded != replayed:
        shown = "; ".join(map(str, events[:MAX_SHOWN])) or "no event"
        sides = SideBySide(
            part="events",
            recorded=f"digest {recorded or 'of none'}",
            replayed=f"digest {replayed or 'of none'}: {shown}",
        )
        raise _Differs(f"{what} led to other events", (sides,))


def _compare_plans(recorded: PlanOutline | None, replayed: PlanOutline | None) -> tuple[str, tuple[SideBySide, ...]]:
    if recorded is None and replayed is not None:
        return f"no step was planned, and the replay plans step {replayed.step_id}", _sides(None, replayed)
    if replayed is None and recorded is not None:
        return f"step {recorded.step_id} was planned, and the replay plans none", _sides(recorded, None)
    sides = _sides(recorded, replayed)
    step_id = recorded.step_id if recorded is not None else 0
    return f"the plan of step {step_id} differs in {', '.join(side.part for side in sides)}", sides


def _sides(recorded: PlanOutline | None, replayed: PlanOutline | None) -> tuple[SideBySide, ...]:
    known = recorded or replayed
    names = () if known is None else tuple(known.fields)
    return tuple(
        _side(name, recorded, replayed)
        for name in names
        if recorded is None or replayed is None or recorded.fields[name] != replayed.fields.get(name)
    )


def _side(name: str, recorded: PlanOutline | None, replayed: PlanOutline | None) -> SideBySide:
    left, right = _rows(name, recorded), _rows(name, replayed)
    if recorded is not None and replayed is not None and left == right:
        same = f"{len(left)} of the same rows, with other pages, tokens or sampling"
        return SideBySide(part=name, recorded=same, replayed=same)
    return SideBySide(
        part=name,
        recorded=_shown([row for row in left if row not in right], recorded),
        replayed=_shown([row for row in right if row not in left], replayed),
    )


def _shown(rows: list[str], outline: PlanOutline | None) -> str:
    if outline is None:
        return "no step"
    more = f" and {len(rows) - MAX_SHOWN} more" if len(rows) > MAX_SHOWN else ""
    return ("; ".join(rows[:MAX_SHOWN]) or "nothing else") + more


def _rows(name: str, outline: PlanOutline | None) -> list[str]:
    """A field of a plan in words."""
    if outline is None:
        return []
    match name:
        case "bucket":
            bucket = outline.bucket
            return [f"{bucket.kind} program of {bucket.decode_rows} rows and {bucket.prefill_tokens} prompt tokens"]
        case "loads":
            return [f"slot {slot}.{generation} gets request {request}" for slot, generation, request in outline.loads]
        case "decode":
            return [f"slot {slot}.{generation} at {position}" for slot, generation, position in outline.decode]
        case "prefill":
            return [
                f"slot {slot}.{generation} from {start}, {tokens} tokens{', sampled' * samples}"
                for slot, generation, start, tokens, samples in outline.prefill
            ]
        case "swap_out":
            return [f"page {page} to host page {host_page}" for page, host_page in outline.swap_out]
        case "swap_in":
            return [f"host page {host_page} to page {page}" for page, host_page in outline.swap_in]
    return [str(getattr(outline, name, "not in the journal"))]
