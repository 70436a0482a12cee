"""Who holds a slot, pages or host pages: how sequences get them, lose them, and come back.

``Tenancies.release`` is the one way for a sequence to give anything back, in whatever state it is.
"""

from bisect import insort

from headrace.serving.core.config import PreemptionPolicy, SchedulerConfig
from headrace.serving.core.errors import InvariantError
from headrace.serving.core.events import Event, Preempted, PreemptionAction, PreemptionReason
from headrace.serving.core.fair_share import EXPECTED_OUTPUT_TOKENS, FairShare
from headrace.serving.core.lane import Lane, make_lanes
from headrace.serving.core.plan import PageCopy, SlotRef
from headrace.serving.core.policy import arrival_rank, preemption_action, worst_case_pages
from headrace.serving.core.prefix_cache import PageHash
from headrace.serving.core.sequence import Sequence, num_pages_for
from headrace.serving.core.step_cost import StepCost
from headrace.serving.core.swap_space import Swapped
from headrace.serving.core.waiting_queue import WaitingQueue


class Tenancies:
    """running: ascending by arrival_rank. events: of preemptions, until a call of the scheduler returns them.

    next_step: id of the next plan. oldest_in_flight: of the oldest plan without a result.
    """

    def __init__(self, config: SchedulerConfig, hash_page: PageHash) -> None:
        self.config = config
        self.lanes = make_lanes(config, hash_page)
        self.waiting = WaitingQueue(config)
        self.running: list[Sequence] = []
        self.shares = FairShare()
        self.cost = StepCost(config)
        self.events: list[Event] = []
        self.num_preempted = dict.fromkeys(PreemptionAction, 0)
        self.next_step = 0
        self.oldest_in_flight: int | None = None
        self._leaving: list[Sequence] = []

    @property
    def num_slots(self) -> int:
        return self.config.num_lanes * self.config.num_slots

    @property
    def num_preemptions(self) -> int:
        return sum(self.num_preempted.values())

    def lane_of(self, sequence: Sequence) -> Lane:
        """Of a running sequence."""
        if sequence.slot is None:
            raise InvariantError(f"request {sequence.request.request_id} is in no lane")
        return self.lanes[self.config.lane_of_slot(sequence.slot.slot)]

    def running_in(self, lane: Lane) -> list[Sequence]:
        if len(self.lanes) == 1:
            return self.running
        return [s for s in self.running if self.lane_of(s) is lane]

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence can start: not while plans in flight still copy its KV out, or write it."""
        swapped = sequence.swapped
        return swapped is None or not self._is_in_flight(swapped.last_step if swapped.step is None else swapped.step)

    def admit(self, sequence: Sequence, lane: Lane, num_spare: int) -> bool:
        """Give a waiting sequence pages; False, and no change, if they lack."""
        swapped = sequence.swapped
        if swapped is not None and swapped.step is None:
            return lane.memory.take_back(sequence, num_spare)
        return lane.memory.admit(sequence, num_spare)

    def start(self, sequence: Sequence, lane: Lane, now_s: float) -> tuple[SlotRef, tuple[PageCopy, ...]]:
        """A slot for a waiting sequence that has pages, and what has to be copied in before it runs."""
        self.waiting.start(sequence, now_s)
        slot = sequence.slot = lane.slots.take()
        sequence.read_s = now_s
        insort(self.running, sequence, key=arrival_rank)
        sequence.tenant.num_running += 1
        num_left = sequence.request.stop.max_tokens - len(sequence.outputs)
        sequence.num_expected = min(num_left, EXPECTED_OUTPUT_TOKENS)
        sequence.tenant.num_expected += sequence.num_expected
        sequence.num_charged = max(sequence.num_charged, sequence.num_computed)
        if sequence.preempted_at_s is not None:
            sequence.preempted_s += now_s - sequence.preempted_at_s
            sequence.preempted_at_s = None
        return slot, self._bring_back(sequence, lane)

    def can_preempt(self, sequence: Sequence) -> bool:
        """In deterministic mode only what can be swapped out, and leaves host pages for all that run unguarded."""
        if not self.config.deterministic:
            return True
        lane, size = self.lane_of(sequence), self.config.page_size
        others = [s for s in self.running_in(lane) if not s.is_guarded and s is not sequence]
        num_spoken_for = sum(worst_case_pages(s, size) for s in others)
        return num_pages_for(self._tokens_to_keep(sequence), size) + num_spoken_for <= lane.host.num_free

    def preempt(self, sequence: Sequence, reason: PreemptionReason, now_s: float) -> None:
        """Back to its place in the queue with its known outputs; its KV goes to the host, or is computed again.

        Samples in flight are dropped when they come: they were never reported, and are drawn again.
        """
        lane, num_pages = self.lane_of(sequence), len(sequence.pages)
        num_tokens = self._tokens_to_keep(sequence)
        num_host = num_pages_for(num_tokens, self.config.page_size)
        action = preemption_action(
            PreemptionPolicy.SWAP if self.config.deterministic else self.config.preemption,
            num_tokens=num_tokens,
            num_pages=num_host,
            num_host_free=lane.host.num_free,
            token_ms=1e3 * self.cost.prefill_token_s,
            page_ms=1e3 * self.cost.page_s,
        )
        swapped = None
        if action is PreemptionAction.SWAPPED:
            device, host = tuple(sequence.pages[:num_host]), lane.host.take(num_host)
            swapped = Swapped(lane.index, num_tokens, device, host, sequence.last_step)
        elif self.config.deterministic and num_tokens:
            raise InvariantError(f"request {sequence.request.request_id} would be computed again")
        self.release(sequence, keeps=swapped)
        self.num_preempted[action] += 1
        sequence.preempted[reason, action] = sequence.preempted.get((reason, action), 0) + 1
        sequence.preempted_at_s = now_s
        self.waiting.add(sequence)
        self.waiting.note_service(sequence.request.priority, now_s)
        self.events.append(
            Preempted(request_id=sequence.request.request_id, reason=reason, action=action, num_pages=num_pages)
        )

    def release(self, sequence: Sequence, *, keeps: Swapped | None = None) -> None:
        """Give back all that a sequence holds, in whatever state it is. keeps: but its KV goes to the host."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
            self.drop_swapped(sequence)
            return
        lane = self.lane_of(sequence)
        self.running.remove(sequence)
        sequence.tenant.num_running -= 1
        sequence.tenant.num_expected -= sequence.num_expected
        sequence.num_expected = 0
        lane.slots.release(sequence.slot)
        if keeps is None:
            lane.memory.release(sequence, self._is_in_flight(sequence.last_step))
        else:
            lane.memory.leave(sequence, self.next_step)
            self._leaving.append(sequence)
        sequence.swapped = keeps
        sequence.clear_tenancy()

    def drop_swapped(self, sequence: Sequence) -> None:
        """Nothing of a waiting sequence is kept any more."""
        swapped, sequence.swapped = sequence.swapped, None
        if swapped is None:
            return
        self.lanes[swapped.lane].host.release(swapped.host_pages)
        if swapped.step is None:
            self._leaving.remove(sequence)
            self.settle()

    def carry_out(self) -> tuple[tuple[Sequence, Swapped], ...]:
        """What the next plan, which is being sealed, copies to the host."""
        carried = []
        for sequence in self._leaving:
            swapped = sequence.swapped
            if swapped is None or swapped.step is not None:
                raise InvariantError(f"request {sequence.request.request_id} has nothing to copy out")
            swapped.step = self.next_step
            carried.append((sequence, swapped))
        self._leaving.clear()
        return tuple(carried)

    def settle(self) -> None:
        """After a plan has left the flight."""
        oldest = self.oldest_in_flight
        if oldest is None and self._leaving:
            oldest = self.next_step
        for lane in self.lanes:
            lane.memory.settle(oldest)
            lane.host.settle(oldest)

    def check(self, *, deep: bool, is_idle: bool) -> None:
        """Raise InvariantError if a page, host page, slot or account is in no state, in two, or in a wrong one."""
        if any(s.slot is None for s in self.running):
            raise InvariantError("a running request lacks a slot")
        waiting = self.waiting.sequences
        for lane in self.lanes:
            running = self.running_in(lane)
            if deep:
                lane.memory.check(running)
            lane.memory.pool.check_sum()
            lane.slots.check({s.slot for s in running if s.slot is not None})
            kept = [s.swapped.host_pages for s in waiting if s.swapped is not None and s.swapped.lane == lane.index]
            lane.host.check([page for pages in kept for page in pages], deep=deep)
            if is_idle and lane.memory.num_available != lane.memory.pool.num_usable:
                raise InvariantError("idle, but pages are referenced")
            if is_idle and lane.host.num_free != lane.host.num_pages:
                raise InvariantError("idle, but host pages are taken")
        self.waiting.check()
        if self.running != sorted(self.running, key=arrival_rank):
            raise InvariantError("the running list is out of order")
        if any(s.swapped is not None for s in self.running):
            raise InvariantError("a running request is swapped out")
        if self._leaving != [s for s in self._leaving if s.swapped is not None and s.swapped.step is None]:
            raise InvariantError("a request leaves whose KV is not kept")
        for tenant in self.shares.active:
            if tenant.num_running != sum(s.tenant is tenant for s in self.running):
                raise InvariantError("the running requests of a tenant are miscounted")
            if tenant.num_expected != sum(s.num_expected for s in self.running if s.tenant is tenant):
                raise InvariantError("the expected tokens of a tenant are miscounted")

    def _tokens_to_keep(self, sequence: Sequence) -> int:
        """Leading positions whose KV is worth keeping: all that plans so far compute, but for what runs again.

        The last known token runs again, since its sample is dropped if it is in flight: as a decode row, or for a
        prompt without an output as the chunk that it was.
        """
        if sequence.is_prefilling:
            return sequence.num_computed
        if sequence.outputs:
            return sequence.num_tokens - 1
        grid = self.config.chunk_grid
        return (sequence.num_tokens - 1) // grid * grid

    def _bring_back(self, sequence: Sequence, lane: Lane) -> tuple[PageCopy, ...]:
        swapped, sequence.swapped = sequence.swapped, None
        if swapped is None:
            return ()
        if swapped.step is None:
            self._leaving.remove(sequence)
            lane.host.release(swapped.host_pages)
            return ()
        # Host pages are read by the plan that is being made, and are nobody else's until that was applied.
        lane.host.release(swapped.host_pages, self.next_step)
        num_cached = len(sequence.chain)
        pages = sequence.pages[num_cached : len(swapped.host_pages)]
        return tuple(map(PageCopy, pages, swapped.host_pages[num_cached:]))

    def _is_in_flight(self, step: int | None) -> bool:
        return step is not None and self.oldest_in_flight is not None and step >= self.oldest_in_flight
