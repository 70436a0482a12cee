"""What the prompts of one tenant show of another's: nothing. The same request, cold and after a neighbour's."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.events import Finished
from headrace.serving.core.plan_digest import Renaming
from headrace.serving.core.request import CancelReason, Request, RequestId, SamplingParams, StopRule
from headrace.serving.core.scheduler import Scheduler
from headrace.serving.core.simulated_draw import Draw
from headrace.serving.core.simulator import Model

MAX_STEPS = 2_000


@dataclass(frozen=True, slots=True)
class Seen:
    """All that a tenant can notice of its request, and more: the plans, with pages, rows and ids renamed."""

    digests: tuple[bytes, ...]
    computed_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """Of one seed. is_isolated: another tenant's prompt looks as cold. hits: tokens that the same tenant finds cached;
    could_hit: whether the prompt is long enough for that."""

    seed: int
    is_isolated: bool
    hits: int
    could_hit: bool

    @property
    def broken(self) -> str | None:
        if not self.is_isolated:
            return "a request after another tenant's equal prompts differs from a cold one"
        if self.could_hit and not self.hits:
            return "the control failed: the same tenant does not find its own prompt"
        return None


def isolation(seed: int, make_model: Callable[[SchedulerConfig], Model]) -> Isolation:
    """Other tenants have sent the very prompt, its beginnings and its longer forms; then the request comes."""
    draw = Draw(seed)
    page_size = draw.pick((1, 2, 4, 8))
    chunk_tokens = page_size * draw.pick((1, 2, 8))
    num_pages = 1 + -(-64 // page_size) * draw.pick((1, 2, 4))
    deterministic = draw.chance(30)
    config = SchedulerConfig(
        num_slots=2,
        page_size=page_size,
        num_pages=num_pages,
        max_context=64,
        chunk_tokens=chunk_tokens,
        block_tokens=page_size,
        decode_rows=(2,) if deterministic else (1, 2),
        prefill_tokens=(chunk_tokens,) if deterministic else tuple(sorted({page_size, chunk_tokens})),
        max_steps_in_flight=draw.pick((1, 2)),
        num_swap_pages=draw.pick((0, 8)),
        deterministic=deterministic,
    )
    length = draw.between(page_size + 1, 40)
    prompt = tuple(draw.below(16) for _ in range(length))
    request = _request(1_000, prompt, draw.between(1, 16), b"\x01" * 32, "one")
    others = [
        _request(
            i,
            prompt[: draw.between(1, length)] if draw.chance(30) else prompt,
            draw.between(1, 16),
            b"\x02" * 32,
            "two",
        )
        for i in range(draw.between(1, 3))
    ]
    cold = _last(config, make_model, [request])
    after_others = _last(config, make_model, [*others, request])
    again = _last(config, make_model, [replace(request, request_id=RequestId(1)), request])
    return Isolation(
        seed=seed,
        is_isolated=cold == after_others and not after_others.cached_tokens,
        hits=again.cached_tokens,
        could_hit=(length - 1) // page_size * page_size >= max(page_size, chunk_tokens if deterministic else 0),
    )


def _request(index: int, prompt: tuple[int, ...], outputs: int, namespace: bytes, tenant: str) -> Request:
    return Request(
        request_id=RequestId(index),
        prompt_ids=prompt,
        sampling=SamplingParams(),
        stop=StopRule(max_tokens=outputs),
        cache_namespace=namespace,
        tenant=tenant,
    )


def _last(config: SchedulerConfig, make_model: Callable[[SchedulerConfig], Model], requests: list[Request]) -> Seen:
    """Each request to its end, one after the other; what is seen of the last."""
    scheduler, model = Scheduler(config), make_model(config)
    seen = Seen((), 0, 0)
    now_s = 0.0
    for request in requests:
        now_s += 100.0  # Nobody is expected back any more.
        rejection = scheduler.submit(request, now_s)
        if rejection is not None:
            raise ValueError(rejection.message)
        names, digests, computed = Renaming(config.page_size), [], 0
        finished: Finished | None = None
        in_flight = []
        for _ in range(MAX_STEPS):
            now_s += 0.01
            plan = scheduler.plan_step(now_s)
            if plan is not None:
                digests.append(names.digest(plan))
                computed += plan.num_tokens
                in_flight.append((plan, model.dispatch(plan)))
            if in_flight:
                oldest, ticket = in_flight.pop(0)
                for event in scheduler.apply_result(oldest, model.collect(ticket), now_s):
                    finished = event if isinstance(event, Finished) else finished
            elif scheduler.is_idle:
                break
        if finished is None:
            scheduler.cancel(request.request_id, CancelReason.SHUTDOWN, now_s)
            raise ValueError(f"request {request.request_id} has not ended within {MAX_STEPS} steps")
        seen = Seen(tuple(digests), computed, finished.cached_tokens)
    return seen
