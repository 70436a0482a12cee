import pytest

from headrace.serving.core.errors import InvariantError
from headrace.serving.core.plan import SlotRef
from headrace.serving.core.slots import Slots


def test_the_lowest_free_slot_is_taken_with_a_new_generation() -> None:
    slots = Slots(3)
    first, second = slots.take(), slots.take()
    assert (first, second) == (SlotRef(0, 1), SlotRef(1, 1))
    slots.release(first)
    assert slots.take() == SlotRef(0, 2)
    assert slots.num_free == 1


def test_a_slot_is_released_once() -> None:
    slots = Slots(1)
    ref = slots.take()
    with pytest.raises(InvariantError, match="without a free slot"):
        slots.take()
    slots.release(ref)
    with pytest.raises(InvariantError, match="not taken"):
        slots.release(ref)
    slots.take()
    with pytest.raises(InvariantError, match="not taken"):
        slots.release(ref)


def test_check_compares_with_the_tenants() -> None:
    slots = Slots(2)
    ref = slots.take()
    slots.check({ref})
    with pytest.raises(InvariantError):
        slots.check(set())
    with pytest.raises(InvariantError):
        slots.check({ref, SlotRef(1, 1)})
