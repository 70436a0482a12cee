"""The engine process of `headrace serve`, with a count of steps on every cancel: from its arrival in the engine's inbox
to the moment when the last page of its request is free.

Run by ``scripts/watch/serve.py`` in place of the product's own. The step loop, scheduler, pages and model are the
product's; two classes are extended by notes, which change nothing. It supposes that requests share no pages.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.serving.app import engine_process
from headrace.serving.core.events import Event
from headrace.serving.core.plan import StepPlan, StepResult
from headrace.serving.core.request import CancelReason, RequestId
from headrace.serving.core.scheduler import Scheduler
from headrace.serving.engine.inbox import Inbox


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A cancel whose pages may still be held. step, at_s: when it came into the inbox."""

    step: int
    at_s: float
    pages: frozenset[int]
    state: str
    reason: str


class StepCount:
    """steps: results of steps that the scheduler took. write: gets a line of JSON per cancel that ended something."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self.steps = 0
        self._arrived: dict[RequestId, tuple[int, float]] = {}
        self._notes: list[Note] = []

    def arrives(self, request_id: RequestId) -> None:
        """In the reader thread."""
        self._arrived.setdefault(request_id, (self.steps, time.monotonic()))

    def ended(self, request_id: RequestId, pages: list[int], state: str, reason: CancelReason) -> None:
        step, at_s = self._arrived.pop(request_id)
        self._notes.append(Note(step=step, at_s=at_s, pages=frozenset(pages), state=state, reason=str(reason)))

    def forget(self, request_id: RequestId) -> None:
        """It was over already."""
        self._arrived.pop(request_id, None)

    @property
    def pages(self) -> frozenset[int]:
        """Of all cancelled requests that may still have some."""
        return frozenset().union(*(note.pages for note in self._notes))

    def look(self, held: frozenset[int]) -> None:
        """held: those of ``pages`` that are not free. Writes down the cancels that have none of them."""
        for note in self._notes:
            if not note.pages & held:
                line = {
                    "steps": self.steps - note.step,
                    "ms": round(1000 * (time.monotonic() - note.at_s), 3),
                    "pages": len(note.pages),
                    "state": note.state,
                    "reason": note.reason,
                }
                self._write(json.dumps(line) + "\n")
        self._notes = [note for note in self._notes if note.pages & held]


def watched_inbox(count: StepCount) -> type[Inbox]:
    class WatchedInbox(Inbox):
        def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
            count.arrives(request_id)
            super().cancel(request_id, reason)

    return WatchedInbox


def watched_scheduler(count: StepCount) -> type[Scheduler]:
    class WatchedScheduler(Scheduler):
        def cancel(self, request_id: RequestId, reason: CancelReason, now_s: float) -> list[Event]:
            sequence = self._live.get(request_id)
            pages, state = [], "waiting"
            if sequence is not None and sequence.slot is not None:
                pages, state = list(sequence.pages), "prefilling" if sequence.is_prefilling else "decoding"
            events = super().cancel(request_id, reason, now_s)
            if events:
                count.ended(request_id, pages, state, reason)
                self._look()
            else:
                count.forget(request_id)
            return events

        def apply_result(self, plan: StepPlan, result: StepResult, now_s: float) -> list[Event]:
            events = super().apply_result(plan, result, now_s)
            count.steps += 1
            self._look()
            return events

        def _look(self) -> None:
            """A page that a running request has by now was free before it got it."""
            taken = {page for sequence in self._live.values() for page in sequence.pages}
            pools = [lane.memory.pool for lane in self.lanes]
            count.look(frozenset(p for p in count.pages - taken if any(pool.num_holders(p) for pool in pools)))

    return WatchedScheduler


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--notes", type=Path, required=True)
    args, rest = parser.parse_known_args()
    with args.notes.open("w", buffering=1) as notes:
        count = StepCount(notes.write)
        module: Any = engine_process
        module.Inbox = watched_inbox(count)
        module.Scheduler = watched_scheduler(count)
        return engine_process.main(rest)


if __name__ == "__main__":
    sys.exit(main())
