"""Which page of KV memory is free, referenced or cached. The first page is the null page and is never handed out.

A page is *free*, *referenced* (one count per holder) or *cached* (no holder, but its content is published in the
prefix cache). The pool knows states and counts only; what a published page holds is the prefix cache's business.
"""

from collections import Counter
from collections.abc import Iterable

from headrace.serving.core.errors import InvariantError


class PagePool:
    """Pages null_page + 1 … null_page + num_pages - 1. Every wrong transition raises InvariantError."""

    def __init__(self, num_pages: int, null_page: int = 0) -> None:
        self._usable = range(null_page + 1, null_page + num_pages)
        # A stack: a page just freed is the next one handed out, so that a use after free shows at once in tests.
        self._free = list(reversed(self._usable))
        self._counts: dict[int, int] = {}
        self._published: set[int] = set()
        self._cached: dict[int, None] = {}
        """In the order in which they lost their last holder: the first is the least recently used."""

    @property
    def num_usable(self) -> int:
        return len(self._usable)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def free_pages(self) -> tuple[int, ...]:
        return tuple(self._free)

    def num_holders(self, page: int) -> int:
        return self._counts.get(page, 0)

    def is_cached(self, page: int) -> bool:
        return page in self._cached

    def is_published(self, page: int) -> bool:
        return page in self._published

    def least_recently_used(self) -> int | None:
        """The cached page that lost its last holder first."""
        return next(iter(self._cached), None)

    def alloc(self) -> int:
        """Take a free page; its one holder is the caller."""
        if not self._free:
            raise InvariantError("alloc without a free page")
        page = self._free.pop()
        self._counts[page] = 1
        return page

    def retain(self, page: int) -> None:
        """One more holder of a referenced or cached page."""
        if page in self._cached:
            del self._cached[page]
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
        if page in self._published:
            self._cached[page] = None
        else:
            self._free.append(page)

    def publish(self, page: int) -> None:
        """The content of a referenced page is now known to the prefix cache."""
        if page not in self._counts or page in self._published:
            raise InvariantError(f"publish of page {page}, which is not referenced or is published already")
        self._published.add(page)

    def unpublish(self, page: int) -> None:
        """The prefix cache has forgotten the page; it becomes free if nobody holds it."""
        if page not in self._published:
            raise InvariantError(f"unpublish of page {page}, which is not published")
        self._published.remove(page)
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def check_sum(self) -> None:
        """Raise InvariantError if pages were lost or doubled; constant time."""
        total = len(self._free) + len(self._counts) + len(self._cached)
        if total != self.num_usable:
            raise InvariantError(f"{total} pages are free, referenced or cached, but {self.num_usable} are usable")

    def check(self, holders: Iterable[int] | None = None) -> None:
        """Raise InvariantError if a page is in two states or in none, or if counts differ from the given holders.

        Time grows with the pool.
        """
        states = [*self._free, *self._counts, *self._cached]
        if sorted(states) != list(self._usable):
            raise InvariantError(
                f"{len(self._free)} free + {len(self._counts)} referenced + {len(self._cached)} cached pages are not "
                f"exactly the {self.num_usable} usable pages"
            )
        if any(count < 1 for count in self._counts.values()):
            raise InvariantError("a referenced page has no holder")
        if not self._cached.keys() <= self._published or self._published & set(self._free):
            raise InvariantError("published pages must be referenced or cached, and cached pages published")
        if holders is not None and Counter(holders) != self._counts:
            raise InvariantError("reference counts differ from the number of holders")
