"""Who may start a request now: rate limits, budgets, deadlines and the first-token objective, asked before rendering.

``accept`` refuses at once or counts the request; everything it needs is arithmetic on the event loop, so a refusal
waits for no engine step and no tokenizer. What it counted ends exactly once: with the generation, or by ``abandon``
where no generation came of it. Sizes are bounds until the prompt is tokenized, and then corrected.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from headrace.serving.core.budgets import MAX_IDLE_TENANTS, BudgetRefusal, Budgets, Cost, Hold
from headrace.serving.core.forecast import NO_WORK, Backlog, Correction, EngineSpeed, Forecast, Place, Work, forecast
from headrace.serving.core.output_history import OutputHistory
from headrace.serving.core.rate_limit import Rate, TokenBucket
from headrace.serving.core.request import FinishReason, Priority, Request, RequestId
from headrace.serving.core.tenant_policy import BudgetLimits, TenantPolicy
from headrace.serving.edge.bodies import ParsedBody
from headrace.serving.edge.errors import ApiError, ErrorCode, deadline_exceeded
from headrace.serving.edge.expert_metrics import EngineReports
from headrace.serving.edge.generation import Done, Failure, Generation
from headrace.serving.edge.refusals import budget_error, late_error, over_rate, unmeetable_error
from headrace.serving.edge.tenants import Policies
from headrace.serving.edge.terms import PRIORITIES, Terms
from headrace.serving.engine.messages import Ready

TOKENS_PER_MESSAGE = 8
"""What a chat template writes around a message, as a bound before it is rendered."""
SMOOTHING = 0.1
"""Weight of the newest prompt in the mean of tokens per byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """limits: of the whole server. first_token_ms: a request that would wait for longer, by forecast, is refused; None
    = it may wait. chunk_tokens: most prompt tokens of a step."""

    limits: BudgetLimits = BudgetLimits()
    first_token_ms: int | None = None
    chunk_tokens: int = 256


@dataclass(frozen=True, slots=True)
class _Ahead:
    """What a request found when it came. is_urgent: others make way for it."""

    work: Work = NO_WORK
    is_urgent: bool = False


@dataclass(slots=True, eq=False)
class _Choice:
    """One choice from acceptance to its end. charged_tokens: taken from the bucket of tokens, None without one.
    forecast_ms: of the first token, before correction."""

    hold: Hold
    place: Place
    ahead: _Ahead
    forecast_ms: float | None
    accepted_s: float
    charged_tokens: int | None


@dataclass(slots=True)
class _Buckets:
    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Admitted:
    """An accepted request. deadline_s: on the clock; None = none."""

    request_ids: tuple[RequestId, ...]
    policy: TenantPolicy
    priority: Priority
    deadline_s: float | None


class AdmissionControl:
    """All methods run on the event loop and return at once."""

    def __init__(
        self, config: AdmissionConfig, *, engine: EngineReports, policies: Policies, clock: Callable[[], float]
    ) -> None:
        self.config = config
        self.policies = policies
        self.budgets = Budgets(config.limits)
        self.backlog = Backlog()
        self.refusals: Counter[str] = Counter()
        self.num_unread_at_deadline = 0
        self._engine = engine
        self._clock = clock
        self._history = OutputHistory()
        self._correction = Correction()
        self._tokens_per_byte = 0.0
        self._choices: dict[RequestId, _Choice] = {}
        self._buckets: OrderedDict[str, _Buckets] = OrderedDict()

    # Before rendering

    def accept(
        self,
        body: ParsedBody,
        sizes: Sequence[int],
        request_ids: tuple[RequestId, ...],
        *,
        ready: Ready,
        tenant: str,
        terms: Terms,
    ) -> Admitted:
        """Count a request, or raise ApiError. sizes: bytes of each prompt, as ``Preparation.sizes``."""
        now_s = self._clock()
        policy = self.policies.of(tenant)
        priority = _priority(policy, terms)
        deadline_ms = policy.deadline_ms if terms.deadline_ms is None else terms.deadline_ms
        deadline_s = None if deadline_ms is None else terms.arrival_s + deadline_ms / 1000
        if deadline_s is not None and now_s >= deadline_s:
            raise deadline_exceeded()
        bounds = _prompt_bounds(body, sizes, ready.max_context)
        left = max(1, ready.max_context - bounds[0])
        most = left if body.max_tokens is None else min(body.max_tokens, ready.max_context)
        expected = self._history.expected_tokens(tenant, most) if body.generate else 1
        costs = [Cost(prompt_tokens=bound, output_tokens=expected, page_size=ready.page_size) for bound in bounds]
        likely = [bound if self._is_exact(body, i) else self._likely_tokens(bound) for i, bound in enumerate(bounds)]
        charges = [tokens + cost.output_tokens for tokens, cost in zip(likely, costs, strict=True)]
        buckets = self._buckets_of(tenant, policy, now_s)
        _check_rates(buckets, len(costs), sum(charges), now_s)
        holds = self.budgets.take(tenant, policy.limits, costs, now_s)
        if isinstance(holds, BudgetRefusal):
            raise budget_error(holds)
        output = self._likely_output(body, tenant, most)
        places = [Place(tenant, policy.weight, priority, tokens, output) for tokens in likely]
        own = self._sure_output(body, tenant, most)
        try:
            seen = [self._require_in_time(place, own, None, deadline_s, now_s) for place in places]
        except ApiError:
            for hold in holds:
                self.budgets.release(hold, now_s)
            raise
        if buckets.requests is not None:
            buckets.requests.take(len(costs), now_s)
        if buckets.tokens is not None:
            buckets.tokens.take(sum(charges), now_s)
        for index, request_id in enumerate(request_ids):
            ahead, seen_forecast = seen[index]
            self.backlog.add(places[index])
            self._choices[request_id] = _Choice(
                hold=holds[index],
                place=places[index],
                ahead=ahead,
                forecast_ms=None if seen_forecast is None else seen_forecast.first_token_ms,
                accepted_s=now_s,
                charged_tokens=None if buckets.tokens is None else charges[index],
            )
        return Admitted(request_ids, policy, priority, deadline_s)

    # Before the engine

    def tokenized(
        self, admitted: Admitted, body: ParsedBody, sizes: Sequence[int], requests: Sequence[Request], ready: Ready
    ) -> tuple[Request, ...]:
        """The requests as the engine gets them, with exact sizes counted. Raises ApiError; ``abandon`` is then due."""
        now_s = self._clock()
        costs = [
            Cost(
                prompt_tokens=len(request.prompt_ids),
                output_tokens=self._history.expected_tokens(request.tenant, request.stop.max_tokens),
                page_size=ready.page_size,
            )
            for request in requests
        ]
        refusal = self.budgets.too_large(requests[0].tenant, admitted.policy.limits, costs)
        if refusal is not None:
            raise budget_error(refusal)
        for index, request in enumerate(requests):
            choice = self._choices[request.request_id]
            num_prompt = len(request.prompt_ids)
            if not self._is_exact(body, index):
                ratio = num_prompt / max(1, sizes[index])
                mean = self._tokens_per_byte
                self._tokens_per_byte = ratio if not mean else mean + SMOOTHING * (ratio - mean)
            self.budgets.correct(choice.hold, admitted.policy.limits, costs[index], now_s)
            self._charge(choice, num_prompt + costs[index].output_tokens, now_s)
            self.backlog.correct(choice.place, num_prompt, choice.place.output_tokens)
            own = self._sure_output(body, request.tenant, request.stop.max_tokens)
            self._require_in_time(choice.place, own, choice.ahead, admitted.deadline_s, now_s)
        left_ms = None if admitted.deadline_s is None else (admitted.deadline_s - now_s) * 1000
        if left_ms is not None and left_ms <= 0:
            raise deadline_exceeded()
        return tuple(
            replace(request, weight=admitted.policy.weight, priority=admitted.priority, deadline_ms=left_ms)
            for request in requests
        )

    def abandon(self, admitted: Admitted) -> None:
        """No generation will come of it. Idempotent, and without effect on choices that have ended."""
        for request_id in admitted.request_ids:
            self._end(request_id, 0)

    # What becomes of it

    def on_token(self, generation: Generation, now_s: float) -> None:
        choice = self._choices.get(generation.request.request_id)
        if choice is None:
            return
        choice.place.num_generated += 1
        if choice.place.num_generated > 1:
            return
        self.budgets.leave_queue(choice.hold, now_s)
        self.backlog.started(choice.place)
        objective = self.config.first_token_ms
        if objective is None or choice.forecast_ms is None:
            return
        if choice.forecast_ms * self._correction.factor > objective / 4:
            self._correction.observe(is_late=(now_s - choice.accepted_s) * 1000 > objective)

    def on_end(self, generation: Generation, outcome: Done | Failure) -> None:
        request = generation.request
        if isinstance(outcome, Done) and outcome.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._history.ended(request.tenant, request.stop.max_tokens, max(1, generation.completion_tokens))
        self._end(request.request_id, len(request.prompt_ids) + generation.completion_tokens)

    def _end(self, request_id: RequestId, num_tokens: int) -> None:
        choice = self._choices.pop(request_id, None)
        if choice is None:
            return
        now_s = self._clock()
        self.budgets.release(choice.hold, now_s)
        self.backlog.ended(choice.place)
        self._charge(choice, num_tokens, now_s)

    def _charge(self, choice: _Choice, num_tokens: int, now_s: float) -> None:
        """What it takes of the bucket of tokens is now known to be so much."""
        buckets = self._buckets.get(choice.place.tenant)
        if choice.charged_tokens is not None and buckets is not None and buckets.tokens is not None:
            buckets.tokens.take(num_tokens - choice.charged_tokens, now_s)
            choice.charged_tokens = num_tokens

    # Forecasts

    @property
    def speed(self) -> EngineSpeed | None:
        """None while no engine is ready."""
        ready, stats = self._engine.ready_info, self._engine.stats
        if ready is None:
            return None
        return EngineSpeed(
            decode_step_ms=stats.decode_step_ms,
            prefill_token_ms=stats.prefill_token_ms,
            num_rows=ready.num_slots * ready.num_lanes,
            chunk_tokens=self.config.chunk_tokens,
            num_lanes=ready.num_lanes,
        )

    def queue_delay_ms(self) -> float | None:
        """Forecast for a request without a prompt behind everything that waits; None while unknown."""
        speed = self.speed
        ahead, remaining = self.backlog.all_waiting(), self.backlog.remaining()
        seen = None if speed is None else forecast(speed, 0, 1, ahead, remaining)
        return None if seen is None else seen.first_token_ms

    def _require_in_time(
        self, place: Place, own: int, ahead: _Ahead | None, deadline_s: float | None, now_s: float
    ) -> tuple[_Ahead, Forecast | None]:
        """The work ahead and the forecast; raises ApiError where it would be too late. own: output tokens of this
        request. ahead: None = as of now."""
        objective, speed = self.config.first_token_ms, self.speed
        if (objective is None and deadline_s is None) or speed is None or not speed.is_known:
            return _Ahead(), None
        if ahead is None:
            is_urgent = self.backlog.yields_to(place)
            ahead = _Ahead(NO_WORK if is_urgent else self.backlog.ahead_of(place), is_urgent)
        remaining = [] if ahead.is_urgent else self.backlog.remaining()
        seen = forecast(speed, place.prompt_tokens, own, ahead.work, remaining)
        alone = forecast(speed, place.prompt_tokens, own)
        assert seen is not None and alone is not None
        if deadline_s is not None:
            left_ms = (deadline_s - now_s) * 1000
            if seen.last_token_ms > left_ms:
                raise unmeetable_error(seen, alone, left_ms)
        first_ms = seen.first_token_ms * self._correction.factor
        # Whoever would be late on an idle server too is not helped by coming later.
        if objective is not None and first_ms > objective and seen.first_token_ms > alone.first_token_ms:
            raise late_error(first_ms, objective)
        return ahead, seen

    # Estimates

    def _likely_output(self, body: ParsedBody, tenant: str, most: int) -> int:
        """What others who wait behind the request must reckon with. most: max_tokens, or what the context leaves."""
        unknown = 1 if body.max_tokens is None else most
        return self._known_output(body, tenant, most) or unknown

    def _sure_output(self, body: ParsedBody, tenant: str, most: int) -> int:
        """What its own deadline is held against: while nothing is known, only what the request itself insists on."""
        return self._known_output(body, tenant, most) or max(1, min(body.min_tokens, most))

    def _known_output(self, body: ParsedBody, tenant: str, most: int) -> int | None:
        """All of it where nothing else ends the request; else as it was before."""
        if not body.generate:
            return 1
        if body.ignore_eos and not body.stop and not body.stop_token_ids:
            return most
        known = self._history.known_tokens(tenant, most)
        return None if known is None else max(known, min(body.min_tokens, most))

    def _likely_tokens(self, bound: int) -> int:
        return ceil(bound * self._tokens_per_byte)

    @staticmethod
    def _is_exact(body: ParsedBody, index: int) -> bool:
        """Whether the prompt came as token ids."""
        return body.chat is None and not isinstance(body.prompts[index], str)

    def _buckets_of(self, tenant: str, policy: TenantPolicy, now_s: float) -> _Buckets:
        buckets = self._buckets.setdefault(tenant, _Buckets())
        self._buckets.move_to_end(tenant)
        buckets.requests = _bucket(buckets.requests, policy.requests, now_s)
        buckets.tokens = _bucket(buckets.tokens, policy.tokens, now_s)
        if len(self._buckets) > MAX_IDLE_TENANTS:
            self._buckets.popitem(last=False)
        return buckets


def _bucket(bucket: TokenBucket | None, rate: Rate | None, now_s: float) -> TokenBucket | None:
    """The bucket for what the policy says now."""
    if rate is None:
        return None
    if bucket is None:
        return TokenBucket(rate, now_s)
    if bucket.rate != rate:
        bucket.change_rate(rate, now_s)
    return bucket


def _check_rates(buckets: _Buckets, num_requests: int, num_tokens: int, now_s: float) -> None:
    for bucket, amount, unit in ((buckets.requests, num_requests, "requests"), (buckets.tokens, num_tokens, "tokens")):
        wait_ms = 0 if bucket is None else bucket.wait_ms(amount, now_s)
        if bucket is not None and wait_ms:
            raise over_rate(bucket.rate, unit, wait_ms)


def _priority(policy: TenantPolicy, terms: Terms) -> Priority:
    if terms.priority is None:
        return policy.default_priority
    if terms.priority < policy.max_priority:
        allowed = ", ".join(name for name, priority in PRIORITIES.items() if priority >= policy.max_priority)
        raise ApiError(
            ErrorCode.INVALID_VALUE, f"The priority of this key may be {allowed}; or leave it out.", param="priority"
        )
    return terms.priority


def _prompt_bounds(body: ParsedBody, sizes: Sequence[int], max_context: int) -> list[int]:
    """No prompt has more tokens, if it can be served at all."""
    if body.chat is not None:
        return [min(sizes[0] + TOKENS_PER_MESSAGE * len(body.chat.messages), max_context)]
    # A text may get a begin token; ids are counted as four bytes each.
    bounds = (
        size + 1 if isinstance(prompt, str) else len(prompt) for prompt, size in zip(body.prompts, sizes, strict=True)
    )
    return [min(max(1, bound), max_context) for bound in bounds]
