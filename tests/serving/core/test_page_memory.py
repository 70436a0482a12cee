import pytest

from headrace.serving.core.errors import InvariantError
from headrace.serving.core.page_memory import PageMemory
from headrace.serving.core.prefix_cache import sha256_page
from headrace.serving.core.sequence import Sequence
from tests.serving.core.driver import make_config, make_request


def make_memory(num_pages: int = 11, **changes: object) -> PageMemory:
    return PageMemory(make_config(num_pages=num_pages, **changes), sha256_page)


def make_sequence(prompt: int | tuple[int, ...] = 10, request_id: int = 0) -> Sequence:
    return Sequence(request=make_request(request_id, prompt), arrival=request_id, submitted_s=0.0)


def computed(memory: PageMemory, sequence: Sequence) -> Sequence:
    """As after a prefill and one sampled token."""
    assert memory.admit(sequence, 0)
    sequence.num_computed = sequence.num_tokens
    sequence.outputs.append(1)
    memory.publish(sequence)
    return sequence


def end(memory: PageMemory, sequence: Sequence, in_flight: bool = False) -> None:
    memory.release(sequence, in_flight)
    sequence.clear_tenancy()


def test_admission_takes_pages_for_all_known_tokens_or_none() -> None:
    memory = make_memory()
    sequence = make_sequence(10)
    assert not memory.admit(sequence, num_spare=8)
    assert (sequence.pages, memory.num_available) == ([], 10)
    assert memory.admit(sequence, num_spare=7)
    assert (len(sequence.pages), memory.num_available) == (3, 7)
    assert (sequence.num_computed, sequence.num_to_prefill) == (0, 10)


@pytest.mark.parametrize(("length", "hits"), [(7, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_the_last_known_token_is_never_taken_from_the_cache(length: int, hits: int) -> None:
    """O19: a prompt of exactly k pages, all cached, runs its last page again, into a page of its own."""
    memory = make_memory()
    prompt = tuple(range(length))
    first = computed(memory, make_sequence(prompt))
    second = make_sequence(prompt, 1)
    assert memory.admit(second, 0)
    assert second.pages[:hits] == first.pages[:hits]
    assert not set(second.pages[hits:]) & set(first.pages)
    assert second.num_computed == 4 * hits < length
    memory.check([first, second])


def test_cached_pages_that_a_hit_revives_are_not_counted_as_available() -> None:
    memory = make_memory(num_pages=4)
    prompt = tuple(range(9))
    end(memory, computed(memory, make_sequence(prompt)))
    assert (memory.pool.num_free, memory.pool.num_cached) == (1, 2)
    assert not memory.admit(make_sequence(prompt, 1), num_spare=1)
    assert memory.admit(make_sequence(prompt, 1), num_spare=0)


def test_a_hit_survives_the_evictions_of_its_own_admission() -> None:
    """O20: look-up, then evict everything that can be, then allocate."""
    memory = make_memory(num_pages=6)
    shared = tuple(range(8))
    end(memory, computed(memory, make_sequence((*shared, 1))))
    end(memory, computed(memory, make_sequence(tuple(range(20, 29)), 1)))
    sequence = make_sequence((*shared, *range(40, 52)), 2)
    assert memory.admit(sequence, 0)
    assert (memory.num_available, sequence.num_computed) == (0, 8)
    memory.check([sequence])


def test_growth_takes_one_page_at_a_page_edge() -> None:
    memory = make_memory(num_pages=4)
    sequence = make_sequence(8)
    assert memory.admit(sequence, 0)
    sequence.num_computed = 7
    assert memory.grow(sequence) and len(sequence.pages) == 2
    sequence.num_computed = 8
    assert memory.grow(sequence) and len(sequence.pages) == 3
    sequence.num_computed = 12
    assert not memory.grow(sequence) and len(sequence.pages) == 3


def test_only_full_pages_of_computed_and_known_tokens_are_published() -> None:
    memory = make_memory()
    sequence = computed(memory, make_sequence(7))
    assert len(sequence.chain) == 1, "seven computed positions: the second page lacks one"
    sequence.num_computed += 1
    sequence.outputs.append(2)
    memory.publish(sequence)
    assert len(sequence.chain) == 2, "a page may hold prompt and generated tokens"
    assert sequence.keys[1].token_ids == (*sequence.request.prompt_ids[4:], 1)


def test_pages_in_flight_are_held_until_no_plan_names_them() -> None:
    memory = make_memory()
    sequence = make_sequence(10)
    assert memory.admit(sequence, 0)
    sequence.last_step = 5
    end(memory, sequence, in_flight=True)
    assert (memory.num_available, memory.is_draining) == (7, True)
    memory.check([])
    memory.settle(5)
    assert memory.num_available == 7
    memory.settle(6)
    assert (memory.num_available, memory.is_draining) == (10, False)


def test_held_pages_that_another_sequence_shares_do_not_drain() -> None:
    memory = make_memory()
    prompt = tuple(range(9))
    first = computed(memory, make_sequence(prompt))
    second = make_sequence(prompt, 1)
    assert memory.admit(second, 0)
    memory.pool.release(second.pages.pop())  # what is left is shared
    second.last_step = 1
    end(memory, second, in_flight=True)
    assert not memory.is_draining
    first.last_step = 1
    end(memory, first, in_flight=True)
    assert memory.is_draining, "now the two holds are all holders"


def test_a_sequence_in_flight_must_have_a_step() -> None:
    memory = make_memory()
    sequence = make_sequence()
    assert memory.admit(sequence, 0)
    with pytest.raises(InvariantError, match="no step"):
        memory.release(sequence, is_in_flight=True)


def test_distrusted_pages_are_not_found_again() -> None:
    memory = make_memory()
    prompt = tuple(range(9))
    first = computed(memory, make_sequence(prompt))
    memory.distrust(first)
    end(memory, first)
    assert (memory.pool.num_free, len(memory.cache)) == (10, 0)


def test_without_a_prefix_cache_nothing_is_hashed_or_kept() -> None:
    memory = make_memory(prefix_cache=False)
    prompt = tuple(range(9))
    first = computed(memory, make_sequence(prompt))
    assert (first.keys, first.chain) == ([], [])
    end(memory, first)
    second = make_sequence(prompt, 1)
    assert memory.admit(second, 0)
    assert (second.num_computed, memory.pool.num_cached) == (0, 0)


def test_check_finds_a_page_that_no_sequence_names() -> None:
    memory = make_memory()
    sequence = make_sequence()
    assert memory.admit(sequence, 0)
    memory.check([sequence])
    with pytest.raises(InvariantError):
        memory.check([])
