"""A step plan while it is being put together."""

from collections.abc import Iterable

from headrace.serving.core.buckets import padded_tokens, pick_bucket
from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.plan import DecodeRow, PageCopy, PrefillSegment, SlotLoad, SlotRef, StepPlan
from headrace.serving.core.sequence import Sequence, num_pages_for


class Draft:
    """Adding a row marks it on the sequence as planned, and charges its tenant for what was not run before. loading,
    decoding and prefilling name the sequences of the loads and rows; a sequence may be loaded and have no row yet.
    budget_tokens: prefill tokens of a lane that the step may have."""

    def __init__(self, config: SchedulerConfig, step_id: int) -> None:
        self._config = config
        self.step_id = step_id
        self.budget_tokens = config.chunk_tokens
        self._num_prefill_tokens = [0] * config.num_lanes
        self._swap_in: list[PageCopy] = []
        self._num_rows = [0] * config.num_lanes
        self._loads: list[SlotLoad] = []
        self._decode: list[DecodeRow] = []
        self._prefill: list[PrefillSegment] = []
        self.loading: list[tuple[Sequence, SlotRef]] = []
        self.decoding: list[tuple[Sequence, SlotRef]] = []
        self.prefilling: list[tuple[Sequence, SlotRef]] = []

    @property
    def is_empty(self) -> bool:
        return not self._decode and not self._prefill

    def add_swap_in(self, copies: Iterable[PageCopy]) -> None:
        self._swap_in.extend(copies)

    def add_load(self, sequence: Sequence, slot: SlotRef) -> None:
        self._loads.append(SlotLoad(slot=slot, request=sequence.request, output_ids=tuple(sequence.outputs)))
        self.loading.append((sequence, slot))
        sequence.last_step = self.step_id

    def add_decode(self, sequence: Sequence, slot: SlotRef) -> None:
        """The next token of a sequence that has a page for its position."""
        position = sequence.num_computed
        self._decode.append(
            DecodeRow(
                slot=slot,
                position=position,
                input_token=None if sequence.num_pending else sequence.outputs[-1],
                page_ids=self._pages(sequence, position + 1),
                output_index=sequence.num_planned_outputs,
            )
        )
        self.decoding.append((sequence, slot))
        self._num_rows[self._config.lane_of_slot(slot.slot)] += 1
        sequence.num_computed += 1
        sequence.num_pending += 1
        sequence.last_step = self.step_id
        _charge(sequence, position, position + 1, samples=True)

    def add_prefill(self, sequence: Sequence, slot: SlotRef, length: int) -> None:
        """The next chunk of a prefilling sequence, of length tokens."""
        start = sequence.num_computed
        lane = self._config.lane_of_slot(slot.slot)
        end = start + length
        samples = end == sequence.num_to_prefill
        self._prefill.append(
            PrefillSegment(
                slot=slot,
                start=start,
                token_ids=sequence.token_ids(start, end),
                page_ids=self._pages(sequence, end),
                samples=samples,
                output_index=len(sequence.outputs),
            )
        )
        self.prefilling.append((sequence, slot))
        self._num_prefill_tokens[lane] += padded_tokens(length, self._config.block_tokens)
        sequence.num_computed = end
        sequence.num_pending += samples
        sequence.last_step = sequence.prefill_step = self.step_id
        _charge(sequence, start, end, samples=samples)

    def seal(self, swap_out: tuple[PageCopy, ...] = ()) -> StepPlan:
        """All lanes run the same program: the one that the fullest needs."""
        return StepPlan(
            step_id=self.step_id,
            bucket=pick_bucket(self._config, max(self._num_rows), max(self._num_prefill_tokens)),
            loads=tuple(self._loads),
            decode=tuple(self._decode),
            prefill=tuple(self._prefill),
            swap_out=swap_out,
            swap_in=tuple(self._swap_in),
        )

    def _pages(self, sequence: Sequence, num_tokens: int) -> tuple[int, ...]:
        return tuple(sequence.pages[: num_pages_for(num_tokens, self._config.page_size)])


def _charge(sequence: Sequence, start: int, end: int, *, samples: bool) -> None:
    """For positions start … end - 1, as far as no plan ran them before, and for the token that the last samples."""
    tenant = sequence.tenant
    if end > sequence.num_charged:
        num_prompt = min(end, len(sequence.request.prompt_ids)) - max(start, sequence.num_charged)
        tenant.charge(prompt_tokens=max(0, num_prompt), output_tokens=int(samples))
        sequence.num_charged = end
    if samples and sequence.num_expected:
        sequence.num_expected -= 1
        tenant.num_expected -= 1
