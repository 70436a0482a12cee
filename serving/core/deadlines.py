"""Deadlines of requests: which have passed, and which cannot be kept by what steps have cost so far."""

import heapq

from headrace.serving.core.request import Rejection, RejectionReason
from headrace.serving.core.sequence import Sequence
from headrace.serving.core.tenancy import Tenancies

SPARE_ENTRIES = 64
"""Of ended requests, that may stay in the heap beside as many as are alive."""


class Deadlines:
    """Of live requests, the earliest first. Ended ones are dropped when they come up, or outnumber the others."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._live: set[int] = set()
        """By arrival."""

    def __len__(self) -> int:
        return len(self._live)

    def add(self, sequence: Sequence) -> None:
        """A new request, with a deadline or without."""
        deadline_s = sequence.deadline_s
        if deadline_s is not None:
            heapq.heappush(self._heap, (deadline_s, sequence.arrival, sequence))
            self._live.add(sequence.arrival)

    def discard(self, sequence: Sequence) -> None:
        """The request has ended."""
        self._live.discard(sequence.arrival)
        if len(self._heap) > 2 * len(self._live) + SPARE_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[1] in self._live]
            heapq.heapify(self._heap)

    def take_due(self, now_s: float) -> list[Sequence]:
        """Live requests whose deadline has passed, each once."""
        due = []
        while self._heap and self._heap[0][0] <= now_s:
            _, arrival, sequence = heapq.heappop(self._heap)
            if arrival in self._live:
                self._live.discard(arrival)
                due.append(sequence)
        return due


def least_service_s(sequence: Sequence, tenancies: Tenancies) -> float:
    """What a request takes at the least once it runs, by measured times; 0 while nothing was measured.

    Its prompt without what is cached, and the tokens that it cannot do without: all of max_tokens where nothing but
    them ends it.
    """
    cost, stop = tenancies.cost, sequence.request.stop
    num_cached = max(lane.memory.num_cached_tokens(sequence) for lane in tenancies.lanes)
    num_outputs = max(1, stop.min_tokens) if stop.stop_token_ids else stop.max_tokens
    return (sequence.num_tokens - num_cached) * cost.least_prefill_token_s + (num_outputs - 1) * cost.decode_s


def refuse_late(sequence: Sequence, tenancies: Tenancies, now_s: float) -> Rejection | None:
    """A request that is not submitted yet, and cannot be done by its deadline even if all goes well: behind those of
    its tenant, of its class or higher, that wait already, and at the measured times of steps."""
    deadline_ms = sequence.request.deadline_ms
    if deadline_ms is None:
        return None
    wait_s = tenancies.waiting.wait_s(sequence.request.tenant, sequence.request.priority, now_s)
    service_s = least_service_s(sequence, tenancies)
    if 1e3 * (wait_s + service_s) <= deadline_ms:
        return None
    return Rejection(
        reason=RejectionReason.DEADLINE,
        param="deadline_ms",
        message=f"deadline_ms is {deadline_ms:g}, but by measured times the request waits about {1e3 * wait_s:.0f} ms "
        f"and then takes {1e3 * service_s:.0f} ms or more; allow more time, or shorten prompt or max_tokens",
        retry_after_ms=None if 1e3 * service_s > deadline_ms else max(1, int(1e3 * wait_s)),
    )
