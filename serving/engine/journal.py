"""The journal of a scheduler: every command, plan, result and time, one JSON object on a line, and how to read it.

Plans depend on nothing else, so the same scheduler makes the same plans from it (``replay``). One file may hold several
segments, each from the start of an engine to its end. It holds the ids of prompts and answers.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.events import Event
from headrace.serving.core.plan import Bucket, StepPlan
from headrace.serving.core.plan_digest import both_digests, events_digest
from headrace.serving.core.request import CancelReason, RejectionReason, Request, RequestId

FORMAT = "headrace-journal/1"


class JournalError(Exception):
    """A file that cannot be read as a journal; the text names file and line."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Times are in seconds of the engine's monotonic clock."""


class Header(Record, tag="header", frozen=True, kw_only=True):
    """Begins a segment. started: wall time, ISO 8601 in UTC. policy_version: of the scheduler. model_hash: as in Ready.

    contract: fingerprint, where the engine knows it.
    """

    format: str
    version: str
    python: str
    started: str
    now_s: float
    config: SchedulerConfig
    policy_version: int
    model_hash: str
    contract: str | None = None


class Submitted(Record, tag="submit", frozen=True, kw_only=True):
    """refused: None = accepted."""

    now_s: float
    request: Request
    refused: RejectionReason | None = None


class Cancelled(Record, tag="cancel", frozen=True, kw_only=True):
    """events: hex ``events_digest`` of what came of it, here and below; "" = nothing."""

    now_s: float
    request_id: RequestId
    reason: CancelReason
    events: str = ""


class Expired(Record, tag="expire", frozen=True, kw_only=True):
    """Deadlines that had passed; calls that ended no request are left out."""

    now_s: float
    events: str


class ForcedOut(Record, tag="preempt", frozen=True, kw_only=True):
    """A request was preempted from outside the scheduler."""

    now_s: float
    request_id: RequestId
    events: str = ""


class Drained(Record, tag="drain", frozen=True, kw_only=True):
    now_s: float


class PlanOutline(Record, frozen=True, kw_only=True):
    """What a plan does, without pages and token ids; those are in the digests.

    digest: hex ``plan_digest``. fields: hex ``field_digests``. loads: (slot, generation, request id). decode: (slot,
    generation, position). prefill: (slot, generation, start, tokens, whether it samples). swap_out, swap_in: (page,
    host page).
    """

    step_id: int
    digest: str
    fields: dict[str, str]
    bucket: Bucket
    loads: tuple[tuple[int, int, int], ...] = ()
    decode: tuple[tuple[int, int, int], ...] = ()
    prefill: tuple[tuple[int, int, int, int, bool], ...] = ()
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, plan: StepPlan) -> "PlanOutline":
        digest, fields = both_digests(plan)
        return cls(
            step_id=plan.step_id,
            digest=digest.hex(),
            fields={name: value.hex() for name, value in fields.items()},
            bucket=plan.bucket,
            loads=tuple([(x.slot.slot, x.slot.generation, x.request.request_id) for x in plan.loads]),
            decode=tuple([(x.slot.slot, x.slot.generation, x.position) for x in plan.decode]),
            prefill=tuple(
                [(x.slot.slot, x.slot.generation, x.start, len(x.token_ids), x.samples) for x in plan.prefill]
            ),
            swap_out=tuple([(x.page, x.host_page) for x in plan.swap_out]),
            swap_in=tuple([(x.page, x.host_page) for x in plan.swap_in]),
        )


class Planned(Record, tag="plan", frozen=True, kw_only=True):
    """plan: None = nothing to run now."""

    now_s: float
    plan: PlanOutline | None = None


class StepTimes(Record, frozen=True, kw_only=True):
    """When the runner was called for a step and when it returned. collected_s: both None where dispatch failed."""

    dispatch_s: float
    dispatched_s: float
    collect_s: float | None = None
    collected_s: float | None = None


class Applied(Record, tag="result", frozen=True, kw_only=True):
    """decode, prefill: sampled ids as in StepResult. non_finite: indices into decode + prefill of tokens whose logits
    were not finite."""

    now_s: float
    step_id: int
    times: StepTimes
    decode: tuple[int, ...] = ()
    prefill: tuple[int | None, ...] = ()
    non_finite: tuple[int, ...] = ()
    events: str = ""


class StepFailed(Record, tag="failure", frozen=True, kw_only=True):
    now_s: float
    step_id: int
    code: str
    message: str
    times: StepTimes | None = None
    events: str = ""


class End(Record, tag="end", frozen=True, kw_only=True):
    """Nothing follows in this segment: the engine ended, or the journal was full."""

    reason: str


class Torn(Record, tag="torn", frozen=True, kw_only=True):
    """Not in the file: the reader's word for a last line that a crash cut off. num_bytes: of it."""

    num_bytes: int


AnyRecord = Header | Submitted | Cancelled | Expired | ForcedOut | Drained | Planned | Applied | StepFailed | End | Torn
_LINE: msgspec.json.Decoder[AnyRecord] = msgspec.json.Decoder(AnyRecord)


class JournaledStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step with all that a model of step times needs. planned_s: when the plan was asked for."""

    segment: int
    plan: PlanOutline
    planned_s: float
    times: StepTimes

    @property
    def num_decode_rows(self) -> int:
        return len(self.plan.decode)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(tokens for _, _, _, tokens, _ in self.plan.prefill)


def read_journal(path: Path) -> Iterator[AnyRecord]:
    """All records in order. A line that was cut off by a crash comes as Torn: at the end of the file or a segment.

    Raises: OSError; JournalError where a line is no record, or the first is no Header of this format.
    """
    for record, _ in read_with_sizes(path):
        yield record


def read_with_sizes(path: Path) -> Iterator[tuple[AnyRecord, int]]:
    """The same with the bytes of each line."""
    torn: tuple[int, int, str] | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            record: AnyRecord | None = None
            try:
                record = _LINE.decode(line)
            except msgspec.MsgspecError as error:
                problem = str(error)
            if torn is not None and not isinstance(record, Header):
                raise JournalError(f"{path}, line {torn[0]}, is no record of a journal: {torn[2]}")
            if number == 1:
                _check_header(path, record, None if record is not None else problem)
            if torn is not None:
                yield Torn(num_bytes=torn[1]), torn[1]
                torn = None
            if record is None:
                torn = number, len(line), problem
            else:
                yield record, len(line)
    if torn is not None:
        if line.endswith(b"\n"):
            raise JournalError(f"{path}, line {torn[0]}, is no record of a journal: {torn[2]}")
        yield Torn(num_bytes=torn[1]), torn[1]


def _check_header(path: Path, record: AnyRecord | None, problem: str | None) -> None:
    if not isinstance(record, Header):
        raise JournalError(f"{path} is no journal: its first line is {problem or 'another record than a header'}")
    if record.format != FORMAT:
        raise JournalError(f"{path} has format {record.format}; this version reads {FORMAT}")


def read_steps(path: Path) -> Iterator[JournaledStep]:
    """The steps that gave a result, in that order. Raises as read_journal."""
    segment, planned = -1, dict[int, Planned]()
    for record in read_journal(path):
        match record:
            case Header():
                segment, planned = segment + 1, {}
            case Planned(plan=PlanOutline() as plan):
                planned[plan.step_id] = record
            case Applied(step_id=step_id, times=times):
                found = planned.pop(step_id)
                if found.plan is not None:
                    yield JournaledStep(segment=segment, plan=found.plan, planned_s=found.now_s, times=times)
            case StepFailed(step_id=step_id):
                planned.pop(step_id, None)
            case _:
                pass


def name_events(events: Sequence[Event]) -> str:
    """As in records."""
    return events_digest(events).hex() if events else ""


def encode_record(record: Any) -> bytes:
    """A whole line."""
    return msgspec.json.encode(record) + b"\n"
