"""Logical axes: what an axis of a weight means, whatever mesh it will be cut over."""

from enum import StrEnum


class Axis(StrEnum):
    """HEADS and KV_HEADS are the widths of all heads, side by side: they are cut between heads only. HEAD is the width
    of one, EXPERT_FFN the feed-forward width of one expert, CHOICES the experts as a router names them."""

    VOCAB = "vocab"
    WIDTH = "width"
    FFN = "ffn"
    HEADS = "heads"
    KV_HEADS = "kv_heads"
    HEAD = "head"
    EXPERTS = "experts"
    CHOICES = "choices"
    EXPERT_FFN = "expert_ffn"
