"""Continuous batching: which sequences run in the next step, and what came of the last one.

Time is an argument and every order is fixed, so the same commands give the same plans. Two invariants make overlap
safe: a result row is matched by its SlotRef, so it never reaches a later tenant of the slot; and pages leave a
sequence only when no plan in flight names them.
"""

from collections import deque
from dataclasses import dataclass

from headrace.serving.core.admission import refuse_size
from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.deadlines import Deadlines, refuse_late
from headrace.serving.core.draft import Draft
from headrace.serving.core.errors import InvariantError
from headrace.serving.core.events import Event, Finished, PreemptionAction, PreemptionReason, TokenEvent
from headrace.serving.core.lane import Lane
from headrace.serving.core.plan import SampledToken, SlotRef, StepPlan, StepResult
from headrace.serving.core.planner import Planner
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
from headrace.serving.core.swap_space import Swapped
from headrace.serving.core.tenancy import Tenancies

NON_FINITE = "non_finite_logits"
"""error_code of a request whose logits had NaN or infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Gauges and counters since start; names as in the link's Stats, which explains them.

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
    prompt_tokens: int = 0
    generation_tokens: int = 0
    deadline_misses: int = 0


@dataclass(frozen=True, slots=True)
class _Flight:
    """A plan without a result yet, when it was made, whose loads and rows it has, and whose KV it copies to the
    host."""

    plan: StepPlan
    planned_s: float
    loading: tuple[tuple[Sequence, SlotRef], ...]
    decoding: tuple[tuple[Sequence, SlotRef], ...]
    prefilling: tuple[tuple[Sequence, SlotRef], ...]
    leaving: tuple[tuple[Sequence, Swapped], ...]


class Scheduler:
    """Every accepted request gets TokenEvents with index 0, 1, 2, … and then exactly one Finished; Preempted between
    them as it happens. What happens to requests while a plan is made is told by the next call that returns events."""

    def __init__(self, config: SchedulerConfig, *, hash_page: PageHash = sha256_page) -> None:
        self.config = config
        self._tenancies = Tenancies(config, hash_page)
        self._planner = Planner(self._tenancies)
        self._live: dict[RequestId, Sequence] = {}
        self._deadlines = Deadlines()
        self._flights: deque[_Flight] = deque()
        self._num_arrived = 0
        self._is_draining = False
        self._counters = _Counters()

    # Commands

    def submit(self, request: Request, now_s: float) -> Rejection | None:
        """Queue a request, or say why not; a rejected one leaves no trace."""
        sequence = Sequence(request=request, arrival=self._num_arrived, submitted_s=now_s)
        rejection = self._refuse(sequence, now_s)
        if rejection is not None:
            return rejection
        sequence.tenant = self._tenancies.shares.join(request.tenant, request.weight)
        self._num_arrived += 1
        self._live[request.request_id] = sequence
        self._tenancies.waiting.add(sequence)
        self._deadlines.add(sequence)
        self._counters.prompt_tokens += len(request.prompt_ids)
        return None

    def cancel(self, request_id: RequestId, reason: CancelReason, now_s: float) -> list[Event]:
        """End a request in any state. An unknown id, so also that of a finished request, changes nothing."""
        sequence = self._live.get(request_id)
        if sequence is None:
            return []
        return self._told([self._finish(sequence, FinishReason.CANCELLED, now_s, cancel_reason=reason)])

    def expire(self, now_s: float) -> list[Event]:
        """End every request whose deadline has passed, in whatever state; to be called before each plan_step with the
        same time, so that no step is spent on one. A journal of the scheduler's calls records this one too."""
        late = self._deadlines.take_due(now_s)
        self._counters.deadline_misses += len(late)
        return self._told(
            [self._finish(s, FinishReason.CANCELLED, now_s, cancel_reason=CancelReason.DEADLINE) for s in late]
        )

    def preempt(self, request_id: RequestId, now_s: float) -> list[Event]:
        """Send a running request back to the queue: for tests and simulation. One that waits, that is unknown, or that
        deterministic mode cannot swap out is left alone."""
        sequence = self._live.get(request_id)
        if sequence is None or sequence.slot is None or not self._tenancies.can_preempt(sequence):
            return []
        self._tenancies.preempt(sequence, PreemptionReason.FORCED, now_s)
        return self._told([])

    def drain(self) -> None:
        """Refuse new requests from now on; those accepted run to their end."""
        self._is_draining = True

    # Steps

    def plan_step(self, now_s: float) -> StepPlan | None:
        """The next step; None when nothing can run now, max_steps_in_flight plans have no result yet, or the next waits
        for the result of the one in flight."""
        if len(self._flights) >= self.config.max_steps_in_flight:
            return None
        if self._flights and self._planner.must_wait(now_s, self._flights[-1].plan):
            return None
        tenancies = self._tenancies
        draft = Draft(self.config, tenancies.next_step)
        self._planner.fill(draft, now_s)
        if draft.is_empty:
            return None
        leaving = tenancies.carry_out()
        plan = draft.seal(tuple(copy for _, swapped in leaving for copy in swapped.copies))
        rows = tuple(draft.loading), tuple(draft.decoding), tuple(draft.prefilling)
        self._flights.append(_Flight(plan, now_s, *rows, leaving))
        tenancies.next_step += 1
        tenancies.oldest_in_flight = self._flights[0].plan.step_id
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
        self._tenancies.cost.learn(plan, flight.planned_s, now_s)
        self._land(flight)
        events: list[Event] = []
        for (sequence, slot), sampled in zip(
            flight.decoding + flight.prefilling, result.decode + result.prefill, strict=True
        ):
            if sampled is not None and sequence.slot == slot:
                self._accept(sequence, sampled, now_s, events)
        self._tenancies.settle()
        return self._told(events)

    def fail_plan(self, plan: StepPlan, code: str, message: str, now_s: float) -> list[Event]:
        """A plan in flight has no result: end the requests in it, also those that it only loaded, with ERROR, and no
        other.

        KV that it was to copy to the host, or that was copied after it may have damaged it, is computed again; in
        deterministic mode, which never does that, such a request ends too.
        """
        flight = next((f for f in self._flights if f.plan is plan), None)
        if flight is None:
            raise InvariantError(f"step {plan.step_id} is not in flight")
        self._tenancies.cost.forget_gap()
        self._land(flight)
        ended, lost = [], []
        for sequence, slot in dict.fromkeys(flight.loading + flight.decoding + flight.prefilling):
            if sequence.slot == slot:
                self._tenancies.lane_of(sequence).memory.distrust(sequence)
                ended.append(sequence)
            elif sequence.swapped is not None:
                lost.append(sequence)
        lost += [s for s, swapped in flight.leaving if s.swapped is swapped and s not in lost]
        for sequence in lost:
            if self.config.deterministic:
                ended.append(sequence)
            else:
                self._tenancies.drop_swapped(sequence)
        events: list[Event] = [
            self._finish(s, FinishReason.ERROR, now_s, error_code=code, error_message=message) for s in ended
        ]
        self._tenancies.settle()
        return self._told(events)

    # State

    @property
    def is_idle(self) -> bool:
        return not self._live and not self._flights

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return self._tenancies.lanes

    def stats(self) -> SchedulerStats:
        tenancies, counters = self._tenancies, self._counters
        pools = [lane.memory.pool for lane in self.lanes]
        host = [lane.host for lane in self.lanes]
        return SchedulerStats(
            running=len(tenancies.running),
            waiting=len(tenancies.waiting),
            pages_total=sum(pool.num_usable for pool in pools),
            pages_free=sum(pool.num_free for pool in pools),
            pages_cached=sum(pool.num_cached for pool in pools),
            steps=tenancies.next_step,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            prefix_queries_tokens=self._planner.prefix_queries_tokens,
            prefix_hits_tokens=self._planner.prefix_hits_tokens,
            preemptions=tenancies.num_preemptions,
            preemptions_swapped=tenancies.num_preempted[PreemptionAction.SWAPPED],
            preemptions_recomputed=tenancies.num_preempted[PreemptionAction.RECOMPUTED],
            swap_pages_total=sum(space.num_pages for space in host),
            swap_pages_used=sum(space.num_pages - space.num_free for space in host),
            deadline_misses=counters.deadline_misses,
            queued_prompt_tokens=tenancies.waiting.num_prompt_tokens,
            decode_step_ms=1e3 * tenancies.cost.decode_s,
            prefill_token_ms=1e3 * tenancies.cost.prefill_token_s,
        )

    def check(self, *, deep: bool = False) -> None:
        """Raise InvariantError if any page, slot or sequence is in no state, in two, or in a wrong one.

        Cheap enough for every time that the server becomes idle. deep compares each page and each cache entry with
        its users too; its time grows with the pool, and it is meant for tests.
        """
        tenancies = self._tenancies
        tenancies.check(deep=deep, is_idle=self.is_idle)
        listed = (*tenancies.waiting.sequences, *tenancies.running)
        if sorted(map(id, listed)) != sorted(map(id, self._live.values())):
            raise InvariantError("a live sequence is not in exactly one of the waiting and running lists")
        in_flight = [row for f in self._flights for row in f.decoding + f.prefilling]
        for s in tenancies.running:
            samples = sum(row == (s, s.slot) for row in in_flight)
            if len(s.pages) * self.config.page_size < s.num_computed:
                raise InvariantError(f"running request {s.request.request_id} lacks a page")
            if not s.is_prefilling and s.num_computed != len(s.request.prompt_ids) + s.num_planned_outputs - 1:
                raise InvariantError(f"request {s.request.request_id}: positions and outputs disagree")
            if s.num_pending > samples or s.num_planned_outputs > s.request.stop.max_tokens:
                raise InvariantError(f"request {s.request.request_id} waits for samples that do not come")

    # Results

    def _land(self, flight: _Flight) -> None:
        self._flights.remove(flight)
        self._tenancies.oldest_in_flight = self._flights[0].plan.step_id if self._flights else None

    def _told(self, events: list[Event]) -> list[Event]:
        """With what happened since, in its order: a preemption is known before the end of its request."""
        told, self._tenancies.events = self._tenancies.events, []
        return told + events

    def _accept(self, sequence: Sequence, sampled: SampledToken, now_s: float, events: list[Event]) -> None:
        """One more known token; the request may end by it."""
        memory = self._tenancies.lane_of(sequence).memory
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
        self._tenancies.release(sequence)
        self._tenancies.shares.leave(sequence.tenant, now_s)
        self._deadlines.discard(sequence)
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

    def _refuse(self, sequence: Sequence, now_s: float) -> Rejection | None:
        request = sequence.request
        if self._is_draining:
            return Rejection(
                reason=RejectionReason.SHUTTING_DOWN, message="the server is shutting down and takes no new requests"
            )
        if request.request_id in self._live:
            return Rejection(reason=RejectionReason.INVALID, message="the request id is already in use")
        return (
            refuse_size(len(request.prompt_ids), request.stop.max_tokens, self.config)
            or self._tenancies.waiting.refuse(request, now_s)
            or refuse_late(sequence, self._tenancies, now_s)
        )
