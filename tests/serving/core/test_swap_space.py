import pytest

from headrace.serving.core.errors import InvariantError
from headrace.serving.core.swap_space import SwapSpace


def test_host_pages_are_taken_once_and_come_back() -> None:
    space = SwapSpace(3, first=6)
    first, second = space.take(2), space.take(1)
    assert sorted(first + second) == [6, 7, 8]
    with pytest.raises(InvariantError, match="1 host pages are wanted, but 0 are free"):
        space.take(1)
    space.release(first)
    assert (space.num_pages, space.num_free) == (3, 2)
    space.check(second, deep=True)
    with pytest.raises(InvariantError, match="not taken"):
        space.release(first)


def test_host_pages_that_a_plan_reads_wait_for_it() -> None:
    space = SwapSpace(2)
    pages = space.take(2)
    space.release(pages, last_step=4)
    space.settle(4)
    space.check([], deep=True)
    assert space.num_free == 0
    space.settle(5)
    assert space.num_free == 2


@pytest.mark.parametrize("damage", ["lost", "doubled", "owner"])
def test_check_finds_damage(damage: str) -> None:
    space = SwapSpace(3)
    pages = space.take(1)
    if damage == "lost":
        space._free.pop()
    elif damage == "doubled":
        space._free[0] = space._free[1]
    with pytest.raises(InvariantError):
        space.check(() if damage == "owner" else pages, deep=True)
