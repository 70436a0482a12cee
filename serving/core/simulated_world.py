"""Worlds for the simulator: everything that happens from outside, drawn from one seed."""

from dataclasses import dataclass, replace

from headrace.serving.core.config import PreemptionPolicy, SchedulerConfig
from headrace.serving.core.request import Priority, Request, RequestId
from headrace.serving.core.simulated_draw import Draw
from headrace.serving.core.simulated_requests import MAX_OUTPUTS, draw_population, draw_request

__all__ = ["Arrival", "Draw", "Faults", "Reader", "World", "draw_world"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """How a client takes what it is sent: all that is new, every period ticks. It stops once it has stops_after tokens
    (None = never) and goes on stops_ticks later, if the server still has patience."""

    period: int = 1
    stops_after: int | None = None
    stops_ticks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """cancel_after: the client cancels in the tick in which it sees so many tokens of it reported; None = never."""

    tick: int
    request: Request
    reader: Reader = Reader()
    cancel_after: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Ticks count rounds of the simulator's loop, so a world without some of them is still the same world otherwise.

    cancels: of ids, known or not. duplicates: an id is submitted again. fails: the result collected in such a tick is
    a failed step. non_finite: (request, output index). restarts: the engine dies; its clients try again with new ids.
    jumps: (tick, ms) by which the monotonic clock leaps, as after a suspend. wall_jumps: (tick, s) of the wall clock,
    which nobody here may use. forced: (tick, k): the k-th running request, counted around, is preempted. evictions:
    (tick, k): k unused pages are evicted, so between the look-up of an admission that failed and the next try.
    drain_tick: from then on new requests are refused.
    """

    cancels: tuple[tuple[int, RequestId], ...] = ()
    duplicates: tuple[tuple[int, RequestId], ...] = ()
    fails: frozenset[int] = frozenset()
    non_finite: frozenset[tuple[RequestId, int]] = frozenset()
    restarts: frozenset[int] = frozenset()
    jumps: tuple[tuple[int, int], ...] = ()
    wall_jumps: tuple[tuple[int, int], ...] = ()
    forced: tuple[tuple[int, int], ...] = ()
    evictions: tuple[tuple[int, int], ...] = ()
    drain_tick: int | None = None

    @property
    def last_tick(self) -> int:
        """From the tick behind it on, nothing goes wrong any more."""
        timed = (*self.cancels, *self.duplicates, *self.jumps, *self.wall_jumps, *self.forced, *self.evictions)
        ticks = [tick for tick, _ in timed] + [*self.fails, *self.restarts, self.drain_tick or 0]
        return max(ticks)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Each tick plans at most one step. step_us, token_us: how long a step takes, and each of its tokens on top.

    collect_early_percent: how often a result is collected before max_steps_in_flight plans are out.
    num_digests: different values of the prefix hash; None = SHA-256 as it is. stall_ticks: patience with a client that
    does not read.
    """

    seed: int
    config: SchedulerConfig
    vocab_size: int
    arrivals: tuple[Arrival, ...]
    faults: Faults = Faults()
    num_digests: int | None = None
    collect_early_percent: int = 0
    step_us: int = 10_000
    token_us: int = 0
    stall_ticks: int = 60

    @property
    def last_arrival(self) -> int:
        return max(arrival.tick for arrival in self.arrivals)


def draw_world(seed: int) -> World:
    """A small world: pools for one to a few requests, shared prefixes, lengths at page edges, faults.

    A quarter is crowded: short prompts that all come at once and grow long, so that preemption follows preemption.
    """
    draw = Draw(seed)
    is_crowded = draw.chance(25)
    config = _config(draw, is_crowded)
    people = draw_population(draw, config, is_crowded)
    num_requests = draw.pick((4, 8, 12, 16, 24)) if not is_crowded else draw.between(5, 14)
    ticks = _arrival_ticks(draw, num_requests, is_crowded)
    horizon = 20 + max(ticks) + num_requests * 6
    step_us, token_us = draw.pick(((10_000, 0), (1_000, 100), (5_000, 500)))
    arrivals = tuple(
        _arrival(draw, tick, draw_request(draw, RequestId(i), people), horizon * step_us)
        for i, tick in enumerate(ticks)
    )
    if Draw(seed ^ 0xC1A55).chance(12):
        arrivals = _in_classes(arrivals)
    return World(
        seed=seed,
        config=config,
        vocab_size=people.vocab_size,
        arrivals=arrivals,
        faults=_faults(draw, num_requests, horizon) if draw.chance(40 if is_crowded else 65) else Faults(),
        num_digests=draw.pick((None, None, None, 1, 4, 256)),
        collect_early_percent=draw.pick((0, 20, 50)),
        step_us=step_us,
        token_us=token_us,
        stall_ticks=draw.pick((20, 60, 200)),
    )


def _in_classes(arrivals: tuple[Arrival, ...]) -> tuple[Arrival, ...]:
    """The lowest class has all slots when the highest comes."""
    half = len(arrivals) // 2
    low = tuple(replace(a, tick=0, request=replace(a.request, priority=Priority.LOW)) for a in arrivals[:half])
    late = 6 + max(arrival.tick for arrival in arrivals) // 4
    high = tuple(replace(a, tick=late, request=replace(a.request, priority=Priority.HIGH)) for a in arrivals[half:])
    return low + high


def _arrival_ticks(draw: Draw, num_requests: int, is_crowded: bool) -> list[int]:
    """All at once, in bursts, or over some time; ascending, as ids are."""
    kind = draw.pick(("once", "once", "bursts") if is_crowded else ("once", "bursts", "steady", "steady"))
    if kind == "once":
        return [0] * num_requests
    if kind == "bursts":
        return sorted(draw.below(4) * 25 for _ in range(num_requests))
    spread = draw.pick((10, 60))
    return sorted(draw.between(0, spread) for _ in range(num_requests))


def _arrival(draw: Draw, tick: int, request: Request, horizon_us: int) -> Arrival:
    reader = Reader()
    if draw.chance(20):
        reader = Reader(
            period=draw.pick((1, 3, 10)),
            stops_after=draw.pick((None, 0, 1, 5)),
            stops_ticks=draw.pick((10, 50, 1_000)),
        )
    cancel_after = None
    if draw.chance(15):
        # The last sample is in flight then, or just reported; or somewhere in the middle.
        end = request.stop.max_tokens
        cancel_after = draw.pick((max(0, end - 1), end, draw.below(end + 1)))
    if draw.chance(15):
        deadline_us = draw.between(1, 1 + draw.pick((horizon_us // 8, horizon_us // 2, 4 * horizon_us)))
        request = replace(request, deadline_ms=deadline_us / 1e3)
    return Arrival(tick=tick, request=request, reader=reader, cancel_after=cancel_after)


def _faults(draw: Draw, num_requests: int, horizon: int) -> Faults:
    """Each kind in some worlds only, so that a rare one is not always hidden behind another."""

    def ticks(percent: int, most: int) -> list[int]:
        return sorted(draw.below(horizon) for _ in range(draw.between(1, most))) if draw.chance(percent) else []

    def some(percent: int, most: int, limit: int) -> tuple[tuple[int, int], ...]:
        return tuple((tick, draw.below(limit)) for tick in ticks(percent, most))

    return Faults(
        cancels=tuple((tick, RequestId(i)) for tick, i in some(60, num_requests, num_requests + 1)),
        duplicates=tuple((tick, RequestId(i)) for tick, i in some(15, 3, num_requests)),
        fails=frozenset(ticks(35, 3)),
        non_finite=frozenset((RequestId(i), draw.below(MAX_OUTPUTS)) for _, i in some(35, 3, num_requests)),
        restarts=frozenset(ticks(12, 2)),
        jumps=tuple((tick, draw.pick((50, 1_000, 100_000))) for tick in ticks(15, 2)),
        wall_jumps=tuple((tick, draw.pick((-3_600, 3_600))) for tick in ticks(15, 2)),
        forced=some(25, 8, 8),
        evictions=tuple((tick, 1 + k) for tick, k in some(25, 6, 3)),
        drain_tick=draw.below(horizon) if draw.chance(15) else None,
    )


def _config(draw: Draw, is_crowded: bool) -> SchedulerConfig:
    page_size = draw.pick((2, 4) if is_crowded else (1, 2, 4, 8))
    block_tokens = page_size * draw.pick((1, 2))
    num_slots = 5 if is_crowded else draw.pick((1, 2, 3, 5))
    chunk_tokens = block_tokens * draw.pick((1, 2, 6))
    num_pages = 1 + (MAX_OUTPUTS // page_size + draw.between(2, 5) if is_crowded else draw.pick((3, 6, 10, 16, 40)))
    num_swap_pages = draw.pick((0, 0, 3, 8, 40))
    deterministic = draw.chance(20)
    policies = [PreemptionPolicy.AUTO] if deterministic else [PreemptionPolicy.AUTO, PreemptionPolicy.RECOMPUTE]
    if num_swap_pages:
        policies += [PreemptionPolicy.SWAP, PreemptionPolicy.AUTO]
    return SchedulerConfig(
        num_slots=num_slots,
        page_size=page_size,
        num_pages=num_pages,
        max_context=max(2, min(64, page_size * num_pages)),
        chunk_tokens=chunk_tokens,
        block_tokens=block_tokens,
        decode_rows=(num_slots,) if deterministic else tuple(sorted({1, num_slots})),
        prefill_tokens=(chunk_tokens,) if deterministic else tuple(sorted({block_tokens, chunk_tokens})),
        max_segments=draw.between(1, 3),
        max_queued_requests=draw.pick((3, 100, 100)),
        max_queued_prompt_tokens=draw.pick((40, 10_000, 10_000)),
        prefix_cache=draw.chance(80),
        max_steps_in_flight=draw.pick((1, 2, 2)),
        num_lanes=draw.pick((1, 1, 1, 2, 3)),
        inter_token_s=draw.pick((None,) * 4 if deterministic else (None, None, 0.012, 0.05)),
        num_swap_pages=num_swap_pages,
        preemption=draw.pick(policies),
        aging_s=draw.pick((0.02, 0.2, 10.0)),
        deterministic=deterministic,
        # A third of them, without a draw of its own: steps overlap at will there.
        is_shared=chunk_tokens != 2 * block_tokens,
    )
