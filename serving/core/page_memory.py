"""Pages of sequences: admission, growth, publication and release over the pool and the prefix cache.

Pages of a sequence that ends while plans in flight name them are *held*: they leave when no such plan is left. Pages
that are copied to the host *leave* with the plan that copies them: rows of that plan and of later ones may take them,
but until it was applied they are nobody's free pages.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.errors import InvariantError
from headrace.serving.core.page_pool import PagePool
from headrace.serving.core.prefix_cache import Entry, PageHash, PrefixCache
from headrace.serving.core.sequence import Sequence, num_pages_for


@dataclass(slots=True, eq=False)
class Hold:
    """Pages that plans up to last_step may still read and write; the last of the sequence first. leaving: whose KV
    last_step copies to the host; then rows of it may take them."""

    last_step: int
    pages: list[int]
    leaving: Sequence | None = None


class PageMemory:
    """Of one lane.

    Deterministic mode: hits round down to the grid of chunks, and of a sequence only the pages are published that whole
    chunks of its prompt wrote.
    """

    def __init__(self, config: SchedulerConfig, hash_page: PageHash, lane: int = 0) -> None:
        self._page_size = config.page_size
        self._grid = config.chunk_grid
        self._is_deterministic = config.deterministic
        self._caches = config.prefix_cache
        self.pool = PagePool(config.num_pages, null_page=lane * config.num_pages)
        self.cache = PrefixCache(self.pool, hash_page)
        self._holds: list[Hold] = []

    @property
    def num_available(self) -> int:
        """Pages that can be taken now: free ones, cached ones by eviction, and leaving ones that nobody shares."""
        return self.pool.num_free + self.pool.num_cached + sum(1 for _ in self._takeable())

    @property
    def is_draining(self) -> bool:
        """Held pages become available as plans in flight are applied, so it is worth waiting for them."""
        return self.num_draining > 0

    @property
    def num_draining(self) -> int:
        """Pages that become available as plans in flight are applied."""
        held = Counter(page for hold in self._holds for page in hold.pages)
        waiting = {page for hold in self._holds if hold.leaving is None for page in hold.pages}
        return sum(self.pool.num_holders(page) == held[page] for page in waiting)

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Tokens that an admission now would find cached."""
        return len(self._hits(sequence)) * self._page_size

    def admit(self, sequence: Sequence, num_spare: int) -> bool:
        """Give the sequence pages for all its known tokens, cached ones first; False (and no change) if they lack.

        num_spare pages must stay available. At least the last known token is never taken from the cache: it has to
        run for a sample, and its page is private, since it gets written. A sequence that was swapped out keeps what it
        had computed: the pages that are not cached any more, up to swapped.num_tokens, are to be copied in.
        """
        hits = self._hits(sequence)
        if sequence.swapped is not None:
            hits = hits[: sequence.swapped.num_tokens // self._page_size]
        num_new = num_pages_for(sequence.num_tokens, self._page_size) - len(hits)
        leaving = {page for _, page in self._takeable()}
        num_revived = sum(self.pool.is_cached(entry.page) or entry.page in leaving for entry in hits)
        if num_new + num_spare > self.num_available - num_revived:
            return False
        for entry in hits:
            self.pool.retain(entry.page)
        sequence.chain = hits
        sequence.pages = [entry.page for entry in hits] + [self._take() for _ in range(num_new)]
        self._begin(sequence, len(hits) * self._page_size)
        return True

    def take_back(self, sequence: Sequence, num_spare: int) -> bool:
        """The same for a sequence whose pages no plan has copied out yet: it gets those very pages. False also where a
        row of the step that is being planned took one of them: then that step copies them out first."""
        swapped = sequence.swapped
        num_known = num_pages_for(sequence.num_tokens, self._page_size)
        hold = next(h for h in self._holds if h.leaving is sequence)
        if swapped is None or not set(swapped.device_pages) <= set(hold.pages):
            return False
        self._holds.remove(hold)
        if num_known - len(hold.pages) + num_spare > self.num_available:
            self._holds.append(hold)
            return False
        sequence.pages = list(reversed(hold.pages))
        while len(sequence.pages) < num_known:
            sequence.pages.append(self._take())
        self._begin(sequence, 0)
        return True

    def lacks_pages(self, sequence: Sequence, num_spare: int) -> bool:
        """Whether an admission would fail now, and would not by waiting for plans in flight."""
        num_new = num_pages_for(sequence.num_tokens, self._page_size) - len(self._hits(sequence))
        return num_new + num_spare > self.num_available + self.num_draining

    def grow(self, sequence: Sequence) -> bool:
        """Make sure that the next position has a page; False if none is available."""
        if sequence.num_computed < len(sequence.pages) * self._page_size:
            return True
        if self.num_available == 0:
            return False
        sequence.pages.append(self._take())
        return True

    def publish(self, sequence: Sequence) -> None:
        """Publish the full pages whose KV is computed and known: all positions before the last known token."""
        num_tokens = sequence.num_tokens - 1
        if self._is_deterministic:
            num_tokens = min(num_tokens, len(sequence.request.prompt_ids)) // self._grid * self._grid
        num_full = num_tokens // self._page_size
        if self._caches and num_full > len(sequence.chain):
            self._extend_keys(sequence, num_full * self._page_size)
            self.cache.publish(sequence.chain, sequence.keys[:num_full], sequence.pages)

    def distrust(self, sequence: Sequence) -> None:
        """Nobody may find the sequence's pages any more: their KV can be damaged."""
        for page in sequence.pages:
            self.cache.forget_page(page)

    def release(self, sequence: Sequence, is_in_flight: bool) -> None:
        """Give the sequence's pages back: now, or when no plan in flight names them. Leaves go first to be evicted."""
        pages = list(reversed(sequence.pages))
        if is_in_flight:
            if sequence.last_step is None:
                raise InvariantError("a sequence in flight has no step")
            self._holds.append(Hold(sequence.last_step, pages))
        else:
            self._give_back(pages)

    def leave(self, sequence: Sequence, step: int) -> None:
        """Give the sequence's pages back once the plan step, which copies them to the host, was applied."""
        self._holds.append(Hold(step, list(reversed(sequence.pages)), leaving=sequence))

    def settle(self, oldest_in_flight: int | None) -> None:
        """A plan has left the flight; oldest_in_flight is the id of the oldest that is still there or will be."""
        due = [h for h in self._holds if oldest_in_flight is None or h.last_step < oldest_in_flight]
        if due:
            self._holds = [h for h in self._holds if not (oldest_in_flight is None or h.last_step < oldest_in_flight)]
            for hold in due:
                self._give_back(hold.pages)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise InvariantError unless every count equals the sequences and holds that name the page.

        Looks at every page and cache entry.
        """
        owned = [page for sequence in sequences for page in sequence.pages]
        self.pool.check(owned + [page for hold in self._holds for page in hold.pages])
        self.cache.check()

    def _begin(self, sequence: Sequence, num_cached: int) -> None:
        """Where the sequence goes on: behind what is cached, or where it was when it was swapped out."""
        swapped = sequence.swapped
        sequence.num_computed = num_cached if swapped is None else swapped.num_tokens
        sequence.num_to_prefill = sequence.num_tokens
        if swapped is not None and sequence.outputs and swapped.num_tokens == sequence.num_tokens - 1:
            sequence.num_to_prefill = swapped.num_tokens

    def _hits(self, sequence: Sequence) -> list[Entry]:
        self._extend_keys(sequence, sequence.num_tokens)
        num_reusable = (sequence.num_tokens - 1) // self._page_size
        hits = self.cache.find(sequence.keys[:num_reusable])
        pages_of_cell = self._grid // self._page_size
        return hits[: len(hits) // pages_of_cell * pages_of_cell]

    def _give_back(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.pool.release(page)

    def _take(self) -> int:
        if self.pool.num_free == 0 and self.pool.num_cached:
            self.cache.evict()
        return self.pool.alloc() if self.pool.num_free else self._take_leaving()

    def _takeable(self) -> Iterable[tuple[Hold, int]]:
        for hold in self._holds:
            if hold.leaving is not None:
                yield from ((hold, page) for page in hold.pages if self.pool.num_holders(page) == 1)

    def _take_leaving(self) -> int:
        """Its one holder is the caller now. The plan that it leaves with copies it before any row of it writes."""
        for hold, page in self._takeable():
            if self.pool.is_published(page):
                self.cache.forget_page(page)
            hold.pages.remove(page)
            return page
        raise InvariantError("a page is wanted, but none is available")

    def _extend_keys(self, sequence: Sequence, num_tokens: int) -> None:
        if not self._caches:
            return
        request = sequence.request
        num_shared = request.shared_prefix_tokens // self._page_size
        for i in range(len(sequence.keys), num_tokens // self._page_size):
            token_ids = sequence.token_ids(i * self._page_size, (i + 1) * self._page_size)
            namespace = request.shared_namespace if i < num_shared else request.cache_namespace
            sequence.keys.append(self.cache.next_key(sequence.keys, namespace, token_ids))
