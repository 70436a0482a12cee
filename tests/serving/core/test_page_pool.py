import pytest

from headrace.serving.core.errors import InvariantError
from headrace.serving.core.page_pool import PagePool


def test_every_page_but_the_null_page_is_handed_out_once() -> None:
    pool = PagePool(6)
    pages = [pool.alloc() for _ in range(5)]
    assert sorted(pages) == [1, 2, 3, 4, 5]
    assert 0 not in pages
    with pytest.raises(InvariantError, match="without a free page"):
        pool.alloc()


def test_a_page_is_free_again_after_its_last_holder() -> None:
    pool = PagePool(3)
    page = pool.alloc()
    pool.retain(page)
    pool.release(page)
    assert pool.num_holders(page) == 1
    assert pool.num_free == 1
    pool.release(page)
    assert pool.num_free == 2
    pool.check([])


def test_a_published_page_is_cached_without_holders_and_can_be_revived() -> None:
    pool = PagePool(3)
    page = pool.alloc()
    pool.publish(page)
    pool.release(page)
    assert (pool.num_free, pool.num_cached, pool.is_cached(page)) == (1, 1, True)
    pool.retain(page)
    assert (pool.num_cached, pool.num_holders(page)) == (0, 1)
    pool.release(page)
    pool.unpublish(page)
    assert (pool.num_free, pool.num_cached) == (2, 0)


def test_unpublishing_a_referenced_page_leaves_it_with_its_holder() -> None:
    pool = PagePool(3)
    page = pool.alloc()
    pool.publish(page)
    pool.unpublish(page)
    pool.check([page])
    pool.release(page)
    assert pool.num_free == 2


def test_least_recently_used_follows_the_order_of_the_last_release() -> None:
    pool = PagePool(4)
    first, second, third = (pool.alloc() for _ in range(3))
    for page in (first, second, third):
        pool.publish(page)
    for page in (second, first, third):
        pool.release(page)
    assert pool.next_evicted() == second
    pool.retain(second)
    pool.release(second)
    assert pool.next_evicted() == first


@pytest.mark.parametrize("action", ["retain", "release", "publish", "unpublish"])
def test_a_wrong_transition_of_a_free_page_raises(action: str) -> None:
    pool = PagePool(3)
    with pytest.raises(InvariantError, match="page 1"):
        getattr(pool, action)(1)


def test_a_double_release_raises() -> None:
    pool = PagePool(3)
    page = pool.alloc()
    pool.release(page)
    with pytest.raises(InvariantError, match="nobody holds"):
        pool.release(page)


def test_check_compares_counts_with_holders() -> None:
    pool = PagePool(4)
    page = pool.alloc()
    pool.check([page])
    with pytest.raises(InvariantError, match="number of holders"):
        pool.check([page, page])
    with pytest.raises(InvariantError, match="number of holders"):
        pool.check([])


def test_a_lost_page_shows_in_the_sum() -> None:
    pool = PagePool(4)
    pool.check_sum()
    pool._free.pop()
    with pytest.raises(InvariantError, match="2 pages"):
        pool.check_sum()


@pytest.mark.parametrize("damage", ["_free", "_counts", "_cached"])
def test_check_finds_a_page_in_two_states_or_in_none(damage: str) -> None:
    pool = PagePool(4)
    page = pool.alloc()
    state = getattr(pool, damage)
    if damage == "_free":
        state.append(page)
    elif damage == "_counts":
        state.clear()
    else:
        state[b""] = {page: 1}
    with pytest.raises(InvariantError):
        pool.check()
