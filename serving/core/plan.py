"""What one step does (plan) and what came of it (result): host integers only, never arrays.

Decode rows come first, then prefill segments. Each segment starts on a page boundary of its sequence; each but the
last of a prompt is whole pages long. A row is named by ``SlotRef``: a late result can never reach the next tenant of
a slot, since its generation differs.
"""

from dataclasses import dataclass
from enum import StrEnum

from headrace.serving.core.request import Request


@dataclass(frozen=True, slots=True)
class SlotRef:
    """One tenancy of one row of the sampling state; slots are numbered through all lanes."""

    slot: int
    generation: int


class ProgramKind(StrEnum):
    DECODE = "decode"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class Bucket:
    """A compiled shape: decode_rows decode rows and prefill_tokens flat prefill tokens (0 for decode programs), of each
    lane."""

    kind: ProgramKind
    decode_rows: int
    prefill_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRow:
    """Run one token and sample the next.

    position: index in the sequence of the token that is fed (its KV is written there).
    input_token: None = the device's own last sampled token of the slot (not yet read by the host).
    page_ids: pages of the sequence in order; cover position. output_index: generated tokens before this sample.
    """

    slot: SlotRef
    position: int
    input_token: int | None
    page_ids: tuple[int, ...]
    output_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSegment:
    """Run token_ids at positions start, start + 1, …; start is a multiple of the page size.

    samples: True on the last chunk: the next token is sampled from the last row.
    page_ids: pages of the sequence in order; cover start + len(token_ids) - 1.
    output_index: generated tokens before the sample (not 0 when a preempted sequence is recomputed).
    """

    slot: SlotRef
    start: int
    token_ids: tuple[int, ...]
    page_ids: tuple[int, ...]
    samples: bool
    output_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLoad:
    """A slot gets a (new) tenant before this step runs: load its sampling state.

    output_ids: tokens generated before (recompute after preemption), for penalties and counts.
    """

    slot: SlotRef
    request: Request
    output_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PageCopy:
    """KV of one page, all layers, between the device and host memory. Host pages are numbered from 0 through all lanes
    (num_swap_pages of each)."""

    page: int
    host_page: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """In this order: swap_out is read as the steps before left it, swap_in is written, slots are loaded, rows run.

    A page in swap_out may be written in the same step; a host page in swap_in is reused by later steps only. There is
    always a row: copies without any wait for the next step.
    """

    step_id: int
    bucket: Bucket
    loads: tuple[SlotLoad, ...]
    decode: tuple[DecodeRow, ...]
    prefill: tuple[PrefillSegment, ...]
    swap_out: tuple[PageCopy, ...] = ()
    swap_in: tuple[PageCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.decode) + sum(len(s.token_ids) for s in self.prefill)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Of the model's own distribution (float32 log-softmax of raw logits, before bias, penalties and temperature).

    rank: 1 = most likely. top: (token id, logprob) sorted downwards, ties by lower id; the chosen token is not
    added to it.
    """

    chosen: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """token_id in [0, vocabulary); is_finite False = the row's logits had NaN or infinity: the request fails alone."""

    token_id: int
    is_finite: bool = True
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """decode: one per decode row, in order. prefill: one per segment, None where the segment did not sample."""

    step_id: int
    decode: tuple[SampledToken, ...]
    prefill: tuple[SampledToken | None, ...]
