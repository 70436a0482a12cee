"""The bounded way of commands into the step loop."""

import threading

from headrace.serving.core.request import (
    CancelReason,
    RejectionReason,
    Request,
    RequestId,
    SamplingParams,
    StopRule,
)
from headrace.serving.engine.inbox import Commands, Inbox


def request(number: int, num_prompt: int = 3) -> Request:
    return Request(
        request_id=RequestId(number),
        prompt_ids=(1,) * num_prompt,
        sampling=SamplingParams(),
        stop=StopRule(max_tokens=1),
    )


def test_take_empties_it_in_order() -> None:
    inbox = Inbox()
    for number in (1, 2, 3):
        assert inbox.submit(request(number)) is None
    inbox.cancel(RequestId(2), CancelReason.CLIENT)
    inbox.probe(4)
    inbox.probe(5)
    inbox.drain()
    commands = inbox.take(wait=False)
    assert [r.request_id for r in commands.submits] == [1, 2, 3]
    assert commands.cancels == ((RequestId(2), CancelReason.CLIENT),)
    assert commands.drain
    assert commands.probe == 5
    assert inbox.take(wait=False) == Commands()


def test_submits_over_the_bound_are_refused_and_cancels_still_pass() -> None:
    inbox = Inbox(max_requests=2)
    assert inbox.submit(request(1)) is None
    assert inbox.submit(request(2)) is None
    rejection = inbox.submit(request(3))
    assert rejection is not None
    assert rejection.reason is RejectionReason.QUEUE_FULL
    assert rejection.retry_after_ms
    for number in range(1, 500):
        inbox.cancel(RequestId(number), CancelReason.DISCONNECT)
    assert len(inbox.take(wait=False).cancels) == 499
    assert inbox.submit(request(3)) is None


def test_prompt_tokens_are_bounded_too_but_one_prompt_always_fits() -> None:
    inbox = Inbox(max_prompt_tokens=10)
    assert inbox.submit(request(1, 11)) is None
    assert inbox.submit(request(2, 1)) is not None
    inbox.take(wait=False)
    assert inbox.submit(request(2, 4)) is None
    assert inbox.submit(request(3, 6)) is None
    assert inbox.submit(request(4, 1)) is not None


def test_a_cancel_that_repeats_takes_no_room_and_keeps_its_first_reason() -> None:
    inbox = Inbox()
    inbox.cancel(RequestId(1), CancelReason.STOP_STRING)
    for _ in range(1000):
        inbox.cancel(RequestId(1), CancelReason.DISCONNECT)
    assert inbox.take(wait=False).cancels == ((RequestId(1), CancelReason.STOP_STRING),)


def test_waiting_takers_wake_for_every_command() -> None:
    inbox = Inbox()
    taken: list[Commands] = []

    def take() -> None:
        taken.append(inbox.take(wait=True))

    for command in (
        lambda: inbox.submit(request(1)),
        lambda: inbox.cancel(RequestId(1), CancelReason.CLIENT),
        inbox.drain,
        lambda: inbox.probe(0),
        inbox.close,
    ):
        taken.clear()
        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        command()
        thread.join(10)
        assert len(taken) == 1
        assert taken[0] != Commands()


def test_a_closed_inbox_never_waits_again() -> None:
    inbox = Inbox()
    inbox.close()
    assert inbox.take(wait=True).closed
    assert inbox.take(wait=True).closed
