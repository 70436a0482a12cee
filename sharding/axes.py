"""Logical axes: what an axis of a weight means, whatever mesh it will be cut over."""

from enum import StrEnum


class Axis(StrEnum):
    VOCAB = "vocab"
    WIDTH = "width"
    FFN = "ffn"
    HEADS = "heads"
    KV_HEADS = "kv_heads"
    HEAD_DIM = "head_dim"
