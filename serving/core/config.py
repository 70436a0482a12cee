"""Frozen configuration of the scheduler and its bounds."""

from dataclasses import dataclass
from enum import StrEnum

from headrace.serving.core.errors import ConfigError
from headrace.serving.core.plan import Bucket, ProgramKind


class PreemptionPolicy(StrEnum):
    """What happens to the KV of preempted requests. AUTO: whichever costs less by the measured times."""

    AUTO = "auto"
    SWAP = "swap"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """num_lanes: copies of the model, each with slots and pages of its own; a step runs all of them, and every other
    number here is one lane's. num_pages counts the null page 0. max_context: prompt and output tokens of one sequence.

    chunk_tokens: most prefill tokens of a step (the step token budget beside the decode rows); a multiple of
    block_tokens. block_tokens: a prefill segment is padded to whole query blocks; a multiple of page_size.
    decode_rows: ascending ladder of decode programs, the last is num_slots. prefill_tokens: ascending ladder of mixed
    programs, the last is chunk_tokens; each mixed program also holds num_slots decode rows.
    max_segments: most prefill segments (sampled rows of prefill) in a step.

    inter_token_s: objective for the gap between two tokens of a running stream; prefill chunks shrink so that measured
    steps keep to it. None = chunks are as long as chunk_tokens, as they always are in deterministic mode.
    num_swap_pages: host pages of a lane for preempted requests; 0 = they are always recomputed. aging_s: a priority
    class that was not served for so long counts one higher. is_shared: steps overlap only as far as a newcomer of
    another tenant bears; False = there is one tenant only, and they overlap at will.
    deterministic: decode rows and prefill chunks never share a program, and there is one of each; chunks start and end
    at multiples of chunk_tokens (or with their prompt), and preemption swaps, see ``planner``. swap_page_s: what a page
    takes to the host and back, as measured at the start; 0 = not measured.
    """

    num_slots: int
    page_size: int
    num_pages: int
    max_context: int
    chunk_tokens: int
    block_tokens: int
    decode_rows: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    max_segments: int = 4
    max_queued_requests: int = 512
    max_queued_prompt_tokens: int = 524_288
    prefix_cache: bool = True
    max_steps_in_flight: int = 2
    num_lanes: int = 1
    inter_token_s: float | None = None
    num_swap_pages: int = 0
    preemption: PreemptionPolicy = PreemptionPolicy.AUTO
    aging_s: float = 10.0
    deterministic: bool = False
    swap_page_s: float = 0.0
    is_shared: bool = True

    def __post_init__(self) -> None:
        def need(ok: bool, text: str) -> None:
            if not ok:
                raise ConfigError(text)

        need(self.num_lanes >= 1, f"num_lanes is {self.num_lanes}; it must be at least 1")
        need(self.num_slots >= 1, f"num_slots is {self.num_slots}; it must be at least 1")
        need(self.page_size >= 1, f"page_size is {self.page_size}; it must be at least 1")
        need(self.num_pages >= 2, f"num_pages is {self.num_pages}; page 0 is reserved, so at least 2 are needed")
        need(self.max_context >= 2, f"max_context is {self.max_context}; it must be at least 2")
        need(
            self.block_tokens % self.page_size == 0,
            f"block_tokens {self.block_tokens} must be a multiple of page_size {self.page_size}",
        )
        need(
            self.chunk_tokens % self.block_tokens == 0 and self.chunk_tokens > 0,
            f"chunk_tokens {self.chunk_tokens} must be a positive multiple of block_tokens {self.block_tokens}",
        )
        for name, ladder, last in (
            ("decode_rows", self.decode_rows, self.num_slots),
            ("prefill_tokens", self.prefill_tokens, self.chunk_tokens),
        ):
            need(
                bool(ladder) and list(ladder) == sorted(set(ladder)) and ladder[0] >= 1 and ladder[-1] == last,
                f"{name} {ladder} must ascend and end with {last}",
            )
        need(
            all(t % self.block_tokens == 0 for t in self.prefill_tokens),
            f"prefill_tokens {self.prefill_tokens} must be multiples of block_tokens {self.block_tokens}",
        )
        for name, value in (
            ("max_segments", self.max_segments),
            ("max_queued_requests", self.max_queued_requests),
            ("max_queued_prompt_tokens", self.max_queued_prompt_tokens),
        ):
            need(value >= 1, f"{name} is {value}; it must be at least 1")
        need(self.max_steps_in_flight in (1, 2), "max_steps_in_flight must be 1 or 2")
        need(self.inter_token_s is None or self.inter_token_s > 0, "inter_token_s must be above 0")
        need(self.num_swap_pages >= 0, f"num_swap_pages is {self.num_swap_pages}; it must not be negative")
        need(self.swap_page_s >= 0, "swap_page_s must not be negative")
        need(self.aging_s > 0, f"aging_s is {self.aging_s}; it must be above 0")
        need(
            self.preemption is not PreemptionPolicy.SWAP or self.num_swap_pages > 0,
            "preemption by swap needs num_swap_pages above 0",
        )
        if self.deterministic:
            need(
                len(self.decode_rows) == 1 and len(self.prefill_tokens) == 1,
                f"deterministic mode runs one decode and one prefill program: decode_rows must be ({self.num_slots},), "
                f"prefill_tokens ({self.chunk_tokens},)",
            )
            need(
                self.preemption is not PreemptionPolicy.RECOMPUTE,
                "deterministic mode never computes a request again: preemption must be swap or auto",
            )
            need(
                self.inter_token_s is None,
                "deterministic mode reads prompts in whole chunks of chunk_tokens and cannot size them by "
                "inter_token_s (--inter-token-ms); lower chunk_tokens (--chunk-tokens) instead",
            )

    def lane_of_slot(self, slot: int) -> int:
        """Slots are numbered through all lanes."""
        return slot // self.num_slots

    def lane_of_page(self, page: int) -> int:
        """Pages are numbered through all lanes; the first of each is its null page."""
        return page // self.num_pages

    @property
    def chunk_grid(self) -> int:
        """Chunks of a prompt start at its multiples: any page, in deterministic mode every chunk_tokens."""
        return self.chunk_tokens if self.deterministic else self.page_size

    @property
    def max_pages_per_sequence(self) -> int:
        return -(-self.max_context // self.page_size)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Every program that a step may ask for; warm-up compiles exactly these."""
        decode = tuple(Bucket(ProgramKind.DECODE, rows) for rows in self.decode_rows)
        mixed = tuple(Bucket(ProgramKind.MIXED, self.num_slots, tokens) for tokens in self.prefill_tokens)
        return decode + mixed
