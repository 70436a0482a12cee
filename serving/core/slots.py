"""Rows of the sampling state, and who they belong to at the moment."""

import heapq

from headrace.serving.core.errors import InvariantError
from headrace.serving.core.plan import SlotRef


class Slots:
    """Hands out the lowest free slot, from first on; its generation grows with each tenancy, so an old SlotRef never
    matches again."""

    def __init__(self, num_slots: int, first: int = 0) -> None:
        self._slots = range(first, first + num_slots)
        self._free = list(self._slots)
        self._generations = dict.fromkeys(self._slots, 0)
        self._taken: set[SlotRef] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> SlotRef:
        if not self._free:
            raise InvariantError("take without a free slot")
        slot = heapq.heappop(self._free)
        self._generations[slot] += 1
        ref = SlotRef(slot, self._generations[slot])
        self._taken.add(ref)
        return ref

    def release(self, ref: SlotRef) -> None:
        if ref not in self._taken:
            raise InvariantError(f"release of {ref}, which is not taken")
        self._taken.remove(ref)
        heapq.heappush(self._free, ref.slot)

    def check(self, tenants: set[SlotRef]) -> None:
        """Raise InvariantError unless exactly the tenants hold slots."""
        if tenants != self._taken or sorted([*self._free, *(r.slot for r in self._taken)]) != list(self._slots):
            raise InvariantError("taken slots differ from the sequences that hold one")
