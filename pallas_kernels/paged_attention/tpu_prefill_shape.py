"""Static numbers of one call of the TPU's prefill kernel, and its block sizes."""

from dataclasses import dataclass

import jax.numpy as jnp

from headrace.pallas_kernels.paged_attention.online_softmax import LOG2_E
from headrace.pallas_kernels.types import AttentionSpec

LANES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillBlocks:
    """kv_tokens: keys of one iteration, whole pages, a multiple of 128 or fewer. kv_heads: key heads of one grid step.
    query_rows: rows (a query token of one head each) whose scores are worked on at once."""

    kv_tokens: int
    kv_heads: int
    query_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillShape:
    """Static numbers of one call. group: query heads of a key head. max_pages: columns of the page table."""

    blocks: PrefillBlocks
    spec: AttentionSpec
    page_tokens: int
    block_tokens: int
    group: int
    max_pages: int
    head_dim: int
    has_scales: bool
    has_sinks: bool
    compute_dtype: jnp.dtype

    @property
    def rows(self) -> int:
        """Of one key head: query tokens of a block times query heads of a key head, the tokens of a head together."""
        return self.group * self.block_tokens

    @property
    def kv_pages(self) -> int:
        return self.blocks.kv_tokens // self.page_tokens

    @property
    def chunks(self) -> int:
        """Row groups of one head."""
        return self.rows // self.blocks.query_rows

    @property
    def shares_lanes(self) -> bool:
        """Key and value in one row of 128 lanes: queries are padded with zeros, and the result's first half is cut."""
        return 2 * self.head_dim == LANES

    @property
    def width(self) -> int:
        """Lanes of a query and of a result."""
        return LANES if self.shares_lanes else self.head_dim

    @property
    def total_lanes(self) -> int:
        """Sums of probabilities are kept per lane and added up once, at the end."""
        return min(self.blocks.kv_tokens, LANES)

    @property
    def score_factor(self) -> float:
        """What the product of a query and a stored key is multiplied by before the exponential's own factor."""
        if self.spec.soft_cap is not None:
            return self.spec.scale / self.spec.soft_cap
        return self.spec.scale * LOG2_E if self.has_scales else 1.0

    @property
    def exponent_factor(self) -> float:
        """Powers are of 2, which is what the hardware has; a factor on the scores then costs nothing."""
        if self.spec.soft_cap is not None:
            return self.spec.soft_cap * LOG2_E
        return 1.0 if self.has_scales else self.spec.scale * LOG2_E
