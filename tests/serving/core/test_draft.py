from headrace.serving.core.draft import Draft
from headrace.serving.core.fair_share import OUTPUT_TOKEN_PRICE, PROMPT_TOKEN_PRICE, Tenant
from headrace.serving.core.plan import Bucket, DecodeRow, PrefillSegment, ProgramKind, SlotLoad, SlotRef
from headrace.serving.core.sequence import Sequence
from tests.serving.core.driver import make_config, make_request

CONFIG = make_config(block_tokens=8, chunk_tokens=24, max_segments=2, prefill_tokens=(8, 24))


def running(slot: int, prompt: int, *, computed: int, outputs: list[int] | None = None, pending: int = 0) -> Sequence:
    sequence = Sequence(request=make_request(slot, prompt), arrival=slot, submitted_s=0.0, outputs=outputs or [])
    sequence.slot = SlotRef(slot, 1)
    sequence.pages = list(range(1 + 10 * slot, 9 + 10 * slot))
    sequence.num_to_prefill = prompt
    sequence.num_computed = computed
    sequence.num_pending = pending
    return sequence


def test_a_decode_row_feeds_the_known_token_or_leaves_it_to_the_device() -> None:
    draft = Draft(CONFIG, 7)
    known = running(0, 5, computed=6, outputs=[40, 41])
    unknown = running(1, 3, computed=4, outputs=[50], pending=1)
    for sequence in (known, unknown):
        draft.add_decode(sequence, SlotRef(sequence.arrival, 1))
    plan = draft.seal()
    assert plan.decode == (
        DecodeRow(slot=SlotRef(0, 1), position=6, input_token=41, page_ids=(1, 2), output_index=2),
        DecodeRow(slot=SlotRef(1, 1), position=4, input_token=None, page_ids=(11, 12), output_index=2),
    )
    assert plan.bucket == Bucket(ProgramKind.DECODE, 4)
    assert [(s.num_computed, s.num_pending, s.last_step) for s in (known, unknown)] == [(7, 1, 7), (5, 2, 7)]


def test_segments_are_padded_to_blocks() -> None:
    draft = Draft(CONFIG, 0)
    short, long = running(0, 3, computed=0), running(1, 30, computed=4)
    draft.add_prefill(short, SlotRef(0, 1), 3)
    draft.add_prefill(long, SlotRef(1, 1), 16)
    plan = draft.seal()
    assert plan.prefill == (
        PrefillSegment(
            slot=SlotRef(0, 1),
            start=0,
            token_ids=short.request.prompt_ids,
            page_ids=(1,),
            samples=True,
            output_index=0,
        ),
        PrefillSegment(
            slot=SlotRef(1, 1),
            start=4,
            token_ids=long.request.prompt_ids[4:20],
            page_ids=(11, 12, 13, 14, 15),
            samples=False,
            output_index=0,
        ),
    )
    assert plan.bucket == Bucket(ProgramKind.MIXED, 4, 24)
    assert (short.num_pending, long.num_pending, long.num_computed) == (1, 0, 20)
    assert plan.num_tokens == 19


def test_a_tenant_is_charged_once_for_what_is_computed() -> None:
    draft = Draft(CONFIG, 0)
    sequence = running(0, 30, computed=4)
    sequence.num_charged = 4
    sequence.tenant = Tenant(weight=2.0)
    draft.add_prefill(sequence, SlotRef(0, 1), 16)
    assert sequence.tenant.served == 16 * PROMPT_TOKEN_PRICE / 2
    sequence.num_computed = 0
    draft.add_prefill(sequence, SlotRef(0, 1), 24)
    assert sequence.tenant.served == 20 * PROMPT_TOKEN_PRICE / 2, "20 of the 24 were computed before"
    draft.add_prefill(sequence, SlotRef(0, 1), 6)
    assert sequence.tenant.served == (26 * PROMPT_TOKEN_PRICE + OUTPUT_TOKEN_PRICE) / 2, "the last chunk samples"
    sequence.outputs = [1]
    draft.add_decode(sequence, SlotRef(0, 1))
    assert sequence.tenant.served == (26 * PROMPT_TOKEN_PRICE + 2 * OUTPUT_TOKEN_PRICE) / 2


def test_a_load_carries_the_outputs_so_far() -> None:
    draft = Draft(CONFIG, 0)
    sequence = running(0, 3, computed=0, outputs=[9, 8])
    assert draft.is_empty
    sequence.num_to_prefill = 5
    draft.add_load(sequence, SlotRef(0, 1))
    draft.add_prefill(sequence, SlotRef(0, 1), 5)
    plan = draft.seal()
    assert plan.loads == (SlotLoad(slot=SlotRef(0, 1), request=sequence.request, output_ids=(9, 8)),)
    assert (plan.prefill[0].token_ids[3:], plan.prefill[0].output_index) == ((9, 8), 2)
