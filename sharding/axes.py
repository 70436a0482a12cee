"""Logical axes: what an axis of a weight means, whatever mesh it will be cut over."""

from enum import StrEnum


class Axis(StrEnum):
    """HEADS and KV_HEADS are the widths of all heads, side by side: they are cut between heads only."""

    VOCAB = "vocab"
    WIDTH = "width"
    FFN = "ffn"
    HEADS = "heads"
    KV_HEADS = "kv_heads"
