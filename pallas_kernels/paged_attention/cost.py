"""Bytes and operations of paged attention, the write of this step's tokens included."""

from headrace.pallas_kernels.paged_attention.cases import AttentionCase
from headrace.pallas_kernels.roofline import Cost, stored_bytes
from headrace.pallas_kernels.write_pages.cost import cost as write_cost
from headrace.pallas_kernels.write_pages.cost import token_bytes


def cost(case: AttentionCase) -> Cost:
    """Whole pages are read: of a decode row those of its earlier tokens (its new one comes with the call), of a query
    block those up to its last token; of a window only pages that it reaches into."""
    spans = [(length - 1, length - 1, length) for length in case.decode_lens if length]
    for start, count in case.segments:
        for offset in range(0, count, case.block_tokens):
            first = start + offset
            end = min(first + case.block_tokens, start + count)
            spans.append((first, end, end))
    pages = sum(_pages(case, first, stored) for first, stored, _ in spans)
    pairs = sum(_visible(case, position) for first, _, end in spans for position in range(first, end))
    queries = sum(end - first for first, _, end in spans)
    read = Cost(
        bytes=pages * case.page_tokens * token_bytes(case)
        + 2 * stored_bytes(queries * case.num_heads * case.head_dim, case.q_dtype),
        flops=4 * pairs * case.num_heads * case.head_dim,
    )
    return read + write_cost(case)


def _visible(case: AttentionCase, position: int) -> int:
    return position + 1 if case.window is None else min(position + 1, case.window)


def _pages(case: AttentionCase, first_query: int, stored: int) -> int:
    """Pages that hold the tokens up to ``stored`` that the first query, or a later one, sees."""
    oldest = first_query + 1 - _visible(case, first_query)
    return max(-(-stored // case.page_tokens) - oldest // case.page_tokens, 0)
