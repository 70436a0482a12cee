from headrace.serving.core.events import PreemptionAction, PreemptionReason
from headrace.serving.core.plan import SlotRef
from headrace.serving.core.sequence import Sequence, max_kv_tokens, num_pages_for
from tests.serving.core.driver import make_request


def make(outputs: list[int]) -> Sequence:
    return Sequence(request=make_request(0, (10, 11, 12), 4), arrival=0, submitted_s=0.0, outputs=outputs)


def test_token_ids_span_prompt_and_outputs() -> None:
    sequence = make([20, 21, 22])
    every = (10, 11, 12, 20, 21, 22)
    assert all(sequence.token_ids(i, j) == every[i:j] for i in range(7) for j in range(i, 7))


def test_decode_is_wanted_until_the_samples_in_flight_reach_max_tokens() -> None:
    sequence = make([20, 21])
    assert not sequence.wants_decode, "waiting"
    sequence.slot = SlotRef(0, 1)
    sequence.num_to_prefill = sequence.num_computed = 3
    assert sequence.wants_decode
    sequence.num_pending = 1
    assert sequence.wants_decode
    sequence.num_pending = 2
    assert not sequence.wants_decode
    sequence.num_pending, sequence.num_computed = 0, 2
    assert not sequence.wants_decode, "prefilling"


def test_clearing_a_tenancy_keeps_history_and_counts() -> None:
    sequence = make([20])
    sequence.slot, sequence.pages, sequence.num_pending, sequence.last_step = SlotRef(0, 1), [1], 1, 7
    sequence.num_computed = sequence.num_to_prefill = 3
    sequence.preempted[PreemptionReason.PAGES, PreemptionAction.SWAPPED] = 2
    sequence.cached_tokens = 4
    sequence.clear_tenancy()
    assert sequence.slot is None and sequence.last_step is None
    assert sequence.pages == [] and sequence.chain == []
    assert (sequence.num_pending, sequence.num_computed, sequence.num_to_prefill) == (0, 0, 0)
    assert (sequence.outputs, sequence.preemptions, sequence.cached_tokens) == ([20], 2, 4)


def test_the_last_output_needs_no_kv() -> None:
    assert max_kv_tokens(5, 1) == 5
    assert max_kv_tokens(5, 4) == 8
    assert [num_pages_for(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
