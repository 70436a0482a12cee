"""Bytes and operations of a quantized matmul."""

from headrace.pallas_kernels.quant_matmul.cases import QuantCase
from headrace.pallas_kernels.roofline import Cost, stored_bytes


def cost(case: QuantCase) -> Cost:
    """x, integers, scales and offsets are read, float32 is written."""
    factors = case.contraction // case.group_rows * case.columns * (2 if case.affine else 1)
    return Cost(
        bytes=stored_bytes(case.rows * case.contraction, case.x_dtype)
        + stored_bytes(case.contraction * case.columns, f"int{case.bits}")
        + stored_bytes(factors, case.scale_dtype)
        + stored_bytes(case.rows * case.columns, "float32"),
        flops=2 * case.rows * case.contraction * case.columns,
    )
