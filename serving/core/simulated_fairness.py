"""Fairness in simulated time: a greedy tenant and a short request, shares by weight, the lowest class under load."""

from collections import Counter
from dataclasses import dataclass, replace

from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.cost_model import CostModel, ProgramCost, program_name
from headrace.serving.core.fair_share import OUTPUT_TOKEN_PRICE, PROMPT_TOKEN_PRICE
from headrace.serving.core.request import Priority, Request, RequestId, SamplingParams, StopRule
from headrace.serving.core.simulated_draw import Draw
from headrace.serving.core.simulated_service import OpenGate, ServiceOutcome, ServiceRequest, simulate_service

NUM_GREEDY = 64
"""Long requests that wait at once."""
MAX_FACTOR = 2.0
"""Of its solo time, that a short request may take to its first token, plus one step."""
BACKLOG_TOKENS = 5_000
"""Of a tenant of weight 1: several times what a policy may give to a tenant at once."""
MAX_SHARE_ERROR = 0.10
"""Relative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fairness:
    """Of one seed. first_s, solo_s: of the short request beside 64 long ones, and alone; step_s: of the longest step,
    with a full chunk and all slots.
    share_error: largest relative difference of a tenant's share of token work from its weight's. low_s: until the first
    token of the lowest class beside a stream of the highest; low_limit_s: what aging allows. broken: in words.
    """

    seed: int
    first_s: float
    solo_s: float
    step_s: float
    share_error: float
    low_s: float | None
    low_limit_s: float
    broken: tuple[str, ...]

    @property
    def limit_s(self) -> float:
        """Of first_s: the step that runs when the request comes cannot be taken back."""
        return first_limit_s(self.solo_s, self.step_s)


def first_limit_s(solo_s: float, step_s: float) -> float:
    """Seconds to the first token: twice the solo time and one step, however many steps may be in flight."""
    return MAX_FACTOR * solo_s + step_s


def fairness(seed: int) -> Fairness:
    """Of one seed: three small worlds."""
    draw = Draw(seed)
    config = _config(draw)
    base_s, token_s = draw.pick(((0.010, 0.0002), (0.002, 0.0005), (0.030, 0.0001)))
    cost = _cost(config, base_s, token_s)
    step_s = base_s + token_s * (config.chunk_tokens + config.num_slots)
    first_s, solo_s = _greedy(draw, config, cost)
    share_error = _share_error(draw, config, cost, base_s + token_s * config.num_slots)
    low_s, low_limit_s = _lowest_class(draw, config, cost, step_s)
    broken = []
    if first_s > first_limit_s(solo_s, step_s) + 1e-9:
        broken.append(f"first token after {first_s:.4f} s, alone {solo_s:.4f} s, a step {step_s:.4f} s")
    if share_error > MAX_SHARE_ERROR:
        broken.append(f"a share differs from its weight's by {share_error:.1%}")
    if low_s is None or low_s > low_limit_s:
        broken.append(f"the lowest class got its first token after {low_s} s; aging allows {low_limit_s:.3f} s")
    return Fairness(
        seed=seed,
        first_s=first_s,
        solo_s=solo_s,
        step_s=step_s,
        share_error=share_error,
        low_s=low_s,
        low_limit_s=low_limit_s,
        broken=tuple(broken),
    )


def _config(draw: Draw) -> SchedulerConfig:
    page_size = draw.pick((4, 8, 16))
    chunk_tokens = page_size * draw.pick((2, 4, 8))
    num_slots = draw.pick((2, 4, 8))
    pages_each = -(-128 // page_size)
    return SchedulerConfig(
        num_slots=num_slots,
        page_size=page_size,
        num_pages=1 + pages_each * draw.pick((num_slots, num_slots, max(1, num_slots // 2))) + draw.below(4),
        max_context=128,
        chunk_tokens=chunk_tokens,
        block_tokens=page_size,
        decode_rows=tuple(sorted({1, num_slots})),
        prefill_tokens=tuple(sorted({page_size, chunk_tokens})),
        max_steps_in_flight=draw.pick((1, 2)),
        num_swap_pages=draw.pick((0, 4 * pages_each)),
        aging_s=draw.pick((0.5, 2.0)),
    )


def _cost(config: SchedulerConfig, base_s: float, token_s: float) -> CostModel:
    program = ProgramCost(base_s=base_s, row_s=token_s, token_s=token_s, context_s=0.0, spread=(1.0,), num_steps=1)
    programs = {program_name(bucket): program for bucket in config.buckets}
    return CostModel(programs=programs, host_s=(0.0,), edge_s=(0.0,))


def _request(
    index: int, prompt: int, outputs: int, tenant: str, *, weight: float = 1.0, priority: Priority = Priority.NORMAL
) -> Request:
    """Every prompt is another one, so that nothing is found cached."""
    return Request(
        request_id=RequestId(index),
        prompt_ids=tuple(1_000 * index + i for i in range(prompt)),
        sampling=SamplingParams(),
        stop=StopRule(max_tokens=outputs),
        cache_namespace=tenant.encode().ljust(32, b"\0"),
        tenant=tenant,
        weight=weight,
        priority=priority,
    )


def _run(requests: list[ServiceRequest], config: SchedulerConfig, cost: CostModel) -> list[ServiceOutcome]:
    return simulate_service(requests, config, cost, [OpenGate()])[0]


def _greedy(draw: Draw, config: SchedulerConfig, cost: CostModel) -> tuple[float, float]:
    """Seconds to the first token of a short request: beside the greedy tenant, and alone."""
    long = [
        ServiceRequest(at_s=0.0, request=_request(i, draw.between(32, 64), draw.between(32, 64), "greedy"))
        for i in range(NUM_GREEDY)
    ]
    at_s = draw.between(20, 400) / 100
    short = ServiceRequest(at_s=at_s, request=_request(NUM_GREEDY, draw.between(1, 32), draw.between(1, 8), "short"))
    beside, alone = _run([*long, short], config, cost)[-1], _run([short], config, cost)[0]
    return beside.tokens_s[0] - at_s, alone.tokens_s[0] - at_s


def _share_error(draw: Draw, config: SchedulerConfig, cost: CostModel, decode_s: float) -> float:
    """Over the second half of the time in which every tenant has requests waiting: what a policy gives once, at the
    start, is no share. Tenants come one after the other, so that the first have been served a lot when the last one
    comes; they have more requests than they can end until then, as no step is much shorter than decode_s."""
    weights = draw.pick(((1.0, 1.0), (1.0, 2.0), (1.0, 3.0), (1.0, 2.0, 4.0)))
    sizes = [(draw.between(8, 48), draw.between(8, 48)) for _ in weights]
    stagger = draw.pick((0, 50, 200))
    stagger_s = decode_s * stagger
    requests: list[ServiceRequest] = []
    for k, (weight, size) in enumerate(zip(weights, sizes, strict=True)):
        num_more = 3 * stagger * (len(weights) - 1 - k) * config.num_slots // size[1]
        for _ in range(num_more + round(BACKLOG_TOKENS * weight / sum(size))):
            index = len(requests)
            planned = _request(index, *size, f"t{k}", weight=weight)
            requests.append(ServiceRequest(at_s=k * stagger_s, request=planned))
    outcomes = _run(requests, replace(config, max_queued_requests=10_000), cost)
    admitted_s: dict[str, float] = {}
    for outcome in outcomes:
        if outcome.finished is not None:
            tenant = outcome.request.tenant
            at_s = outcome.at_s + outcome.finished.timings.queue_ms / 1e3
            admitted_s[tenant] = max(admitted_s.get(tenant, 0.0), at_s)
    start_s, end_s = (len(weights) - 1) * stagger_s, min(admitted_s.values())
    start_s += max(0.0, end_s - start_s) / 2
    work: Counter[str] = Counter()
    for outcome in outcomes:
        times = [at for at in outcome.tokens_s if start_s <= at < end_s]
        served = OUTPUT_TOKEN_PRICE * len(times)
        if times and times[0] == outcome.tokens_s[0]:
            served += PROMPT_TOKEN_PRICE * len(outcome.request.prompt_ids)
        work[outcome.request.tenant] += round(served)
    total, total_weight = sum(work.values()), sum(weights)
    if not total:
        return 1.0
    return max(abs(work[f"t{i}"] / total * total_weight / weight - 1) for i, weight in enumerate(weights))


def _lowest_class(draw: Draw, config: SchedulerConfig, cost: CostModel, step_s: float) -> tuple[float | None, float]:
    """A stream of the highest class that would keep the machine busy, and one request of the lowest."""
    config = replace(config, max_queued_requests=1_000)
    gap_s = step_s * draw.pick((2, 4))
    high = [
        ServiceRequest(at_s=i * gap_s, request=_request(i, 32, 24, "high", priority=Priority.HIGH)) for i in range(200)
    ]
    at_s = 10 * gap_s
    low = ServiceRequest(at_s=at_s, request=_request(1_000, 16, 8, "low", priority=Priority.LOW))
    outcomes = _run(sorted([*high, low], key=lambda planned: planned.at_s), config, cost)
    outcome = next(o for o in outcomes if o.request.tenant == "low")
    limit_s = 2 * config.aging_s + 64 * step_s
    return (outcome.tokens_s[0] - at_s if outcome.tokens_s else None), limit_s
