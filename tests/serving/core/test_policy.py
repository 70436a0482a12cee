import pytest

from headrace.serving.core.policy import (
    MAX_OPTIMISTIC_PREEMPTIONS,
    chunk_tokens,
    pages_to_keep_free,
    pick_victim,
    queue_rank,
)
from headrace.serving.core.sequence import Sequence
from tests.serving.core.driver import make_request


def sequence(arrival: int, prompt: int = 5, max_tokens: int = 8, **state: object) -> Sequence:
    made = Sequence(request=make_request(arrival, prompt, max_tokens), arrival=arrival, submitted_s=0.0)
    for name, value in state.items():
        setattr(made, name, value)
    return made


def test_first_come_first_served_and_the_last_is_the_victim() -> None:
    running = sorted([sequence(2), sequence(0), sequence(1)], key=queue_rank)
    assert [s.arrival for s in running] == [0, 1, 2]
    assert pick_victim(running).arrival == 2


def test_one_page_per_running_sequence_stays_free() -> None:
    assert pages_to_keep_free(sequence(9), [], 4) == 0
    assert pages_to_keep_free(sequence(9), [sequence(1), sequence(2)], 4) == 2


def test_after_enough_preemptions_the_worst_case_of_all_must_fit() -> None:
    # Candidate: 5 + 8 - 1 = 12 positions, 3 pages of 4, of which 2 hold its known tokens. The other: 3 pages, has 2.
    again = sequence(9, preemptions=MAX_OPTIMISTIC_PREEMPTIONS)
    assert pages_to_keep_free(again, [sequence(1, pages=[1, 2])], 4) == 1 + 1
    assert pages_to_keep_free(again, [], 4) == 1


@pytest.mark.parametrize(
    ("remaining", "budget", "chunk"),
    [(3, 8, 3), (8, 8, 8), (9, 8, 8), (100, 10, 8), (100, 3, 0), (3, 3, 3)],
)
def test_a_chunk_is_the_rest_or_whole_pages(remaining: int, budget: int, chunk: int) -> None:
    assert chunk_tokens(remaining, budget, 4) == chunk
