"""An operator's question: what would this configuration give for this traffic? Answered by the real scheduler and the
real admission in simulated time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256

from headrace.serving.app.build import program_shapes
from headrace.serving.bench.objective import Objective
from headrace.serving.bench.open_figures import open_figures
from headrace.serving.bench.open_loop import OpenRun
from headrace.serving.bench.outcome import Outcome
from headrace.serving.bench.workload_file import WorkloadFile
from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.cost_model import CostModel, program_name
from headrace.serving.core.errors import ConfigError
from headrace.serving.core.request import Priority, Request, RequestId, SamplingParams, StopRule
from headrace.serving.core.simulated_service import (
    Gate,
    Sample,
    ServiceOutcome,
    ServiceRequest,
    simulate_service,
)
from headrace.serving.core.tenant_policy import TenantPolicy
from headrace.serving.edge.terms import PRIORITIES

TELL_REQUESTS = 100
NUM_IDS = 30_000
"""Stand-ins for token ids: a word always gets the same one, so shared beginnings are shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What differs from the server that was measured; None = as there."""

    num_slots: int | None = None
    num_pages: int | None = None
    chunk_tokens: int | None = None
    max_context: int | None = None
    max_queued_requests: int | None = None
    max_queued_prompt_tokens: int | None = None
    prefix_cache: bool | None = None
    inter_token_s: float | None = None
    num_swap_pages: int | None = None
    aging_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """figures: as of headrace bench. guessed: programs that were never measured, each with the one that stands in."""

    config: SchedulerConfig
    outcomes: tuple[ServiceOutcome, ...]
    samples: tuple[Sample, ...]
    figures: dict[str, object]
    guessed: dict[str, str]


def changed_config(config: SchedulerConfig, changes: Changes) -> SchedulerConfig:
    """Raises: ConfigError."""
    given = {name: getattr(changes, name) for name in Changes.__slots__ if getattr(changes, name) is not None}
    if changes.chunk_tokens is not None and changes.chunk_tokens % config.page_size:
        raise ConfigError(
            f"--chunk-tokens {changes.chunk_tokens} must be a multiple of the {config.page_size} tokens of a page"
        )
    if given.keys() & {"num_slots", "chunk_tokens", "inter_token_s"}:
        # Those that a server with these options would have.
        given |= program_shapes(
            page_size=config.page_size,
            num_slots=given.get("num_slots", config.num_slots),
            chunk_tokens=given.get("chunk_tokens", config.chunk_tokens),
            has_objective=given.get("inter_token_s", config.inter_token_s) is not None,
            is_deterministic=config.deterministic,
        )
    return replace(config, **given)


def simulate_traffic(
    workload: WorkloadFile,
    cost: CostModel,
    config: SchedulerConfig,
    gates: list[Gate],
    *,
    policies: dict[str, TenantPolicy],
    objective: Objective | None,
    tokens_per_word: float = 1.0,
    seed: int = 0,
    watch: Callable[[int], None] = lambda _: None,
) -> Simulated:
    """gates: of each replica. policies: by tenant; a tenant without one has the default of ``TenantPolicy``. watch: is
    told now and then how many requests have come."""
    arrivals = _arrivals(workload, config, policies, tokens_per_word, watch)
    outcomes, samples = simulate_service(
        arrivals, config, cost, gates, seed=seed, duration_s=max(1e-3, workload.duration_s)
    )
    ends = [outcome.ended_s for outcome in outcomes]
    run = OpenRun(
        outcomes=tuple(bench_outcome(i, outcome, workload) for i, outcome in enumerate(outcomes)),
        start_s=0.0,
        seconds=max([*ends, workload.duration_s]),
        cpu_s=0.0,
    )
    figures = open_figures(run, workload, objective)
    del figures["client"]  # It has none.
    return Simulated(
        config=config,
        outcomes=tuple(outcomes),
        samples=tuple(samples),
        figures=figures,
        guessed=guessed_programs(cost, config),
    )


def guessed_programs(cost: CostModel, config: SchedulerConfig) -> dict[str, str]:
    names = [program_name(bucket) for bucket in config.buckets]
    stand_ins = {id(program): name for name, program in cost.programs.items()}
    return {name: stand_ins[id(cost.program(name))] for name in names if name not in cost.programs}


def bench_outcome(index: int, outcome: ServiceOutcome, workload: WorkloadFile) -> Outcome:
    """As headrace bench would have seen it."""
    finished, gaps = outcome.finished, tuple(outcome.gaps_ms)
    is_cancelled = not outcome.is_good and workload.requests[index].cancel_after_s is not None
    error = None
    if outcome.refused is not None:
        error = outcome.refused.reason.value
    elif not outcome.is_good and not is_cancelled:
        reason = None if finished is None else finished.cancel_reason
        error = "no_end" if reason is None else reason.value
    return Outcome(
        index=index,
        sent_s=outcome.at_s,
        planned_s=outcome.at_s,
        ended_s=outcome.ended_s,
        first_s=outcome.tokens_s[0] if outcome.tokens_s else None,
        last_s=outcome.tokens_s[-1] if outcome.tokens_s else None,
        first_tokens=1 if outcome.tokens_s else 0,
        error=error,
        is_refused=outcome.refused is not None,
        is_cancelled=is_cancelled,
        retry_after_ms=None if outcome.refused is None else outcome.refused.retry_after_ms,
        prompt_tokens=len(outcome.request.prompt_ids),
        cached_tokens=0 if finished is None else finished.cached_tokens,
        output_tokens=len(outcome.tokens_s),
        gaps_ms=gaps,
        pauses_ms=gaps,
        tenant=workload.requests[index].tenant,
        server={} if finished is None else {"queue_ms": finished.timings.queue_ms},
    )


def _arrivals(
    workload: WorkloadFile,
    config: SchedulerConfig,
    policies: dict[str, TenantPolicy],
    tokens_per_word: float,
    watch: Callable[[int], None],
) -> Iterator[ServiceRequest]:
    for index, planned in enumerate(workload.requests):
        if index % TELL_REQUESTS == 0:
            watch(index)
        tenant = planned.tenant or ""
        policy = policies.get(tenant, TenantPolicy())
        deadline_ms = policy.deadline_ms if planned.deadline_ms is None else planned.deadline_ms
        prompt = workload.prompt(index)
        num_tokens = workload.estimated_prompt_tokens(index, tokens_per_word=tokens_per_word)
        request = Request(
            request_id=RequestId(index),
            prompt_ids=tuple(prompt) if isinstance(prompt, list) else _stand_ins(prompt, num_tokens),
            sampling=SamplingParams(),
            stop=StopRule(max_tokens=planned.max_tokens),
            cache_namespace=sha256(tenant.encode()).digest(),
            tenant=tenant,
            weight=policy.weight,
            priority=_priority(index, planned.priority, policy),
            deadline_ms=deadline_ms,
        )
        yield ServiceRequest(at_s=planned.at_s, request=request, cancel_after_s=planned.cancel_after_s)


def _priority(index: int, asked: int | str | None, policy: TenantPolicy) -> Priority:
    """What is above the policy's is refused by the gate, as by a server. Raises: ConfigError for one that is none."""
    if asked is None:
        return policy.default_priority
    found = PRIORITIES.get(asked) if isinstance(asked, str) else None
    if found is None:
        raise ConfigError(
            f"request {index + 1}: priority {asked!r} is none of {', '.join(PRIORITIES)}; a server would refuse it"
        )
    return found


def _stand_ins(text: str, num_tokens: int) -> tuple[int, ...]:
    """So many ids; the same words give the same ones."""
    words = text.split() or [text]
    ids = [int.from_bytes(sha256(word.encode()).digest()[:4], "little") % NUM_IDS for word in words]
    return tuple(ids[i * len(ids) // num_tokens] for i in range(num_tokens))
