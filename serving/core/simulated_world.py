"""Worlds for the simulator: everything that happens from outside, drawn from one seed."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TypeVar

from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.request import Request, RequestId, SamplingParams, StopRule

T = TypeVar("T")

MAX_OUTPUTS = 32
"""Most generated tokens of a simulated request: enough for several page edges, few enough for many seeds."""
EOS_ID = 3


class Draw:
    """SplitMix64: a random source in ten lines, equal on every Python version, and no global state."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def below(self, limit: int) -> int:
        """Uniform in [0, limit), limit far below 2**64."""
        mask = 2**64 - 1
        self._state = (self._state + 0x9E3779B97F4A7C15) & mask
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return (z ^ (z >> 31)) % limit

    def between(self, low: int, high: int) -> int:
        """Uniform in [low, high]."""
        return low + self.below(high - low + 1)

    def pick(self, options: Seq[T]) -> T:
        return options[self.below(len(options))]

    def chance(self, percent: int) -> bool:
        return self.below(100) < percent


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Ticks are rounds of the simulator's loop, each of which plans at most one step.

    collect_early_percent: how often a result is collected before max_steps_in_flight plans are out.
    num_digests: different values of the prefix hash; None = SHA-256 as it is.
    fail_ticks: the result collected in such a tick is a failed step. non_finite: (request, output index).
    drain_tick: from then on new requests are refused.
    """

    seed: int
    config: SchedulerConfig
    vocab_size: int
    num_digests: int | None
    collect_early_percent: int
    arrivals: tuple[tuple[int, Request], ...]
    cancels: tuple[tuple[int, RequestId], ...]
    fail_ticks: frozenset[int]
    non_finite: frozenset[tuple[RequestId, int]]
    drain_tick: int | None


def draw_world(seed: int) -> World:
    """A small world: pools for one to a few requests, shared prefixes, lengths at page edges, faults.

    A quarter is crowded: short prompts that all come at once and grow long, so that preemption follows preemption.
    """
    draw = Draw(seed)
    is_crowded = draw.chance(25)
    config = _config(draw, is_crowded, num_lanes=Draw(seed ^ 0x1A9E).pick((1, 1, 1, 2, 3)))
    vocab_size = draw.pick((5, 16, 64))
    spread = 0 if is_crowded else draw.pick((0, 10, 60))
    stems = [_stem(draw, config, vocab_size) for _ in range(draw.between(1, 3))]
    num_requests = draw.between(4, 14)
    arrivals = tuple(
        (draw.between(0, spread), _request(draw, RequestId(i), config, vocab_size, stems, is_crowded))
        for i in range(num_requests)
    )
    has_faults = draw.chance(20 if is_crowded else 60)
    horizon = 20 + spread + num_requests * 8
    cancels = [(draw.below(horizon), RequestId(draw.below(num_requests + 1))) for _ in range(draw.below(num_requests))]
    return World(
        seed=seed,
        config=config,
        vocab_size=vocab_size,
        num_digests=draw.pick((None, None, None, 1, 4, 256)),
        collect_early_percent=draw.pick((0, 20, 50)),
        arrivals=arrivals,
        cancels=tuple(cancels) if has_faults else (),
        fail_ticks=frozenset(draw.below(horizon) for _ in range(draw.below(3))) if has_faults else frozenset(),
        non_finite=frozenset(
            (RequestId(draw.below(num_requests)), draw.below(MAX_OUTPUTS)) for _ in range(draw.below(3))
        )
        if has_faults
        else frozenset(),
        drain_tick=draw.below(horizon) if has_faults and draw.chance(20) else None,
    )


def _config(draw: Draw, is_crowded: bool, num_lanes: int) -> SchedulerConfig:
    page_size = draw.pick((2, 4) if is_crowded else (1, 2, 4, 8))
    block_tokens = page_size * draw.pick((1, 2))
    num_slots = 5 if is_crowded else draw.pick((1, 2, 3, 5))
    chunk_tokens = block_tokens * draw.pick((1, 2, 6))
    num_pages = 1 + (MAX_OUTPUTS // page_size + draw.between(2, 5) if is_crowded else draw.pick((3, 6, 10, 16, 40)))
    return SchedulerConfig(
        num_slots=num_slots,
        page_size=page_size,
        num_pages=num_pages,
        max_context=max(2, min(64, page_size * num_pages)),
        chunk_tokens=chunk_tokens,
        block_tokens=block_tokens,
        decode_rows=tuple(sorted({1, num_slots})),
        prefill_tokens=tuple(sorted({block_tokens, chunk_tokens})),
        max_segments=draw.between(1, 3),
        max_queued_requests=draw.pick((3, 100, 100)),
        prefix_cache=draw.chance(80),
        max_steps_in_flight=draw.pick((1, 2, 2)),
        num_lanes=num_lanes,
    )


def _stem(draw: Draw, config: SchedulerConfig, vocab_size: int) -> tuple[int, ...]:
    """A beginning that prompts share; a quarter repeats one page, so that equal pages have different parents."""
    length = config.page_size if draw.chance(25) else config.max_context
    once = tuple(draw.below(vocab_size) for _ in range(length))
    return (once * -(-config.max_context // length))[: config.max_context]


def _request(
    draw: Draw,
    request_id: RequestId,
    config: SchedulerConfig,
    vocab_size: int,
    stems: Seq[tuple[int, ...]],
    is_crowded: bool,
) -> Request:
    """Mostly the beginning of a stem, so that prefixes meet; sometimes longer than the pool."""
    capacity = min(config.max_context, (config.num_pages - 1) * config.page_size + 1)
    most_prompt = min(config.max_context - 1, config.max_context if draw.chance(5) else capacity - 1)
    length = draw.between(1, min(most_prompt, 2 * config.page_size) if is_crowded else most_prompt)
    if draw.chance(60):
        edge = length // config.page_size * config.page_size + draw.between(-1, 1)
        length = min(max(1, edge), most_prompt)
    num_shared = length if draw.chance(40) else draw.below(length + 1)
    stem = draw.pick(stems)
    prompt = stem[:num_shared] + tuple(draw.below(vocab_size) for _ in range(length - num_shared))
    most_outputs = max(1, min(MAX_OUTPUTS, capacity - length))
    max_tokens = draw.between(most_outputs // 2 + 1 if is_crowded else 1, most_outputs)
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
        cache_namespace=draw.pick((b"", b"", b"\x01" * 32)),
    )
