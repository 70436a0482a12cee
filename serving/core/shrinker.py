"""Make a world that breaks a promise smaller, as long as it breaks the same one."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from headrace.serving.core.config import PreemptionPolicy
from headrace.serving.core.request import Priority, Request, SamplingParams
from headrace.serving.core.simulated_world import Arrival, Faults, Reader, World

MAX_TRIES = 2_000
"""Simulations of one shrinking."""


def shrink(world: World, broken: Callable[[World], str | None], max_tries: int = MAX_TRIES) -> World:
    """broken: which promise a world breaks; None = none. Requests go first, then faults, then lengths and options.

    The result breaks what the world breaks, and no single step of ``smaller`` does so any more, unless max_tries ran
    out. Raises: ValueError where the world breaks nothing.
    """
    wanted = broken(world)
    if wanted is None:
        raise ValueError(f"the world of seed {world.seed} breaks no promise")
    num_tries = 0
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in smaller(world):
            if num_tries == max_tries:
                return world
            num_tries += 1
            if broken(candidate) == wanted:
                world, is_smaller = candidate, True
                break
    return world


def smaller(world: World) -> Iterator[World]:
    """Worlds that lack a little of this one, the largest cuts first."""
    yield from _fewer_arrivals(world)
    yield from _fewer_faults(world)
    yield from _plainer_arrivals(world)
    yield from _plainer_options(world)


def _fewer_arrivals(world: World) -> Iterator[World]:
    arrivals = world.arrivals
    size = len(arrivals) // 2
    while size:
        for start in range(0, len(arrivals), size):
            rest = arrivals[:start] + arrivals[start + size :]
            if rest:
                yield replace(world, arrivals=rest)
        size //= 2


def _fewer_faults(world: World) -> Iterator[World]:
    if world.faults == Faults():
        return
    yield replace(world, faults=Faults())
    for field in fields(Faults):
        value = getattr(world.faults, field.name)
        if value == field.default:
            continue
        without: dict[str, Any] = {field.name: field.default}
        yield replace(world, faults=replace(world.faults, **without))
        each = sorted(value) if isinstance(value, frozenset) else value
        if isinstance(each, list | tuple) and len(each) > 1:
            for i in range(len(each)):
                rest: dict[str, Any] = {field.name: type(value)((*each[:i], *each[i + 1 :]))}
                yield replace(world, faults=replace(world.faults, **rest))


def _plainer_arrivals(world: World) -> Iterator[World]:
    for i, arrival in enumerate(world.arrivals):
        for plainer in _plainer_arrival(arrival):
            yield replace(world, arrivals=(*world.arrivals[:i], plainer, *world.arrivals[i + 1 :]))


def _plainer_arrival(arrival: Arrival) -> Iterator[Arrival]:
    if arrival.reader != Reader():
        yield replace(arrival, reader=Reader())
    if arrival.cancel_after is not None:
        yield replace(arrival, cancel_after=None)
    for request in _plainer_request(arrival.request):
        yield replace(arrival, request=request)


def _plainer_request(request: Request) -> Iterator[Request]:
    stop = request.stop
    for tokens in dict.fromkeys((1, stop.max_tokens // 2, stop.max_tokens - 1)):
        if 1 <= tokens < stop.max_tokens:
            shorter = replace(stop, max_tokens=tokens, min_tokens=min(stop.min_tokens, tokens))
            yield replace(request, stop=shorter)
    for length in dict.fromkeys((1, len(request.prompt_ids) // 2, len(request.prompt_ids) - 1)):
        if max(1, request.shared_prefix_tokens) <= length < len(request.prompt_ids):
            yield replace(request, prompt_ids=request.prompt_ids[:length])
    plain: dict[str, Any] = {
        "sampling": SamplingParams(),
        "deadline_ms": None,
        "priority": Priority.NORMAL,
        "weight": 1.0,
    }
    for name, value in plain.items():
        if getattr(request, name) != value:
            yield replace(request, **{name: value})
    if request.shared_prefix_tokens:
        yield replace(request, shared_prefix_tokens=0, shared_namespace=b"")
    if stop.min_tokens:
        yield replace(request, stop=replace(stop, min_tokens=0))
    if stop.stop_token_ids:
        yield replace(request, stop=replace(stop, stop_token_ids=()))


def _plainer_options(world: World) -> Iterator[World]:
    simple: dict[str, Any] = {"num_digests": None, "collect_early_percent": 0, "token_us": 0, "step_us": 10_000}
    for name, value in simple.items():
        if getattr(world, name) != value:
            yield replace(world, **{name: value})
    config = world.config
    plain: tuple[dict[str, Any], ...] = (
        {"num_lanes": 1},
        {"prefix_cache": False},
        {"deterministic": False},
        {"inter_token_s": None},
        {"max_steps_in_flight": 1},
        {"num_swap_pages": 0, "preemption": PreemptionPolicy.AUTO},
        {"preemption": PreemptionPolicy.AUTO},
        {"max_queued_requests": 512, "max_queued_prompt_tokens": 524_288},
        {"max_segments": 1},
        {"aging_s": 10.0},
    )
    for options in plain:
        if any(getattr(config, name) != value for name, value in options.items()):
            yield replace(world, config=replace(config, **options))
