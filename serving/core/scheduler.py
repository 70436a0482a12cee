"""Continuous batching: which sequences run in the next step, and what came of the last one.

Time is an argument and every order is fixed, so the same commands give the same plans. Two invariants make overlap
safe: a result row is matched by its SlotRef, so it never reaches a later tenant of the slot; and pages leave a
sequence only when no plan in flight names them. ``_release`` is the one way for a sequence to give anything back.
"""

from bisect import insort
from collections import deque
from dataclasses import dataclass

from headrace.serving.core.admission import refuse_size
from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.draft import Draft
from headrace.serving.core.errors import InvariantError
from headrace.serving.core.events import Event, Finished, TokenEvent
from headrace.serving.core.lane import Lane, make_lanes
from headrace.serving.core.plan import SampledToken, SlotRef, StepPlan, StepResult
from headrace.serving.core.policy import pages_to_keep_free, pick_victim, placement_cost, queue_rank
from headrace.serving.core.prefix_cache import PageHash, sha256_page
from headrace.serving.core.request import (
    CancelReason,
    FinishReason,
    Rejection,
    RejectionReason,
    Request,
    RequestId,
)
from headrace.serving.core.sequence import Sequence
from headrace.serving.core.waiting_queue import WaitingQueue

NON_FINITE = "non_finite_logits"
"""error_code of a request whose logits had NaN or infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Gauges (running … pages_cached) and counters since start; names as in the link's Stats.

    prompt_tokens counts accepted requests, generation_tokens reported tokens, so that both equal the sums over
    Finished when the scheduler is idle. prefix_*: of first admissions only.
    """

    running: int
    waiting: int
    pages_total: int
    pages_free: int
    pages_cached: int
    steps: int
    prompt_tokens: int
    generation_tokens: int
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    preemptions: int
    preemptions_swapped: int = 0
    preemptions_recomputed: int = 0
    swap_pages_total: int = 0
    swap_pages_used: int = 0
    deadline_misses: int = 0
    queued_prompt_tokens: int = 0
    decode_step_ms: float = 0.0
    prefill_token_ms: float = 0.0


@dataclass(slots=True)
class _Counters:
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class _Flight:
    """A plan without a result yet, and whose rows it has."""

    plan: StepPlan
    decoding: tuple[tuple[Sequence, SlotRef], ...]
    prefilling: tuple[tuple[Sequence, SlotRef], ...]


class Scheduler:
    """Every accepted request gets TokenEvents with index 0, 1, 2, … and then exactly one Finished."""

    def __init__(self, config: SchedulerConfig, *, hash_page: PageHash = sha256_page) -> None:
        self.config = config
        self.lanes = make_lanes(config, hash_page)
        self._live: dict[RequestId, Sequence] = {}
        self._waiting = WaitingQueue(config)
        self._running: list[Sequence] = []
        self._flights: deque[_Flight] = deque()
        self._num_arrived = 0
        self._next_step_id = 0
        self._is_draining = False
        self._counters = _Counters()

    # Commands

    def submit(self, request: Request, now_s: float) -> Rejection | None:
        """Queue a request, or say why not; a rejected one leaves no trace."""
        rejection = self._refuse(request, now_s)
        if rejection is not None:
            return rejection
        sequence = Sequence(request=request, arrival=self._num_arrived, submitted_s=now_s)
        self._num_arrived += 1
        self._live[request.request_id] = sequence
        self._waiting.add(sequence)
        self._counters.prompt_tokens += len(request.prompt_ids)
        return None

    def cancel(self, request_id: RequestId, reason: CancelReason, now_s: float) -> list[Event]:
        """End a request in any state. An unknown id, so also that of a finished request, changes nothing."""
        sequence = self._live.get(request_id)
        if sequence is None:
            return []
        return [self._finish(sequence, FinishReason.CANCELLED, now_s, cancel_reason=reason)]

    def drain(self) -> None:
        """Refuse new requests from now on; those accepted run to their end."""
        self._is_draining = True

    # Steps

    def plan_step(self, now_s: float) -> StepPlan | None:
        """The next step; None when nothing can run now or max_steps_in_flight plans have no result yet."""
        if len(self._flights) >= self.config.max_steps_in_flight:
            return None
        draft = Draft(self.config, self._next_step_id)
        num_preemptions = self._counters.preemptions
        self._plan_decode(draft)
        self._plan_prefill(draft)
        if self._counters.preemptions == num_preemptions:
            self._admit(draft, now_s)
        if draft.is_empty:
            return None
        plan = draft.seal()
        self._flights.append(_Flight(plan, tuple(draft.decoding), tuple(draft.prefilling)))
        self._next_step_id += 1
        self._counters.steps += 1
        return plan

    def apply_result(self, plan: StepPlan, result: StepResult, now_s: float) -> list[Event]:
        """Take the result of the oldest plan in flight."""
        flight = self._flights[0] if self._flights else None
        if flight is None or flight.plan is not plan or result.step_id != plan.step_id:
            raise InvariantError(f"result of step {result.step_id} is not that of the oldest plan in flight")
        if len(result.decode) != len(plan.decode) or [r is not None for r in result.prefill] != [
            s.samples for s in plan.prefill
        ]:
            raise InvariantError(f"the result of step {result.step_id} does not have the shape of its plan")
        self._flights.popleft()
        events: list[Event] = []
        for (sequence, slot), sampled in zip(
            flight.decoding + flight.prefilling, result.decode + result.prefill, strict=True
        ):
            if sampled is not None and sequence.slot == slot:
                self._accept(sequence, sampled, now_s, events)
        self._settle()
        return events

    def fail_plan(self, plan: StepPlan, code: str, message: str, now_s: float) -> list[Event]:
        """A plan in flight has no result: end the requests in it with ERROR, and no other."""
        flight = next((f for f in self._flights if f.plan is plan), None)
        if flight is None:
            raise InvariantError(f"step {plan.step_id} is not in flight")
        self._flights.remove(flight)
        events: list[Event] = []
        for sequence, slot in flight.decoding + flight.prefilling:
            if sequence.slot == slot:
                self._lane_of(sequence).memory.distrust(sequence)
                events.append(self._finish(sequence, FinishReason.ERROR, now_s, error_code=code, error_message=message))
        self._settle()
        return events

    # State

    @property
    def is_idle(self) -> bool:
        return not self._live and not self._flights

    def stats(self) -> SchedulerStats:
        pools, counters = [lane.memory.pool for lane in self.lanes], self._counters
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._waiting),
            pages_total=sum(pool.num_usable for pool in pools),
            pages_free=sum(pool.num_free for pool in pools),
            pages_cached=sum(pool.num_cached for pool in pools),
            steps=counters.steps,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            prefix_queries_tokens=counters.prefix_queries_tokens,
            prefix_hits_tokens=counters.prefix_hits_tokens,
            preemptions=counters.preemptions,
        )

    def check(self, *, deep: bool = False) -> None:
        """Raise InvariantError if any page, slot or sequence is in no state, in two, or in a wrong one.

        Cheap enough for every time that the server becomes idle. deep compares each page and each cache entry with
        its users too; its time grows with the pool, and it is meant for tests.
        """
        if any(s.slot is None for s in self._running):
            raise InvariantError("a running request lacks a slot")
        for lane in self.lanes:
            running = self._running_in(lane)
            if deep:
                lane.memory.check(running)
            lane.memory.pool.check_sum()
            lane.slots.check({s.slot for s in running if s.slot is not None})
            if self.is_idle and lane.memory.num_available != lane.memory.pool.num_usable:
                raise InvariantError("idle, but pages are referenced")
        self._waiting.check()
        listed = (*self._waiting.sequences, *self._running)
        if sorted(map(id, listed)) != sorted(map(id, self._live.values())):
            raise InvariantError("a live sequence is not in exactly one of the waiting and running lists")
        if self._running != sorted(self._running, key=queue_rank):
            raise InvariantError("the running list is out of order")
        in_flight = [row for f in self._flights for row in f.decoding + f.prefilling]
        for s in self._running:
            samples = sum(row == (s, s.slot) for row in in_flight)
            if len(s.pages) * self.config.page_size < s.num_computed:
                raise InvariantError(f"running request {s.request.request_id} lacks a page")
            if not s.is_prefilling and s.num_computed != len(s.request.prompt_ids) + s.num_planned_outputs - 1:
                raise InvariantError(f"request {s.request.request_id}: positions and outputs disagree")
            if s.num_pending > samples or s.num_planned_outputs > s.request.stop.max_tokens:
                raise InvariantError(f"request {s.request.request_id} waits for samples that do not come")

    # Planning

    def _plan_decode(self, draft: Draft) -> None:
        """One token for every decoding sequence that has, or gets, a page for it; the oldest first."""
        for sequence in tuple(self._running):
            if sequence.wants_decode and self._make_room(sequence) and sequence.slot is not None:
                draft.add_decode(sequence, sequence.slot)

    def _make_room(self, sequence: Sequence) -> bool:
        """A page for the next position, by preemption if need be; False if it must wait or was preempted itself."""
        lane = self._lane_of(sequence)
        while not lane.memory.grow(sequence):
            if lane.memory.is_draining:
                return False
            victim = pick_victim(self._running_in(lane))
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _plan_prefill(self, draft: Draft) -> None:
        for sequence in self._running:
            slot = sequence.slot
            if sequence.is_prefilling and slot is not None and draft.has_prefill_room(self._lane_of(sequence).index):
                draft.add_prefill(sequence, slot)

    def _admit(self, draft: Draft, now_s: float) -> None:
        """Start waiting sequences in order while slots, pages and the step's prefill budget last."""
        while self._waiting:
            sequence = self._waiting.first
            lane = self._place(sequence, draft)
            if lane is None:
                return
            self._waiting.start(sequence, now_s)
            slot = sequence.slot = lane.slots.take()
            insort(self._running, sequence, key=queue_rank)
            if sequence.admitted_s is None:
                sequence.admitted_s = now_s
                sequence.cached_tokens = sequence.num_computed
                if self.config.prefix_cache:
                    self._counters.prefix_queries_tokens += sequence.num_tokens
                    self._counters.prefix_hits_tokens += sequence.num_computed
            draft.add_load(sequence, slot)
            draft.add_prefill(sequence, slot)

    def _place(self, sequence: Sequence, draft: Draft) -> Lane | None:
        """Give a sequence pages in the best lane that has a slot, pages and budget for it; None if none has."""
        lanes = [lane for lane in self.lanes if lane.slots.num_free and draft.has_prefill_room(lane.index)]
        if len(lanes) > 1:
            costs = {lane.index: self._placement_cost(sequence, lane) for lane in lanes}
            lanes.sort(key=lambda lane: costs[lane.index])
        for lane in lanes:
            spare = pages_to_keep_free(sequence, self._running_in(lane), self.config.page_size)
            if lane.memory.admit(sequence, spare):
                return lane
        return None

    def _placement_cost(self, sequence: Sequence, lane: Lane) -> int:
        num_uncached = sequence.num_tokens - lane.memory.num_cached_tokens(sequence)
        return placement_cost(num_uncached, self._running_in(lane))

    # Results

    def _accept(self, sequence: Sequence, sampled: SampledToken, now_s: float, events: list[Event]) -> None:
        """One more known token; the request may end by it."""
        memory = self._lane_of(sequence).memory
        if not sampled.is_finite:
            memory.distrust(sequence)
            message = f"the logits of token {len(sequence.outputs)} are not finite"
            events.append(
                self._finish(sequence, FinishReason.ERROR, now_s, error_code=NON_FINITE, error_message=message)
            )
            return
        request, token_id = sequence.request, sampled.token_id
        sequence.num_pending -= 1
        sequence.outputs.append(token_id)
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
        self._counters.generation_tokens += 1
        num_outputs = len(sequence.outputs)
        events.append(
            TokenEvent(
                request_id=request.request_id, index=num_outputs - 1, token_id=token_id, logprobs=sampled.logprobs
            )
        )
        memory.publish(sequence)
        if token_id in request.stop.stop_token_ids and num_outputs >= request.stop.min_tokens:
            events.append(self._finish(sequence, FinishReason.STOP, now_s, stop_token_id=token_id))
        elif num_outputs >= request.stop.max_tokens:
            events.append(self._finish(sequence, FinishReason.LENGTH, now_s))

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now_s: float,
        *,
        stop_token_id: int | None = None,
        cancel_reason: CancelReason | None = None,
        error_code: str | None = None,
        error_message: str | None = None,
    ) -> Finished:
        self._release(sequence)
        del self._live[sequence.request.request_id]
        return Finished(
            request_id=sequence.request.request_id,
            reason=reason,
            prompt_tokens=len(sequence.request.prompt_ids),
            completion_tokens=len(sequence.outputs),
            cached_tokens=sequence.cached_tokens,
            timings=sequence.timings(now_s),
            stop_token_id=stop_token_id,
            cancel_reason=cancel_reason,
            error_code=error_code,
            error_message=error_message,
        )

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue with its known outputs; they are run again with the prompt, and go on from there.

        Samples in flight are dropped when they come: they were never reported, and are drawn again.
        """
        self._release(sequence)
        sequence.preemptions += 1
        self._counters.preemptions += 1
        self._waiting.add(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Give back all that a sequence holds, in whatever state it is."""
        if sequence.slot is None:
            self._waiting.remove(sequence)
            return
        lane = self._lane_of(sequence)
        self._running.remove(sequence)
        lane.slots.release(sequence.slot)
        lane.memory.release(sequence, self._is_in_flight(sequence))
        sequence.clear_tenancy()

    # Bookkeeping

    def _lane_of(self, sequence: Sequence) -> Lane:
        """Of a running sequence."""
        if sequence.slot is None:
            raise InvariantError(f"request {sequence.request.request_id} is in no lane")
        return self.lanes[self.config.lane_of_slot(sequence.slot.slot)]

    def _running_in(self, lane: Lane) -> list[Sequence]:
        if len(self.lanes) == 1:
            return self._running
        return [s for s in self._running if self._lane_of(s) is lane]

    def _is_in_flight(self, sequence: Sequence) -> bool:
        oldest = self._flights[0].plan.step_id if self._flights else None
        return oldest is not None and sequence.last_step is not None and sequence.last_step >= oldest

    def _settle(self) -> None:
        for lane in self.lanes:
            lane.memory.settle(self._flights[0].plan.step_id if self._flights else None)

    def _refuse(self, request: Request, now_s: float) -> Rejection | None:
        if self._is_draining:
            return Rejection(
                reason=RejectionReason.SHUTTING_DOWN, message="the server is shutting down and takes no new requests"
            )
        if request.request_id in self._live:
            return Rejection(reason=RejectionReason.INVALID, message="the request id is already in use")
        return refuse_size(len(request.prompt_ids), request.stop.max_tokens, self.config) or self._waiting.refuse(
            request, now_s
        )
