import pytest

from headrace.serving.core.errors import InvariantError
from headrace.serving.core.fair_share import Tenant
from headrace.serving.core.plan import SlotRef
from headrace.serving.core.request import Priority, RejectionReason
from headrace.serving.core.sequence import Sequence
from headrace.serving.core.waiting_queue import WaitingQueue
from tests.serving.core.driver import make_config, make_request


def sequence(arrival: int, prompt: int = 5) -> Sequence:
    return Sequence(request=make_request(arrival, prompt), arrival=arrival, submitted_s=0.0)


def test_a_preempted_sequence_comes_back_to_its_place() -> None:
    queue = WaitingQueue(make_config())
    for arrival in (3, 1, 2):
        queue.add(sequence(arrival))
    assert [s.arrival for s in queue.sequences] == [1, 2, 3]
    assert queue.first(0.0).arrival == 1
    queue.check()


def test_the_number_of_requests_is_bounded() -> None:
    queue = WaitingQueue(make_config(max_queued_requests=2))
    queue.add(sequence(0))
    assert queue.refuse(make_request(9, 5), 0.0) is None
    queue.add(sequence(1))
    rejection = queue.refuse(make_request(9, 5), 0.0)
    assert rejection is not None
    assert rejection.reason == RejectionReason.QUEUE_FULL
    assert "max_queued_requests=2" in rejection.message


def test_the_number_of_prompt_tokens_is_bounded_but_one_request_always_may_wait() -> None:
    queue = WaitingQueue(make_config(max_queued_prompt_tokens=10))
    assert queue.refuse(make_request(9, 11), 0.0) is None
    queue.add(sequence(0, prompt=6))
    assert queue.refuse(make_request(9, 4), 0.0) is None
    rejection = queue.refuse(make_request(9, 5), 0.0)
    assert rejection is not None
    assert "max_queued_prompt_tokens=10" in rejection.message
    queue.remove(queue.first(0.0))
    assert queue.refuse(make_request(9, 5), 0.0) is None


def test_the_hint_is_the_time_that_half_the_queue_takes() -> None:
    queue = WaitingQueue(make_config(max_queued_requests=5))
    waiting = [sequence(i) for i in range(8)]
    for s in waiting:
        queue.add(s)
    for i in range(3):
        queue.start(waiting[i], now_s=2.0 * i)
    rejection = queue.refuse(make_request(9, 5), 4.0)
    assert rejection is not None and rejection.retry_after_ms == 3 * 2_000


@pytest.mark.parametrize("damage", ["order", "count", "state"])
def test_check_finds_damage(damage: str) -> None:
    queue = WaitingQueue(make_config())
    first, second = sequence(0), sequence(1)
    second.tenant = first.tenant
    queue.add(first)
    queue.add(second)
    if damage == "order":
        first.arrival = 5
    elif damage == "count":
        queue._num_prompt_tokens += 1
    else:
        first.slot = SlotRef(0, 1)
    with pytest.raises(InvariantError):
        queue.check()


def test_a_class_ages_though_the_one_whose_turn_it_is_has_just_come() -> None:
    """Else requests that come, and go before they start, keep the others of their class from ever being served."""
    queue = WaitingQueue(make_config(aging_s=10.0))
    for arrival, submitted_s, served, priority in (
        (0, 0.0, 100.0, Priority.LOW),
        (1, 95.0, 0.0, Priority.LOW),
        (2, 99.0, 50.0, Priority.HIGH),
    ):
        queue.add(
            Sequence(
                request=make_request(arrival, 5, priority=priority),
                arrival=arrival,
                submitted_s=submitted_s,
                tenant=Tenant(str(arrival), served=served),
            )
        )
    assert queue.first(100.0).arrival == 1, "the class was not served for 100 s; in it the tenant had least"
    assert queue.first(5.0).arrival == 2
