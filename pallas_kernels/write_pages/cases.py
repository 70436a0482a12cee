"""Batches that write at every border of a page."""

from headrace.pallas_kernels.paged_attention.cases import AttentionCase

CASES = (
    AttentionCase(
        name="smollm2-135m decode",
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        page_tokens=16,
        decode_lens=(1, 16, 17, 32, 0),
    ),
    AttentionCase(
        name="smollm2-135m one row", num_heads=9, num_kv_heads=3, head_dim=64, page_tokens=16, decode_lens=(16,)
    ),
    AttentionCase(
        name="smollm2-135m mixed",
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        page_tokens=16,
        decode_lens=(40, 0),
        segments=((0, 33), (16, 16), (32, 1)),
        padding_blocks=1,
    ),
    AttentionCase(
        name="llama-3-8b prefill",
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        page_tokens=32,
        segments=((0, 64), (64, 31)),
    ),
)
