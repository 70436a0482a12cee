"""Costs against numbers worked out by hand."""

import pytest

from headrace.pallas_kernels.chips import CHIPS
from headrace.pallas_kernels.grouped_matmul import cost as grouped_matmul
from headrace.pallas_kernels.grouped_matmul.cases import GroupedCase
from headrace.pallas_kernels.paged_attention import cost as paged_attention
from headrace.pallas_kernels.paged_attention.cases import AttentionCase
from headrace.pallas_kernels.quant_matmul import cost as quant_matmul
from headrace.pallas_kernels.quant_matmul.cases import QuantCase
from headrace.pallas_kernels.roofline import Cost, roofline_s, stored_bytes
from headrace.pallas_kernels.write_pages import cost as write_pages

HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_tokens": 16}
BF16_TOKEN = 2 * 128 * 2
INT8_TOKEN = 2 * (128 + 8)
Q_AND_OUT = 2 * 4 * 64 * 4
"""float32."""


def test_the_slower_of_memory_and_products_counts() -> None:
    v6e = CHIPS["v6e"]
    assert roofline_s(Cost(bytes=1_640_000_000, flops=0), v6e) == pytest.approx(1e-3)
    assert roofline_s(Cost(bytes=1, flops=918_000_000_000), v6e) == pytest.approx(1e-3)


def test_llama_8b_in_bfloat16_takes_10_ms_on_v6e() -> None:
    assert roofline_s(Cost(bytes=16_060_000_000, flops=0), CHIPS["v6e"]) == pytest.approx(9.79e-3, rel=1e-3)


@pytest.mark.parametrize(("count", "dtype", "size"), [(3, "int4", 2), (3, "int8", 3), (3, "bfloat16", 6)])
def test_stored_bytes(count: int, dtype: str, size: int) -> None:
    assert stored_bytes(count, dtype) == size


class TestAttention:
    def case(self, **fields: object) -> AttentionCase:
        return AttentionCase(name="", **HEADS, **{"kv_dtype": "bfloat16"} | fields)

    def test_decode_reads_the_pages_of_earlier_tokens_and_writes_one(self) -> None:
        """33 tokens: 32 earlier ones on 2 pages. 17: 16 on one. 1: none. 0: padding."""
        cost = paged_attention.cost(self.case(decode_lens=(33, 17, 1, 0)))
        assert cost.bytes == 3 * 16 * BF16_TOKEN + 3 * Q_AND_OUT + 3 * 2 * BF16_TOKEN
        assert cost.flops == 4 * (33 + 17 + 1) * 4 * 64

    def test_scales_count(self) -> None:
        cost = paged_attention.cost(self.case(decode_lens=(33,), kv_dtype="int8"))
        assert cost.bytes == 2 * 16 * INT8_TOKEN + Q_AND_OUT + 2 * INT8_TOKEN

    def test_pages_behind_the_window_are_not_read(self) -> None:
        """Token 99 sees 80 .. 99: pages 5 and 6 of earlier tokens. With 19, it sees 81, also on page 5."""
        for window in (20, 19):
            cost = paged_attention.cost(self.case(decode_lens=(100,), window=window))
            assert cost.bytes == 2 * 16 * BF16_TOKEN + Q_AND_OUT + 2 * BF16_TOKEN
            assert cost.flops == 4 * window * 4 * 64

    def test_each_query_block_reads_up_to_its_end(self) -> None:
        """48 .. 97 in blocks of 32: the first reads 80 tokens on 5 pages, the second 98 on 7. 4 pages are written."""
        cost = paged_attention.cost(self.case(segments=((48, 50),)))
        assert cost.bytes == (5 + 7) * 16 * BF16_TOKEN + 50 * Q_AND_OUT + 2 * 4 * 16 * BF16_TOKEN
        assert cost.flops == 4 * sum(range(49, 99)) * 4 * 64

    def test_write(self) -> None:
        cost = write_pages.cost(self.case(decode_lens=(5, 0), segments=((0, 17),), kv_dtype="int8"))
        assert cost == Cost(bytes=2 * (1 + 32) * INT8_TOKEN, flops=0)


def test_quant_matmul() -> None:
    case = QuantCase(name="", rows=3, contraction=64, columns=10, bits=4, group=32, affine=True)
    assert quant_matmul.cost(case) == Cost(bytes=3 * 64 * 2 + 320 + 2 * 2 * 10 * 2 + 3 * 10 * 4, flops=2 * 3 * 640)
    per_column = QuantCase(name="", rows=1, contraction=64, columns=10, bits=8)
    assert quant_matmul.cost(per_column).bytes == 128 + 640 + 20 + 40


class TestGrouped:
    shape = {"num_experts": 4, "contraction": 64, "columns": 10, "group_sizes": (2, 0, 3, 1), "padding_rows": 2}

    def test_idle_experts_cost_nothing(self) -> None:
        case = GroupedCase(name="", **self.shape)
        cost = grouped_matmul.cost(case, case.group_sizes)
        assert cost == Cost(bytes=3 * 640 * 2 + 6 * 64 * 2 + 8 * 10 * 4, flops=2 * 6 * 640)

    def test_a_shard_reads_its_own(self) -> None:
        case = GroupedCase(name="", **self.shape, group_offset=1, local_experts=2, bits=8)
        cost = grouped_matmul.cost(case, case.group_sizes)
        assert cost == Cost(bytes=640 + 20 + 3 * 64 * 2 + 8 * 10 * 4, flops=2 * 3 * 640)
