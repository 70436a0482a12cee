"""Bytes of a key and value write."""

from headrace.pallas_kernels.kv_quantization import is_quantized
from headrace.pallas_kernels.paged_attention.cases import AttentionCase
from headrace.pallas_kernels.roofline import Cost, stored_bytes


def cost(case: AttentionCase) -> Cost:
    """Each token is read once and written once: one of a decode row, whole pages of a segment."""
    tokens = sum(length > 0 for length in case.decode_lens)
    tokens += sum(-(-count // case.page_tokens) * case.page_tokens for _, count in case.segments)
    return Cost(bytes=2 * tokens * token_bytes(case), flops=0)


def token_bytes(case: AttentionCase) -> int:
    """Of one token in a layer's pool: keys and values of all heads, and two float32 factors of each if it has any."""
    values = stored_bytes(case.num_kv_heads * 2 * case.head_dim, case.kv_dtype)
    return values + (8 * case.num_kv_heads if is_quantized(case.kv_dtype) else 0)
