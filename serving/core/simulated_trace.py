"""What happened in a simulation, as lines that are equal on every Python version, and a hash over all of them."""

import hashlib
from collections import deque
from collections.abc import Iterable

from headrace.serving.core.events import Event, Finished, Preempted, TokenEvent
from headrace.serving.core.plan import PageCopy, StepPlan

NUM_RECENT = 50
"""Lines that a failure shows."""


class Trace:
    """Keeps the last NUM_RECENT lines."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._recent: deque[str] = deque(maxlen=NUM_RECENT)

    @property
    def hash(self) -> str:
        """SHA-256 over all lines so far."""
        return self._hash.hexdigest()

    @property
    def recent(self) -> str:
        return "\n".join(self._recent)

    def note(self, tick: int, what: str) -> None:
        line = f"{tick} {what}"
        self._hash.update(line.encode() + b"\n")
        self._recent.append(line)


def plan_line(plan: StepPlan) -> str:
    """Every integer of the plan; prompts by their rows only, as the requests are known."""
    bucket = plan.bucket
    parts = [f"plan {plan.step_id} {bucket.kind.value}/{bucket.decode_rows}/{bucket.prefill_tokens}"]
    parts += [_copies("out", plan.swap_out)] if plan.swap_out else []
    parts += [_copies("in", plan.swap_in)] if plan.swap_in else []
    parts += [
        f"load {x.slot.slot}.{x.slot.generation} #{x.request.request_id} +{_ids(x.output_ids)}" for x in plan.loads
    ]
    parts += [
        f"decode {x.slot.slot}.{x.slot.generation} @{x.position} <{x.input_token} o{x.output_index}"
        f" [{_ids(x.page_ids)}]"
        for x in plan.decode
    ]
    parts += [
        f"prefill {x.slot.slot}.{x.slot.generation} @{x.start} <{_ids(x.token_ids)} o{x.output_index}"
        f"{' samples' if x.samples else ''} [{_ids(x.page_ids)}]"
        for x in plan.prefill
    ]
    return "; ".join(parts)


def event_line(event: Event) -> str:
    if isinstance(event, TokenEvent):
        line = f"token #{event.request_id} {event.index} {event.token_id}"
        if event.logprobs is None:
            return line
        top = _ids(token_id for token_id, _ in event.logprobs.top)
        return f"{line} rank {event.logprobs.rank} [{top}]"
    if isinstance(event, Preempted):
        return f"preempted #{event.request_id} {event.reason.value} {event.action.value} {event.num_pages}"
    return _finished_line(event)


def _finished_line(event: Finished) -> str:
    times = event.timings
    why = event.cancel_reason.value if event.cancel_reason is not None else event.error_code or event.stop_token_id
    spent = (times.queue_ms, times.prefill_ms, times.decode_ms, times.preempted_ms)
    return (
        f"finished #{event.request_id} {event.reason.value} {why} {event.prompt_tokens}+{event.completion_tokens} "
        f"cached {event.cached_tokens} us {_ids(round(1e3 * ms) for ms in spent)} preempted {times.preemptions}"
    )


def _copies(name: str, copies: tuple[PageCopy, ...]) -> str:
    return f"{name} " + " ".join(f"{copy.page}:{copy.host_page}" for copy in copies)


def _ids(values: Iterable[int]) -> str:
    return " ".join(map(str, values))
