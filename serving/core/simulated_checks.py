"""What must hold in a simulation, after each step and at the end.

I1 pages: free + referenced + cached = all, counts equal holders. I2 a page that gets written has one owner; pages of
plans in flight stay. I3 cache entries stand for the chain that they name. I4 one state, one terminal event, nothing
after it, no end without a cause. I5 what a client gets is what was generated, and equals the run alone. I6 positions
of a tenancy follow each other; only the last known token is sampled from. I7 logprobs belong to their tokens.
I8 bounds: step budget, slots, queue, buffers, host pages. I9 nobody starves, nobody is preempted for ever. I10 without
faults all ends, within a bound, and all pages come back. I11 counters equal the sums over events. I12 no step is spent
on a request after its deadline.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from headrace.serving.core.buckets import padded_tokens
from headrace.serving.core.events import Finished, PreemptionAction, PreemptionReason
from headrace.serving.core.plan import SampledToken, SlotRef, StepPlan
from headrace.serving.core.policy import MAX_PAGE_PREEMPTIONS, MAX_YIELDS, YIELDS
from headrace.serving.core.request import CancelReason, FinishReason, Rejection, RejectionReason, Request, RequestId
from headrace.serving.core.scheduler import NON_FINITE, Scheduler
from headrace.serving.core.simulated_edge import Client, need
from headrace.serving.core.simulated_world import World

FAILED_STEP = "failed_step"
"""error_code of requests whose step the simulator let fail."""
SIZE_REASONS = (RejectionReason.CONTEXT_EXCEEDED, RejectionReason.NEVER_FITS)


class PlanChecks:
    """Follows the tenancies of one scheduler from its plans alone."""

    def __init__(self, world: World, scheduler: Scheduler, clients: dict[RequestId, Client]) -> None:
        self._world, self._scheduler, self._clients = world, scheduler, clients
        self._owners: dict[SlotRef, RequestId] = {}
        self._ends: dict[SlotRef, int | None] = {}
        """Position that the next row of a tenancy must start at; None = its first row may start anywhere."""

    def check(self, plan: StepPlan, now_us: int) -> None:
        for load in plan.loads:
            need(load.slot not in self._owners, "I4", f"{load.slot} is loaded twice")
            self._owners[load.slot], self._ends[load.slot] = load.request.request_id, None
        need(bool(plan.decode or plan.prefill), "I8", "a plan has no row")
        rows = [(row.slot, row.position, row.position + 1) for row in plan.decode]
        rows += [(s.slot, s.start, s.start + len(s.token_ids)) for s in plan.prefill]
        for slot, start, end in rows:
            need(slot in self._owners, "I4", f"{slot} was not loaded")
            expected = self._ends[slot]
            need(expected is None or expected == start, "I6", f"{slot} goes on at {start} and not at {expected}")
            self._ends[slot] = end
            self._check_owner(self._clients[self._owners[slot]], start, now_us)
        self._check_budget(plan)
        self._check_written(plan)
        if self._world.config.deterministic:
            self._check_grid(plan)

    def _check_owner(self, client: Client, start: int, now_us: int) -> None:
        request = client.request
        name = f"request {request.request_id}"
        need(client.is_live, "I4", f"{name} is in a plan after its end")
        need(start < len(request.prompt_ids) + request.stop.max_tokens, "I6", f"{name} runs beyond its end")
        if request.deadline_ms is not None:
            late_us = now_us - client.submitted_us - round(1e3 * request.deadline_ms)
            need(late_us <= 0, "I12", f"{name} is in a plan {late_us} us after its deadline")

    def _check_budget(self, plan: StepPlan) -> None:
        config = self._world.config
        tokens: Counter[int] = Counter()
        segments: Counter[int] = Counter()
        for segment in plan.prefill:
            lane = config.lane_of_slot(segment.slot.slot)
            tokens[lane] += padded_tokens(len(segment.token_ids), config.block_tokens)
            segments[lane] += 1
        need(max(tokens.values(), default=0) <= config.chunk_tokens, "I8", "more prompt tokens than chunk_tokens")
        need(max(segments.values(), default=0) <= config.max_segments, "I8", "more segments than max_segments")
        copies = plan.swap_out + plan.swap_in
        limit = config.num_lanes * config.num_swap_pages
        need(all(0 <= copy.host_page < limit for copy in copies), "I8", "a copy names a host page that is not there")
        for group in (plan.swap_out, plan.swap_in):
            need(len({copy.host_page for copy in group}) == len(group), "I2", "a host page is copied twice in a step")

    def _check_grid(self, plan: StepPlan) -> None:
        """Deterministic mode: one kind of rows, and chunks that depend on their prompt alone."""
        need(not (plan.decode and plan.prefill), "I7", "a deterministic step has rows of both kinds")
        cell = self._world.config.chunk_tokens
        for segment in plan.prefill:
            is_whole = len(segment.token_ids) == cell or segment.samples
            need(segment.start % cell == 0 and is_whole, "I7", "a deterministic chunk is off its grid")

    def _check_written(self, plan: StepPlan) -> None:
        """Pages that get written have one owner and are unknown to the cache."""
        config = self._world.config
        pools, size = [lane.memory.pool for lane in self._scheduler.lanes], config.page_size
        written = [
            row.page_ids[row.position // size] for row in plan.decode if row.position // size < len(row.page_ids)
        ]
        written += [page for segment in plan.prefill for page in segment.page_ids[segment.start // size :]]
        need(len(set(written)) == len(written), "I2", "two rows write one page")
        for page in written:
            pool = pools[config.lane_of_page(page)]
            need(
                pool.num_holders(page) == 1 and not pool.is_published(page), "I2", f"a plan writes page {page}, shared"
            )


def check_state(world: World, scheduler: Scheduler, plans: Iterable[StepPlan]) -> None:
    """After every event: books of pages and slots, pages of plans in flight, bounds."""
    config = world.config
    scheduler.check(deep=True)
    for plan in plans:
        for row in plan.decode + plan.prefill:
            pool = scheduler.lanes[config.lane_of_slot(row.slot.slot)].memory.pool
            need(all(map(pool.num_holders, row.page_ids)), "I2", "a page of a plan in flight was given back")
    stats = scheduler.stats()
    need(stats.running <= config.num_lanes * config.num_slots, "I8", "more sequences run than there are slots")
    need(0 <= stats.swap_pages_used <= stats.swap_pages_total, "I8", "more host pages are used than there are")


def check_answer(
    world: World, scheduler: Scheduler, request: Request, rejection: Rejection | None, waiting: int, is_draining: bool
) -> None:
    """Of a submit of an id that is not in use. waiting: requests that waited before it."""
    config = world.config
    size = len(request.prompt_ids) + request.stop.max_tokens
    fits = size <= min(config.max_context, (config.num_pages - 1) * config.page_size + 1)
    name = f"request {request.request_id}"
    if rejection is None:
        need(not is_draining, "I4", f"{name} was accepted while the server drains")
        need(fits, "I4", f"{name} can never fit, but was accepted")
        need(waiting < config.max_queued_requests, "I8", "the queue takes too many requests")
        need(scheduler.stats().waiting == waiting + 1, "I11", "an accepted request does not wait")
        return
    is_late = rejection.reason == RejectionReason.SHUTTING_DOWN
    need(is_late == is_draining, "I4", f"{name} was refused by drain wrongly")
    need(is_late or (rejection.reason in SIZE_REASONS) != fits, "I4", f"{name} was refused wrongly: {rejection}")
    need(
        rejection.reason != RejectionReason.DEADLINE or request.deadline_ms is not None,
        "I12",
        f"{name} has no deadline and was refused for it",
    )
    if rejection.reason == RejectionReason.QUEUE_FULL:
        full = waiting >= config.max_queued_requests or config.max_queued_prompt_tokens < 10_000
        need(full and rejection.retry_after_ms is not None, "I8", f"{name} was refused although there is room")


def check_finished(
    world: World, client: Client, finished: Finished, expected: Callable[[Request], tuple[SampledToken, ...]]
) -> None:
    """One request, at its end."""
    request, name = client.request, f"request {client.request.request_id}"
    alone = list(expected(request))
    tokens = [SampledToken(token_id=t.token_id, logprobs=t.logprobs) for t in client.tokens]
    if finished.reason in (FinishReason.STOP, FinishReason.LENGTH):
        need(tokens == alone, "I5", f"{name} differs from its run alone")
        stops = tokens[-1].token_id in request.stop.stop_token_ids and len(tokens) >= request.stop.min_tokens
        need(
            finished.stop_token_id == (tokens[-1].token_id if stops else None)
            and stops == (finished.reason == FinishReason.STOP),
            "I4",
            f"{name} ended with the wrong reason",
        )
    else:
        need(tokens == alone[: len(tokens)], "I5", f"{name} differs from its run alone before its end")
    _check_cause(world, client, finished)
    _check_usage(world, client, finished)


def _check_cause(world: World, client: Client, finished: Finished) -> None:
    request, name = client.request, f"request {client.request.request_id}"
    non_finite = world.faults.non_finite
    if finished.reason == FinishReason.ERROR:
        is_non_finite = (request.request_id, len(client.tokens)) in non_finite
        code = finished.error_code
        need(code == FAILED_STEP or (code == NON_FINITE and is_non_finite), "I4", f"{name} failed for no reason")
    lost = any((request.request_id, i) in non_finite for i in range(len(client.tokens)))
    need(not lost, "I5", f"{name} has a token from logits that are not finite")
    if finished.cancel_reason == CancelReason.DEADLINE:
        need(request.deadline_ms is not None, "I12", f"{name} has no deadline and missed it")


def _check_usage(world: World, client: Client, finished: Finished) -> None:
    request, name = client.request, f"request {client.request.request_id}"
    cached, times = finished.cached_tokens, finished.timings
    need(
        0 <= cached < len(request.prompt_ids) and cached % world.config.page_size == 0,
        "I6",
        f"{name} has an impossible cached_tokens",
    )
    need(
        finished.prompt_tokens == len(request.prompt_ids) and finished.completion_tokens == len(client.tokens),
        "I11",
        f"{name} has wrong usage",
    )
    for reasons, most in (((PreemptionReason.PAGES,), MAX_PAGE_PREEMPTIONS), (YIELDS, MAX_YIELDS)):
        often = sum(c.count for c in times.preempted if c.reason in reasons)
        need(often <= most, "I9", f"{name} was preempted too often")
    need(
        min(times.queue_ms, times.prefill_ms, times.decode_ms, times.preempted_ms) >= 0,
        "I4",
        f"{name} has a negative time",
    )
    counted = sum(count.count for count in times.preempted)
    need(times.preemptions == len(client.preempted) == counted, "I11", f"{name} counts its preemptions wrongly")


def check_counters(world: World, scheduler: Scheduler, clients: Iterable[Client]) -> None:
    """At the end, over the clients of this scheduler's life."""
    stats = scheduler.stats()
    all_clients = list(clients)
    finished = [client.finished for client in all_clients if client.finished is not None]
    preempted = [event for client in all_clients for event in client.preempted]
    need(len(finished) == len(all_clients), "I10", "an accepted request has not ended")
    need(stats.running == stats.waiting == 0, "I10", "idle, but something is left")
    need(stats.pages_free + stats.pages_cached == stats.pages_total, "I1", "pages have not come back")
    need(stats.swap_pages_used == 0, "I1", "host pages have not come back")
    for name, counted, summed in (
        ("prompt_tokens", stats.prompt_tokens, sum(f.prompt_tokens for f in finished)),
        ("generation_tokens", stats.generation_tokens, sum(f.completion_tokens for f in finished)),
        ("prefix_hits_tokens", stats.prefix_hits_tokens, sum(f.cached_tokens for f in finished)),
        ("preemptions", stats.preemptions, len(preempted)),
        ("swapped", stats.preemptions_swapped, sum(p.action == PreemptionAction.SWAPPED for p in preempted)),
        ("recomputed", stats.preemptions_recomputed, sum(p.action == PreemptionAction.RECOMPUTED for p in preempted)),
        ("deadline_misses", stats.deadline_misses, sum(f.cancel_reason == CancelReason.DEADLINE for f in finished)),
        ("queued_prompt_tokens", stats.queued_prompt_tokens, 0),
    ):
        need(counted == summed, "I11", f"{name} is {counted}, but the events sum up to {summed}")
