"""Which page of KV memory is free, referenced or cached. The first page is the null page and is never handed out.

A page is *free*, *referenced* (one count per holder) or *cached* (no holder, but its content is published in the
prefix cache, for an owner). The pool knows states and counts only; what a published page holds is the prefix cache's
business.
"""

from collections import Counter
from collections.abc import Iterable

from headrace.serving.core.errors import InvariantError

STALE_TURNS = 8
"""A cached page that was not used while so many times the pool's pages became cached has lost the protection of its
owner's share."""


class PagePool:
    """Pages null_page + 1 … null_page + num_pages - 1. Every wrong transition raises InvariantError."""

    def __init__(self, num_pages: int, null_page: int = 0) -> None:
        self._usable = range(null_page + 1, null_page + num_pages)
        # A stack: a page just freed is the next one handed out, so that a use after free shows at once in tests.
        self._free = list(reversed(self._usable))
        self._counts: dict[int, int] = {}
        self._published: dict[int, bytes] = {}
        """The owner by page."""
        self._cached: dict[bytes, dict[int, int]] = {}
        """By owner, in the order in which they lost their last holder: the first is the least recently used. With the
        tick in which that was."""
        self._num_cached = 0
        self._tick = 0

    @property
    def num_usable(self) -> int:
        return len(self._usable)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def free_pages(self) -> tuple[int, ...]:
        return tuple(self._free)

    def num_holders(self, page: int) -> int:
        return self._counts.get(page, 0)

    def is_cached(self, page: int) -> bool:
        owner = self._published.get(page)
        return owner is not None and page in self._cached.get(owner, ())

    def is_published(self, page: int) -> bool:
        return page in self._published

    def next_evicted(self) -> int | None:
        """The cached page that lost its last holder first, of the owners that have more than an equal share of all
        cached pages; of all owners where none has, or where that page is stale."""
        if not self._cached:
            return None
        heads = {owner: next(iter(pages.items())) for owner, pages in self._cached.items()}
        page, tick = min(heads.values(), key=lambda head: head[1])
        if len(heads) == 1 or self._tick - tick > STALE_TURNS * len(self._usable):
            return page
        over = [head for owner, head in heads.items() if len(self._cached[owner]) * len(heads) > self._num_cached]
        return min(over or heads.values(), key=lambda head: head[1])[0]

    def alloc(self) -> int:
        """Take a free page; its one holder is the caller."""
        if not self._free:
            raise InvariantError("alloc without a free page")
        page = self._free.pop()
        self._counts[page] = 1
        return page

    def retain(self, page: int) -> None:
        """One more holder of a referenced or cached page."""
        if self.is_cached(page):
            self._uncache(page)
            self._counts[page] = 1
        elif page in self._counts:
            self._counts[page] += 1
        else:
            raise InvariantError(f"retain of page {page}, which is free")

    def release(self, page: int) -> None:
        """One holder less; without holders the page becomes cached if it is published, else free."""
        count = self._counts.get(page)
        if count is None:
            raise InvariantError(f"release of page {page}, which nobody holds")
        if count > 1:
            self._counts[page] = count - 1
            return
        del self._counts[page]
        owner = self._published.get(page)
        if owner is None:
            self._free.append(page)
            return
        self._tick += 1
        self._num_cached += 1
        self._cached.setdefault(owner, {})[page] = self._tick

    def publish(self, page: int, owner: bytes = b"") -> None:
        """The content of a referenced page is now known to the prefix cache; its share is the owner's."""
        if page not in self._counts or page in self._published:
            raise InvariantError(f"publish of page {page}, which is not referenced or is published already")
        self._published[page] = owner

    def unpublish(self, page: int) -> None:
        """The prefix cache has forgotten the page; it becomes free if nobody holds it."""
        if page not in self._published:
            raise InvariantError(f"unpublish of page {page}, which is not published")
        if self.is_cached(page):
            self._uncache(page)
            self._free.append(page)
        del self._published[page]

    def _uncache(self, page: int) -> None:
        owner = self._published[page]
        pages = self._cached[owner]
        del pages[page]
        if not pages:
            del self._cached[owner]
        self._num_cached -= 1

    def check_sum(self) -> None:
        """Raise InvariantError if pages were lost or doubled; constant time."""
        total = len(self._free) + len(self._counts) + self._num_cached
        if total != self.num_usable:
            raise InvariantError(f"{total} pages are free, referenced or cached, but {self.num_usable} are usable")

    def check(self, holders: Iterable[int] | None = None) -> None:
        """Raise InvariantError if a page is in two states or in none, or if counts differ from the given holders.

        Time grows with the pool.
        """
        cached = {page: owner for owner, pages in self._cached.items() for page in pages}
        states = [*self._free, *self._counts, *cached]
        if sorted(states) != list(self._usable):
            raise InvariantError(
                f"{len(self._free)} free + {len(self._counts)} referenced + {len(cached)} cached pages are not "
                f"exactly the {self.num_usable} usable pages"
            )
        if len(cached) != self._num_cached:
            raise InvariantError("the count of cached pages is wrong")
        if any(count < 1 for count in self._counts.values()):
            raise InvariantError("a referenced page has no holder")
        if not cached.items() <= self._published.items() or self._published.keys() & set(self._free):
            raise InvariantError("published pages must be referenced or cached, and cached pages published")
        if holders is not None and Counter(holders) != self._counts:
            raise InvariantError("reference counts differ from the number of holders")
