import hashlib

import pytest

from headrace.serving.core.errors import InvariantError
from headrace.serving.core.page_pool import PagePool
from headrace.serving.core.prefix_cache import Entry, PageKey, PrefixCache, sha256_page

NAMESPACE = b"n" * 32
Tokens = tuple[int, ...]


class World:
    """A cache over a pool of 15 pages; prefixes are lists of page contents."""

    def __init__(self, *, constant_hash: bool = False) -> None:
        self.pool = PagePool(16)
        self.cache = PrefixCache(self.pool, (lambda parent, ids: b"x") if constant_hash else sha256_page)

    def keys(self, contents: list[Tokens], namespace: bytes = NAMESPACE) -> list[PageKey]:
        keys: list[PageKey] = []
        for token_ids in contents:
            keys.append(self.cache.next_key(keys, namespace, token_ids))
        return keys

    def publish(self, contents: list[Tokens], namespace: bytes = NAMESPACE) -> list[int]:
        """Pages of a prefix, published and then let go, leaves first."""
        pages = [self.pool.alloc() for _ in contents]
        self.cache.publish([], self.keys(contents, namespace), pages)
        for page in reversed(pages):
            self.pool.release(page)
        self.cache.check()
        return pages

    def find(self, contents: list[Tokens], namespace: bytes = NAMESPACE) -> list[int]:
        return [entry.page for entry in self.cache.find(self.keys(contents, namespace))]


def test_the_digest_is_sha256_over_the_parent_and_little_endian_words() -> None:
    digest = sha256_page(NAMESPACE, (1, 70_000))
    assert digest == hashlib.sha256(NAMESPACE + b"\x01\0\0\0" + b"\x70\x11\x01\0").digest()


def test_the_longest_published_prefix_is_found() -> None:
    world = World()
    pages = world.publish([(1, 2), (3, 4), (5, 6)])
    assert world.find([(1, 2), (3, 4), (5, 6), (7, 8)]) == pages
    assert world.find([(1, 2), (3, 4), (9, 9)]) == pages[:2]
    assert world.find([(3, 4)]) == []


def test_equal_tokens_in_another_namespace_are_not_found() -> None:
    world = World()
    world.publish([(1, 2)])
    assert world.find([(1, 2)], b"m" * 32) == []


def test_equal_pages_below_different_parents_are_different() -> None:
    world = World()
    world.publish([(1, 2), (5, 6)])
    pages = world.publish([(3, 4), (5, 6)])
    assert world.find([(3, 4), (5, 6)]) == pages


def test_a_hash_that_always_collides_never_returns_foreign_pages() -> None:
    world = World(constant_hash=True)
    pages = world.publish([(1, 2), (3, 4)])
    assert world.find([(1, 2)]) == pages[:1]
    assert world.find([(3, 4)]) == []
    assert world.find([(1, 2)], b"m" * 32) == []
    assert world.find([(1, 2), (1, 2)]) == pages[:1], "the parent counts"
    assert world.publish([(9, 9)]) and world.find([(9, 9)]) == []
    assert world.pool.num_cached == 1, "a taken digest keeps its first page, and others stay private"


def test_a_second_page_of_equal_content_stays_private_but_can_be_built_on() -> None:
    world = World()
    first = world.publish([(1, 2)])
    own = [world.pool.alloc(), world.pool.alloc()]
    chain: list[Entry] = []
    keys = world.keys([(1, 2), (3, 4)])
    world.cache.publish(chain, keys, own)
    assert [entry.page for entry in chain] == [first[0], own[1]]
    assert not world.pool.is_published(own[0])
    world.cache.check()


def test_eviction_takes_the_leaf_that_was_let_go_first() -> None:
    world = World()
    pages = world.publish([(1, 2), (3, 4)])
    world.cache.evict()
    assert world.find([(1, 2), (3, 4)]) == pages[:1]
    world.cache.evict()
    assert world.find([(1, 2)]) == []
    assert world.pool.num_free == 15
    with pytest.raises(InvariantError, match="without a cached page"):
        world.cache.evict()


def test_forgetting_a_page_forgets_what_hangs_below_it() -> None:
    world = World()
    pages = world.publish([(1, 2), (3, 4), (5, 6)])
    world.publish([(7, 8)])
    world.cache.forget_page(pages[1])
    world.cache.check()
    assert world.find([(1, 2), (3, 4), (5, 6)]) == pages[:1]
    assert len(world.cache) == 2
    world.cache.forget_page(pages[1])
    assert len(world.cache) == 2


def test_publishing_goes_on_after_an_ancestor_was_forgotten() -> None:
    world = World()
    first = world.publish([(1, 2)])
    own = [world.pool.alloc() for _ in range(3)]
    keys = world.keys([(1, 2), (3, 4), (5, 6)])
    chain: list[Entry] = []
    world.cache.publish(chain, keys[:2], own)
    world.cache.forget_page(first[0])
    assert [entry.is_live for entry in chain] == [False, False]
    world.cache.publish(chain, keys, own)
    assert [entry.page for entry in chain] == own
    assert [entry.page for entry in world.cache.find(keys)] == own
    world.cache.check()


def test_check_finds_an_entry_whose_page_was_given_away() -> None:
    world = World()
    (page,) = world.publish([(1, 2)])
    world.pool.unpublish(page)
    with pytest.raises(InvariantError, match=f"page {page}"):
        world.cache.check()
