"""Which full pages hold the KV of which token prefix.

The identity of a page is its whole token chain in its namespace. The SHA-256 chain only finds a candidate: a hit is
believed after its tokens, its namespace and its parent entry compare equal, so even a weak hash cannot return the KV
of another prompt. A chain may begin in a namespace that all tenants share and go on in one that is private: the first
private page hashes both, and everything below it is found in the private one only.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from struct import pack
from typing import NamedTuple

from headrace.serving.core.errors import InvariantError
from headrace.serving.core.page_pool import PagePool

PageHash = Callable[[bytes, tuple[int, ...]], bytes]
"""(digest of the page before, or the namespace; token ids of the page) -> digest."""


def sha256_page(parent: bytes, token_ids: tuple[int, ...]) -> bytes:
    """32 bytes; ids as little-endian 32-bit words."""
    return hashlib.sha256(parent + pack(f"<{len(token_ids)}I", *token_ids)).digest()


class PageKey(NamedTuple):
    """Digest of the chain up to and with this page, the token ids of this page, and whose it is."""

    digest: bytes
    token_ids: tuple[int, ...]
    namespace: bytes


def chained(parent: PageKey | None, namespace: bytes) -> bytes:
    """What the hash of a page in a namespace starts from."""
    if parent is None:
        return namespace
    return parent.digest if parent.namespace == namespace else parent.digest + namespace


@dataclass(slots=True, eq=False)
class Entry:
    """One published page. Its parent is live as long as it is: forgetting an entry forgets what hangs below."""

    key: PageKey
    page: int
    parent: "Entry | None"
    children: dict[int, "Entry"] = field(default_factory=dict)
    is_live: bool = True

    def holds(self, key: PageKey, parent: "Entry | None") -> bool:
        """Compare contents, not digests."""
        return self.key.token_ids == key.token_ids and self.parent is parent and self.key.namespace == key.namespace


class PrefixCache:
    """Owns the published state of the pool's pages. Holds no page itself: a hit must be retained by its user."""

    def __init__(self, pool: PagePool, hash_page: PageHash = sha256_page) -> None:
        self._pool = pool
        self._hash_page = hash_page
        self._by_digest: dict[bytes, Entry] = {}
        self._by_page: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._by_digest)

    def next_key(self, keys: Sequence[PageKey], namespace: bytes, token_ids: tuple[int, ...]) -> PageKey:
        """The key of the page with token_ids that follows the pages of keys."""
        above = chained(keys[-1] if keys else None, namespace)
        return PageKey(self._hash_page(above, token_ids), token_ids, namespace)

    def find(self, keys: Sequence[PageKey]) -> list[Entry]:
        """Entries of the longest published prefix. Changes nothing."""
        found: list[Entry] = []
        for key in keys:
            entry = self._by_digest.get(key.digest)
            if entry is None or not entry.holds(key, found[-1] if found else None):
                break
            found.append(entry)
        return found

    def publish(self, chain: list[Entry], keys: Sequence[PageKey], pages: Sequence[int]) -> None:
        """Make pages[i] findable under keys[i] for all i, and let chain name the entries of that prefix.

        chain is the caller's result of an earlier find or publish for the same keys. Where an equal prefix is known
        by another page, that one stays and the caller's page remains private. A digest taken by other content ends
        the published prefix there.
        """
        while chain and not chain[-1].is_live:
            chain.pop()
        for i in range(len(chain), len(keys)):
            parent = chain[-1] if chain else None
            entry = self._by_digest.get(keys[i].digest)
            if entry is None:
                entry = Entry(keys[i], pages[i], parent)
                self._pool.publish(pages[i], keys[i].namespace)
                self._by_digest[keys[i].digest] = entry
                self._by_page[pages[i]] = entry
                if parent is not None:
                    parent.children[entry.page] = entry
            elif not entry.holds(keys[i], parent):
                return
            chain.append(entry)

    def evict(self) -> None:
        """Free the cached page whose turn it is, and forget what hangs below it. Namespaces own pages: one that has
        more than its share of the cached ones loses its own first, so no tenant can drive out all others' pages."""
        page = self._pool.next_evicted()
        if page is None:
            raise InvariantError("evict without a cached page")
        self._forget(self._by_page[page])

    def forget_page(self, page: int) -> None:
        """Unpublish a page whose content cannot be trusted, and what hangs below; nothing if it is not published."""
        entry = self._by_page.get(page)
        if entry is not None:
            self._forget(entry)

    def _forget(self, top: Entry) -> None:
        if top.parent is not None:
            del top.parent.children[top.page]
        stack = [top]
        while stack:
            entry = stack.pop()
            stack.extend(entry.children.values())
            entry.is_live = False
            del self._by_digest[entry.key.digest]
            del self._by_page[entry.page]
            self._pool.unpublish(entry.page)

    def check(self) -> None:
        """Raise InvariantError unless every entry stands for the chain that its digest and its parents spell."""
        if len(self._by_digest) != len(self._by_page):
            raise InvariantError("two entries share a page")
        for digest, entry in self._by_digest.items():
            parent = entry.parent
            above = chained(None if parent is None else parent.key, entry.key.namespace)
            if not (
                entry.is_live
                and self._by_page.get(entry.page) is entry
                and self._pool.is_published(entry.page)
                and digest == entry.key.digest == self._hash_page(above, entry.key.token_ids)
            ):
                raise InvariantError(f"the entry of page {entry.page} is inconsistent")
            if parent is not None and not (parent.is_live and parent.children.get(entry.page) is entry):
                raise InvariantError(f"the entry of page {entry.page} has lost its parent")
