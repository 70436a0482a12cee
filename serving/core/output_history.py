"""How many tokens a request will generate, learned from what requests like it did."""

from collections import OrderedDict
from math import ceil

SMOOTHING = 0.1
"""Weight of the newest request in the mean: the last twenty or so count."""
MAX_KINDS = 4096
"""Kinds that are remembered; the one that is unused for longest is forgotten."""


class OutputHistory:
    """Mean share of max_tokens that was generated, of each tenant and each power of two of max_tokens.

    Who sets max_tokens to 50 means it more than who leaves it at the rest of the context, hence the powers of two.
    """

    def __init__(self) -> None:
        self._shares: OrderedDict[tuple[str | None, int], float] = OrderedDict()

    def known_tokens(self, tenant: str, max_tokens: int) -> int | None:
        """Of this tenant's requests, or else of everybody's; None while nothing is known."""
        for whose in (tenant, None):
            share = self._shares.get((whose, max_tokens.bit_length()))
            if share is not None:
                return min(max_tokens, max(1, ceil(share * max_tokens)))
        return None

    def expected_tokens(self, tenant: str, max_tokens: int) -> int:
        """From 1 to max_tokens; max_tokens while nothing is known."""
        share = self._shares.get((tenant, max_tokens.bit_length()), 1.0)
        return min(max_tokens, max(1, ceil(share * max_tokens)))

    def ended(self, tenant: str, max_tokens: int, num_generated: int) -> None:
        """A request ended by itself (a cancelled one says nothing)."""
        share = num_generated / max_tokens
        for kind in ((tenant, max_tokens.bit_length()), (None, max_tokens.bit_length())):
            mean = self._shares.get(kind)
            self._shares[kind] = share if mean is None else mean + SMOOTHING * (share - mean)
            self._shares.move_to_end(kind)
        if len(self._shares) > MAX_KINDS:
            self._shares.popitem(last=False)
