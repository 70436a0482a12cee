"""Bytes and operations of a grouped matmul."""

from collections.abc import Sequence

from headrace.pallas_kernels.grouped_matmul.cases import GroupedCase
from headrace.pallas_kernels.roofline import Cost, stored_bytes


def cost(case: GroupedCase, group_sizes: Sequence[int]) -> Cost:
    """Experts of the shard that have rows are read, and these rows; float32 is written for every row.

    group_sizes: rows of each of the model's experts (those that ``make_inputs`` drew).
    """
    local = [int(size) for size in group_sizes[case.group_offset : case.group_offset + case.experts_here]]
    busy, rows = sum(size > 0 for size in local), sum(local)
    of_expert = stored_bytes(case.contraction * case.columns, case.x_dtype if case.bits is None else f"int{case.bits}")
    if case.bits is not None:
        groups = 1 if case.group is None else case.contraction // case.group
        of_expert += stored_bytes(groups * case.columns, case.x_dtype)
    return Cost(
        bytes=busy * of_expert
        + stored_bytes(rows * case.contraction, case.x_dtype)
        + stored_bytes(case.rows * case.columns, "float32"),
        flops=2 * rows * case.contraction * case.columns,
    )
