"""Host pages of a lane, for the KV of preempted sequences."""

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.serving.core.errors import InvariantError
from headrace.serving.core.plan import PageCopy


@dataclass(frozen=True, slots=True)
class HostHold:
    """Host pages that plans up to last_step still read."""

    last_step: int
    pages: tuple[int, ...]


class SwapSpace:
    """Host pages first … first + num_pages - 1. A page is free, taken, or held until a plan has been applied."""

    def __init__(self, num_pages: int, first: int = 0) -> None:
        self._pages = range(first, first + num_pages)
        self._free = list(reversed(self._pages))
        self._taken: set[int] = set()
        self._holds: list[HostHold] = []

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free_pages(self) -> tuple[int, ...]:
        return tuple(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        if count > len(self._free):
            raise InvariantError(f"{count} host pages are wanted, but {len(self._free)} are free")
        pages = tuple(self._free.pop() for _ in range(count))
        self._taken.update(pages)
        return pages

    def release(self, pages: Iterable[int], last_step: int | None = None) -> None:
        """Free them now, or when the plan last_step, which reads them, has been applied."""
        pages = tuple(pages)
        if not self._taken.issuperset(pages):
            raise InvariantError(f"release of host pages {pages}, of which some are not taken")
        if last_step is not None:
            self._holds.append(HostHold(last_step, pages))
            return
        self._taken.difference_update(pages)
        self._free.extend(reversed(pages))

    def settle(self, oldest_in_flight: int | None) -> None:
        """A plan has left the flight."""
        due = [h for h in self._holds if oldest_in_flight is None or h.last_step < oldest_in_flight]
        self._holds = [h for h in self._holds if not (oldest_in_flight is None or h.last_step < oldest_in_flight)]
        for hold in due:
            self.release(hold.pages)

    def check(self, owned: Iterable[int], *, deep: bool) -> None:
        """Raise InvariantError unless owners and holds together hold exactly the pages that are taken. deep looks at
        every page."""
        held = [page for hold in self._holds for page in hold.pages]
        if sorted([*owned, *held]) != sorted(self._taken):
            raise InvariantError("taken host pages differ from the sequences that are swapped out")
        is_whole = len(self._free) + len(self._taken) == len(self._pages)
        if not is_whole or (deep and sorted([*self._free, *self._taken]) != list(self._pages)):
            raise InvariantError("a host page is in two states or in none")


@dataclass(slots=True, eq=False)
class Swapped:
    """KV of a sequence that waits: host_pages hold its first num_tokens positions.

    step: of the plan that copies them out; None while no plan does. Until then the device pages are untouched.
    last_step: of the newest plan that may have written them.
    """

    lane: int
    num_tokens: int
    device_pages: tuple[int, ...]
    host_pages: tuple[int, ...]
    last_step: int | None
    step: int | None = None

    @property
    def copies(self) -> tuple[PageCopy, ...]:
        return tuple(map(PageCopy, self.device_pages, self.host_pages))
