"""Requests of a simulated world: prompts that share beginnings, lengths at page edges, tenants, classes."""

from dataclasses import dataclass

from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.request import Priority, Request, RequestId, SamplingParams, StopRule
from headrace.serving.core.simulated_draw import Draw

MAX_OUTPUTS = 32
"""Most generated tokens of a simulated request: enough for several page edges, few enough for many seeds."""
EOS_ID = 3
SHARED_NAMESPACE = b"\xff" * 32
"""Of prefixes that the operator declared common to all tenants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    name: str
    weight: float
    namespace: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """stems: beginnings that prompts share, each as long as the context. num_shared: leading tokens of the first stem
    that are declared common to all tenants; 0 = none are."""

    config: SchedulerConfig
    vocab_size: int
    stems: tuple[tuple[int, ...], ...]
    tenants: tuple[Tenant, ...]
    priorities: tuple[Priority, ...]
    num_shared: int
    is_crowded: bool


def draw_population(draw: Draw, config: SchedulerConfig, is_crowded: bool) -> Population:
    vocab_size = draw.pick((5, 16, 64))
    num_tenants = draw.pick((1, 2, 2, 3))
    return Population(
        config=config,
        vocab_size=vocab_size,
        stems=tuple(_stem(draw, config, vocab_size) for _ in range(draw.between(1, 3))),
        tenants=tuple(
            Tenant(
                name="" if num_tenants == 1 else f"tenant-{i}",
                weight=draw.pick((1.0, 1.0, 2.0, 4.0)),
                namespace=b"" if num_tenants == 1 else bytes([i + 1]) * 32,
            )
            for i in range(num_tenants)
        ),
        priorities=draw.pick(((Priority.NORMAL,), tuple(Priority))),
        num_shared=draw.pick((0, 0, config.page_size, 2 * config.page_size + 1)),
        is_crowded=is_crowded,
    )


def _stem(draw: Draw, config: SchedulerConfig, vocab_size: int) -> tuple[int, ...]:
    """A quarter repeats one page, so that equal pages have different parents."""
    length = config.page_size if draw.chance(25) else config.max_context
    once = tuple(draw.below(vocab_size) for _ in range(length))
    return (once * -(-config.max_context // length))[: config.max_context]


def draw_request(draw: Draw, request_id: RequestId, people: Population) -> Request:
    """Mostly the beginning of a stem, so that prefixes meet; sometimes longer than the pool."""
    config = people.config
    capacity = min(config.max_context, (config.num_pages - 1) * config.page_size + 1)
    most_prompt = min(config.max_context - 1, config.max_context if draw.chance(5) else capacity - 1)
    length = draw.between(1, min(most_prompt, 2 * config.page_size) if people.is_crowded else most_prompt)
    if draw.chance(60):
        edge = length // config.page_size * config.page_size + draw.between(-1, 1)
        length = min(max(1, edge), most_prompt)
    num_common = length if draw.chance(40) else draw.below(length + 1)
    stem = draw.pick(people.stems)
    prompt = stem[:num_common] + tuple(draw.below(people.vocab_size) for _ in range(length - num_common))
    most_outputs = max(1, min(MAX_OUTPUTS, capacity - length))
    max_tokens = draw.between(most_outputs // 2 + 1 if people.is_crowded else 1, most_outputs)
    tenant = draw.pick(people.tenants)
    is_shared = stem is people.stems[0] and 0 < people.num_shared <= num_common
    return Request(
        request_id=request_id,
        prompt_ids=prompt,
        sampling=SamplingParams(
            seed=draw.pick((0, 0, 1, 7)),
            presence_penalty=draw.pick((0.0, 1.0)),
            num_logprobs=draw.pick((None, 0, 2)),
            allowed_token_ids=draw.pick((None, None, (0, 1, EOS_ID, 4))),
        ),
        stop=StopRule(
            max_tokens=max_tokens,
            min_tokens=draw.pick((0, 0, max_tokens // 2)),
            stop_token_ids=draw.pick(((), (EOS_ID,), (EOS_ID, 1))),
        ),
        cache_namespace=tenant.namespace,
        tenant=tenant.name,
        weight=tenant.weight,
        priority=draw.pick(people.priorities),
        shared_prefix_tokens=people.num_shared if is_shared else 0,
        shared_namespace=SHARED_NAMESPACE if is_shared else b"",
    )
