"""The mutable history of one request inside the scheduler: all of its state in one place."""

from dataclasses import dataclass, field

from headrace.serving.core.events import PreemptionAction, PreemptionCount, PreemptionReason, Timings
from headrace.serving.core.fair_share import Tenant
from headrace.serving.core.plan import SlotRef
from headrace.serving.core.prefix_cache import Entry, PageKey
from headrace.serving.core.request import Request
from headrace.serving.core.swap_space import Swapped


@dataclass(slots=True, eq=False)
class Sequence:
    """Waiting while slot is None, else prefilling until num_computed reaches num_to_prefill, then decoding.

    arrival: order of submission, unique. outputs: generated tokens that the host knows.
    keys: of the full pages of known tokens, kept over preemptions. chain: published entries of the prefix.
    swapped: its KV in host memory, while it waits. num_charged: leading positions that its tenant was charged for.
    preempted_at_s: since when it waits again. num_expected: its part of its tenant's.

    Of the present tenancy, reset by ``clear_tenancy``: slot, pages, num_computed (leading positions whose KV some plan
    made so far writes or finds cached), num_to_prefill, num_pending (samples in flight), last_step (id of the newest
    plan that loads this sequence or has a row of it), prefill_step (of the newest that has a chunk of it), read_s (when
    that was, or the start), is_guarded (its worst case is set aside: it is not preempted for pages).
    """

    request: Request
    arrival: int
    submitted_s: float
    outputs: list[int] = field(default_factory=list)
    keys: list[PageKey] = field(default_factory=list)
    chain: list[Entry] = field(default_factory=list)
    slot: SlotRef | None = None
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_to_prefill: int = 0
    num_pending: int = 0
    last_step: int | None = None
    admitted_s: float | None = None
    first_token_s: float | None = None
    cached_tokens: int = 0
    tenant: Tenant = field(default_factory=Tenant)
    is_guarded: bool = False
    prefill_step: int | None = None
    read_s: float = 0.0
    swapped: Swapped | None = None
    num_charged: int = 0
    num_expected: int = 0
    preempted: dict[tuple[PreemptionReason, PreemptionAction], int] = field(default_factory=dict)
    preempted_at_s: float | None = None
    preempted_s: float = 0.0

    @property
    def preemptions(self) -> int:
        return sum(self.preempted.values())

    def num_preempted_for(self, *reasons: PreemptionReason) -> int:
        return sum(count for (reason, _), count in self.preempted.items() if reason in reasons)

    @property
    def deadline_s(self) -> float | None:
        deadline_ms = self.request.deadline_ms
        return None if deadline_ms is None else self.submitted_s + deadline_ms / 1e3

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and outputs."""
        return len(self.request.prompt_ids) + len(self.outputs)

    @property
    def num_planned_outputs(self) -> int:
        return len(self.outputs) + self.num_pending

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.num_to_prefill

    @property
    def wants_decode(self) -> bool:
        """False also when the samples in flight reach max_tokens: nothing more can come."""
        return (
            self.slot is not None and not self.is_prefilling and self.num_planned_outputs < self.request.stop.max_tokens
        )

    @property
    def max_kv_tokens(self) -> int:
        """Positions whose KV is ever written; the last output's is not."""
        return max_kv_tokens(len(self.request.prompt_ids), self.request.stop.max_tokens)

    def token_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Known tokens at positions start … end - 1."""
        prompt = self.request.prompt_ids
        if end <= len(prompt):
            return prompt[start:end]
        return prompt[start:] + tuple(self.outputs[max(0, start - len(prompt)) : end - len(prompt)])

    def timings(self, now_s: float) -> Timings:
        """Queue until first admitted, prefill until the first token, decode until now."""
        admitted_s = now_s if self.admitted_s is None else self.admitted_s
        prefilled_s = now_s if self.first_token_s is None else self.first_token_s
        waits_s = 0.0 if self.preempted_at_s is None else now_s - self.preempted_at_s
        return Timings(
            queue_ms=1e3 * (admitted_s - self.submitted_s),
            prefill_ms=1e3 * (prefilled_s - admitted_s),
            decode_ms=1e3 * (now_s - prefilled_s),
            first_token_ms=None if self.first_token_s is None else 1e3 * (self.first_token_s - self.submitted_s),
            preemptions=self.preemptions,
            preempted_ms=1e3 * (self.preempted_s + waits_s),
            preempted=tuple(
                PreemptionCount(reason=reason, action=action, count=count)
                for (reason, action), count in sorted(self.preempted.items())
            ),
        )

    def clear_tenancy(self) -> None:
        self.slot = None
        self.pages = []
        self.chain = []
        self.num_computed = 0
        self.num_to_prefill = 0
        self.num_pending = 0
        self.last_step = None
        self.prefill_step = None
        self.is_guarded = False


def max_kv_tokens(num_prompt_tokens: int, max_tokens: int) -> int:
    """KV positions of a request that runs to max_tokens."""
    return num_prompt_tokens + max_tokens - 1


def num_pages_for(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)
