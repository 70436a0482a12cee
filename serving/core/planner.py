"""Which rows the next step has: a slot that is yielded, decode rows, then chunks of prompts, old and new.

Deterministic mode: XLA gives rows of one program the same bits whatever their neighbours are, but not rows of two
programs. So a step has either decode rows or chunks, each in the one program there is for them; chunks are whole cells
of a grid that belongs to the prompt; and steps of the two kinds take turns while both are wanted, so a stream waits for
one prefill step at most between two of its tokens.
"""

from collections import Counter
from itertools import takewhile

from headrace.serving.core.buckets import padded_tokens, program_tokens
from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.draft import Draft
from headrace.serving.core.events import PreemptionReason
from headrace.serving.core.lane import Lane
from headrace.serving.core.plan import StepPlan
from headrace.serving.core.policy import (
    MAX_YIELDS,
    YIELDS,
    class_level,
    guard_fits,
    is_newcomer,
    keeps_a_slot,
    must_guard,
    page_turn,
    pages_to_keep_free,
    pick_class_victim,
    pick_fairness_victim,
    pick_page_victim,
    placement_cost,
    running_turn,
    share_cells,
    share_chunks,
)
from headrace.serving.core.sequence import Sequence
from headrace.serving.core.tenancy import Tenancies

ChunkTurn = tuple[int, float, int, int]


class Planner:
    """Fills the draft of a step. prefix_*_tokens: of requests that start for the first time, those of their prompts and
    those found cached."""

    def __init__(self, tenancies: Tenancies) -> None:
        self._config: SchedulerConfig = tenancies.config
        self._tenancies = tenancies
        self._last_was_prefill = False
        self._now_s = 0.0
        self.prefix_queries_tokens = 0
        self.prefix_hits_tokens = 0

    def fill(self, draft: Draft, now_s: float) -> None:
        """Rows, loads and copies of the step; an empty draft if nothing can run."""
        tenancies = self._tenancies
        self._now_s = now_s
        if tenancies.waiting:
            self._yield_a_slot(now_s)
        num_preemptions = tenancies.num_preemptions
        for decodes, prefills in self._kinds():
            if decodes:
                self._plan_decode(draft, now_s)
            self._set_budget(draft)
            if tenancies.num_preemptions == num_preemptions:
                self._admit(draft, now_s, decodes=decodes, prefills=prefills)
            if prefills:
                # Again: what was admitted may start behind a long prefix.
                self._set_budget(draft)
                self._plan_prefill(draft)
            if not draft.is_empty:
                break
        self._last_was_prefill = bool(draft.prefilling)

    def _kinds(self) -> tuple[tuple[bool, bool], ...]:
        """(has decode rows, has chunks) of steps to try, one after the other until one has rows."""
        if not self._config.deterministic:
            return ((True, True),)
        return ((True, False), (False, True)) if self._last_was_prefill else ((False, True), (True, False))

    def _set_budget(self, draft: Draft) -> None:
        """Prompt tokens of the step beside running streams, by the prompt that is furthest."""
        if draft.decoding and not self._config.deterministic:
            starts = (s.num_computed for s in self._tenancies.running if s.is_prefilling)
            draft.budget_tokens = self._tenancies.cost.budget_tokens(max(starts, default=0))

    def must_wait(self, now_s: float, newest: StepPlan) -> bool:
        """Whether the next step has to wait for the result of newest, which is in flight, as others wait for a turn.

        Who comes while a step runs can be in none that was planned before. So a step with chunks is not planned
        then, and two steps overlap only if both together are no larger than one with a full chunk: a newcomer waits
        for no more than that before its own step.
        """
        tenancies = self._tenancies
        if not self._config.is_shared or not tenancies.waiting:
            return False
        if any(s.is_prefilling for s in tenancies.running) or self._may_start_one(now_s):
            return True
        num_tokens = newest.bucket.decode_rows + newest.bucket.prefill_tokens + len(tenancies.running)
        return num_tokens > self._config.chunk_tokens

    # Decode

    def _plan_decode(self, draft: Draft, now_s: float) -> None:
        """One token for every decoding sequence that has, or gets, a page for it; in turn."""
        for sequence in sorted(self._tenancies.running, key=page_turn):
            if sequence.wants_decode and self._make_room(sequence, draft, now_s) and sequence.slot is not None:
                draft.add_decode(sequence, sequence.slot)

    def _make_room(self, sequence: Sequence, draft: Draft, now_s: float) -> bool:
        """A page for the next position, by preemption of one later in turn if need be; False if it must wait."""
        tenancies = self._tenancies
        lane = tenancies.lane_of(sequence)
        while not lane.memory.grow(sequence):
            if lane.memory.is_draining:
                return False
            may_go = [
                s
                for s in tenancies.running_in(lane)
                if not s.is_guarded and s.last_step != draft.step_id and tenancies.can_preempt(s)
            ]
            victim = pick_page_victim(sequence, may_go)
            if victim is None:
                return False
            tenancies.preempt(victim, PreemptionReason.PAGES, now_s)
        return True

    # A slot that is yielded

    def _may_start_one(self, now_s: float) -> bool:
        """Whether the first that waits may start in the next step; it does not wait for a slot or pages to come."""
        tenancies = self._tenancies
        candidate = tenancies.waiting.first(now_s)
        if not tenancies.is_ready(candidate):
            return False
        lanes = [lane for lane in tenancies.lanes if self._suits(candidate, lane)]
        if all(self._is_full(candidate, lane) for lane in lanes):
            return self._pick_yielding(candidate, lanes) is not None
        return not self._keeps_a_slot(candidate, now_s)

    def _yield_a_slot(self, now_s: float) -> None:
        """To the first that waits, if it lacks a slot or pages; as many yield as it takes."""
        tenancies = self._tenancies
        candidate = tenancies.waiting.first(now_s)
        if not tenancies.is_ready(candidate):
            return
        lanes = [lane for lane in tenancies.lanes if self._suits(candidate, lane)]
        num_yielded = 0
        while all(self._is_full(candidate, lane) for lane in lanes):
            picked = self._pick_yielding(candidate, lanes)
            # Pages on their way out come with a step, so one goes on: with none there might be no step.
            if picked is None or (num_yielded and len(tenancies.running) < 2):
                return
            tenancies.preempt(*picked, now_s)
            num_yielded += 1

    def _pick_yielding(self, candidate: Sequence, lanes: list[Lane]) -> tuple[Sequence, PreemptionReason] | None:
        """Who yields to a candidate that lacks a slot or pages in each of its lanes, and why."""
        tenancies = self._tenancies
        may_yield = [
            s
            for lane in lanes
            for s in tenancies.running_in(lane)
            if s.num_preempted_for(*YIELDS) < MAX_YIELDS and tenancies.can_preempt(s)
        ]
        priorities = [s.request.priority for s in tenancies.running]
        victim = pick_class_victim(candidate, may_yield, priorities, tenancies.num_slots)
        if victim is not None:
            return victim, PreemptionReason.PRIORITY
        if candidate.tenant.num_running:
            return None
        victim = pick_fairness_victim(candidate, may_yield, self._excess(lanes))
        return None if victim is None else (victim, PreemptionReason.FAIRNESS)

    def _excess(self, lanes: list[Lane]) -> dict[str, float]:
        """What each tenant holds beyond its share of what lacks: slots, of which everybody may have one, or pages."""
        tenancies = self._tenancies
        num_held: Counter[str] = Counter()
        if all(not lane.slots.num_free for lane in lanes):
            num_usable = tenancies.num_slots
            num_held.update({t.name: t.num_running for t in tenancies.shares.active if t.num_running > 1})
        else:
            num_usable = sum(lane.memory.pool.num_usable for lane in tenancies.lanes)
            for sequence in tenancies.running:
                num_held[sequence.tenant.name] += len(sequence.pages)
        return {name: num_held[name] / part for name, part in tenancies.shares.parts_of(num_usable).items()}

    def _is_full(self, candidate: Sequence, lane: Lane) -> bool:
        """Without a slot, or without pages though none is about to come back."""
        if not lane.slots.num_free:
            return True
        is_guarded = self._must_guard(candidate, lane)
        num_spare = pages_to_keep_free(candidate, is_guarded, len(self._tenancies.running_in(lane)))
        return self._guard_lacks(candidate, lane, is_guarded) or lane.memory.lacks_pages(candidate, num_spare)

    # Admission

    def _admit(self, draft: Draft, now_s: float, *, decodes: bool, prefills: bool) -> None:
        """Start waiting sequences in turn while slots, pages and the step's prefill budget last."""
        tenancies = self._tenancies
        while tenancies.waiting:
            sequence = tenancies.waiting.first(now_s)
            goes_on = _goes_on_decoding(sequence)
            if not (decodes if goes_on else prefills) or not tenancies.is_ready(sequence):
                return
            lane = self._place(sequence, draft, now_s, goes_on)
            if lane is None:
                return
            slot, copies = tenancies.start(sequence, lane, now_s)
            if sequence.admitted_s is None:
                sequence.admitted_s = now_s
                sequence.cached_tokens = sequence.num_computed
                if self._config.prefix_cache:
                    self.prefix_queries_tokens += sequence.num_tokens
                    self.prefix_hits_tokens += sequence.num_computed
            draft.add_swap_in(copies)
            draft.add_load(sequence, slot)
            if goes_on:
                draft.add_decode(sequence, slot)

    def _place(self, sequence: Sequence, draft: Draft, now_s: float, goes_on: bool) -> Lane | None:
        """Give a sequence pages in the best lane that has a slot, pages and budget for it; None if none has."""
        tenancies = self._tenancies
        if self._keeps_a_slot(sequence, now_s):
            return None
        lanes = [
            lane
            for lane in tenancies.lanes
            if lane.slots.num_free
            and self._suits(sequence, lane)
            and (goes_on or self._has_chunk(sequence, lane, draft.budget_tokens))
        ]
        if len(lanes) > 1:
            costs = {lane.index: self._placement_cost(sequence, lane) for lane in lanes}
            lanes.sort(key=lambda lane: costs[lane.index])
        for lane in lanes:
            is_guarded = self._must_guard(sequence, lane)
            num_spare = pages_to_keep_free(sequence, is_guarded, len(tenancies.running_in(lane)))
            if not self._guard_lacks(sequence, lane, is_guarded) and tenancies.admit(sequence, lane, num_spare):
                sequence.is_guarded = is_guarded
                return lane
        return None

    def _keeps_a_slot(self, candidate: Sequence, now_s: float) -> bool:
        tenancies = self._tenancies
        num_free = sum(lane.slots.num_free for lane in tenancies.lanes)
        awaits_another = tenancies.shares.awaits_another(now_s, self._config.aging_s)
        return keeps_a_slot(candidate, tenancies.running, num_free, tenancies.num_slots, awaits_another)

    def _suits(self, sequence: Sequence, lane: Lane) -> bool:
        """What was swapped out can only come back to its own lane."""
        return sequence.swapped is None or sequence.swapped.lane == lane.index

    def _must_guard(self, sequence: Sequence, lane: Lane) -> bool:
        num_host_free = lane.host.num_free if self._config.deterministic else None
        running = self._tenancies.running_in(lane)
        return must_guard(sequence, running, page_size=self._config.page_size, num_host_free=num_host_free)

    def _guard_lacks(self, sequence: Sequence, lane: Lane, is_guarded: bool) -> bool:
        running, num_usable = self._tenancies.running_in(lane), lane.memory.pool.num_usable
        return is_guarded and not guard_fits(sequence, running, page_size=self._config.page_size, num_usable=num_usable)

    def _placement_cost(self, sequence: Sequence, lane: Lane) -> int:
        num_uncached = sequence.num_tokens - lane.memory.num_cached_tokens(sequence)
        return placement_cost(num_uncached, self._tenancies.running_in(lane))

    # Prefill

    def _plan_prefill(self, draft: Draft) -> None:
        for lane in self._tenancies.lanes:
            claims = self._claims(lane, draft.budget_tokens)
            chunks = self._chunks(claims, [s.num_to_prefill - s.num_computed for s in claims], draft.budget_tokens)
            for sequence, length in zip(claims, chunks, strict=True):
                if length and sequence.slot is not None:
                    draft.add_prefill(sequence, sequence.slot, length)
                    sequence.read_s = self._now_s

    def _has_chunk(self, sequence: Sequence, lane: Lane, budget_tokens: int) -> bool:
        """Whether a waiting sequence would get a chunk in this step."""
        claims = self._claims(lane, budget_tokens)
        if budget_tokens < 2 * self._config.block_tokens and sum(s.tenant is sequence.tenant for s in claims) >= 2:
            return False
        turn = self._chunk_turn(sequence, budget_tokens)
        ahead = [s for s in claims if self._chunk_turn(s, budget_tokens) < turn]
        if len(ahead) >= self._config.max_segments:
            return False
        num_uncached = max(1, sequence.num_tokens - lane.memory.num_cached_tokens(sequence))
        needs = [s.num_to_prefill - s.num_computed for s in ahead] + [num_uncached]
        return self._chunks([*ahead, sequence], needs, budget_tokens)[-1] > 0

    def _claims(self, lane: Lane, budget_tokens: int) -> list[Sequence]:
        """Prefilling sequences of a lane, in turn."""
        prefilling = [s for s in self._tenancies.running_in(lane) if s.is_prefilling]
        return sorted(prefilling, key=lambda s: self._chunk_turn(s, budget_tokens))

    def _chunks(self, claims: list[Sequence], needs: list[int], budget_tokens: int) -> list[int]:
        """Tokens of the next chunk of each of claims, in turn, that have needs left."""
        config = self._config
        bounds = config.block_tokens, config.max_segments
        if config.deterministic:
            return share_cells(needs, budget_tokens, *bounds)
        num_of = Counter(s.tenant.name for s in claims)
        num_newcomers = sum(1 for _ in takewhile(lambda s: is_newcomer(s) and num_of[s.tenant.name] == 1, claims))
        if 0 < num_newcomers < len(claims):
            wanted = sum(padded_tokens(need, config.block_tokens) for need in needs[:num_newcomers])
            budget_tokens = min(budget_tokens, program_tokens(config, wanted))
        return share_chunks(needs, budget_tokens, *bounds, num_newcomers)

    def _chunk_turn(self, sequence: Sequence, budget_tokens: int) -> ChunkTurn:
        """As ``running_turn``, but a prompt without a chunk for long counts as of a higher class, or those of higher
        ones could keep it from its end for ever; where a step has one block only, prompts of a tenant take turns."""
        _, turn, arrival = running_turn(sequence)
        waited_s = 0.0 if sequence.slot is None else self._now_s - sequence.read_s
        level = class_level(sequence.request.priority, waited_s, self._config.aging_s)
        waits_for = 0
        if budget_tokens < 2 * self._config.block_tokens and sequence.prefill_step is not None:
            waits_for = 1 + sequence.prefill_step
        return level, turn, waits_for, arrival


def _goes_on_decoding(sequence: Sequence) -> bool:
    """Whether a waiting sequence needs no prefill: all but its last known token was swapped out."""
    swapped = sequence.swapped
    return swapped is not None and bool(sequence.outputs) and swapped.num_tokens == sequence.num_tokens - 1
