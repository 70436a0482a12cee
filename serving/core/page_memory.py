"""Pages of sequences: admission, growth, publication and release over the pool and the prefix cache.

Pages of a sequence that ends while plans in flight name them are *held*: they leave when no such plan is left.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.errors import InvariantError
from headrace.serving.core.page_pool import PagePool
from headrace.serving.core.prefix_cache import Entry, PageHash, PrefixCache
from headrace.serving.core.sequence import Sequence, num_pages_for


@dataclass(frozen=True, slots=True)
class Hold:
    """Pages that plans up to last_step may still read and write."""

    last_step: int
    pages: tuple[int, ...]


class PageMemory:
    """Of one lane."""

    def __init__(self, config: SchedulerConfig, hash_page: PageHash, lane: int = 0) -> None:
        self._page_size = config.page_size
        self._caches = config.prefix_cache
        self.pool = PagePool(config.num_pages, null_page=lane * config.num_pages)
        self.cache = PrefixCache(self.pool, hash_page)
        self._holds: list[Hold] = []

    @property
    def num_available(self) -> int:
        """Pages that can be taken now: free ones, and cached ones by eviction."""
        return self.pool.num_free + self.pool.num_cached

    @property
    def is_draining(self) -> bool:
        """Held pages become available as plans in flight are applied, so it is worth waiting for them."""
        held = Counter(page for hold in self._holds for page in hold.pages)
        return any(self.pool.num_holders(page) == count for page, count in held.items())

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Tokens that an admission now would find cached."""
        return len(self._hits(sequence)) * self._page_size

    def admit(self, sequence: Sequence, num_spare: int) -> bool:
        """Give the sequence pages for all its known tokens, cached ones first; False (and no change) if they lack.

        num_spare pages must stay available. At least the last known token is never taken from the cache: it has to
        run for a sample, and its page is private, since it gets written.
        """
        hits = self._hits(sequence)
        num_new = num_pages_for(sequence.num_tokens, self._page_size) - len(hits)
        num_revived = sum(self.pool.is_cached(entry.page) for entry in hits)
        if num_new + num_spare > self.num_available - num_revived:
            return False
        for entry in hits:
            self.pool.retain(entry.page)
        sequence.chain = hits
        sequence.pages = [entry.page for entry in hits] + [self._take() for _ in range(num_new)]
        sequence.num_computed = len(hits) * self._page_size
        sequence.num_to_prefill = sequence.num_tokens
        return True

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
        num_full = (sequence.num_tokens - 1) // self._page_size
        if self._caches and num_full > len(sequence.chain):
            self._extend_keys(sequence, num_full * self._page_size)
            self.cache.publish(
                sequence.chain, sequence.keys[:num_full], sequence.request.cache_namespace, sequence.pages
            )

    def distrust(self, sequence: Sequence) -> None:
        """Nobody may find the sequence's pages any more: their KV can be damaged."""
        for page in sequence.pages:
            self.cache.forget_page(page)

    def release(self, sequence: Sequence, is_in_flight: bool) -> None:
        """Give the sequence's pages back: now, or when no plan in flight names them. Leaves go first to be evicted."""
        pages = tuple(reversed(sequence.pages))
        if is_in_flight:
            if sequence.last_step is None:
                raise InvariantError("a sequence in flight has no step")
            self._holds.append(Hold(sequence.last_step, pages))
        else:
            self._give_back(pages)

    def settle(self, oldest_in_flight: int | None) -> None:
        """A plan has left the flight; oldest_in_flight is the id of the oldest that is still there."""
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

    def _hits(self, sequence: Sequence) -> list[Entry]:
        self._extend_keys(sequence, sequence.num_tokens)
        num_reusable = (sequence.num_tokens - 1) // self._page_size
        return self.cache.find(sequence.keys[:num_reusable], sequence.request.cache_namespace)

    def _give_back(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.pool.release(page)

    def _take(self) -> int:
        if self.pool.num_free == 0:
            self.cache.evict()
        return self.pool.alloc()

    def _extend_keys(self, sequence: Sequence, num_tokens: int) -> None:
        if self._caches:
            for i in range(len(sequence.keys), num_tokens // self._page_size):
                token_ids = sequence.token_ids(i * self._page_size, (i + 1) * self._page_size)
                sequence.keys.append(self.cache.next_key(sequence.keys, sequence.request.cache_namespace, token_ids))
