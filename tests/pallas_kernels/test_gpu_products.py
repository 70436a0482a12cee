"""Products with quantized weights and of grouped rows on GPU, in Pallas' plain interpreter."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.pallas_kernels import api
from headrace.pallas_kernels.grouped_matmul import cases as grouped
from headrace.pallas_kernels.grouped_matmul.gpu import GpuGroupedBlocks
from headrace.pallas_kernels.quant_matmul import cases as quant
from headrace.pallas_kernels.quant_matmul.gpu import GpuQuantBlocks
from headrace.pallas_kernels.tolerances import relative_error, tolerance
from headrace.pallas_kernels.types import GroupQuant, Kernels, UnsupportedCase
from tests.pallas_kernels.gpu_interpreter import FAST_COMPILE, GPU

FITTING = [case for case in quant.TINY_CASES if case.bits == 8 or case.columns % 16 == 0]


def multiply(case: quant.QuantCase, kernels: Kernels = GPU) -> tuple[jax.Array, np.ndarray]:
    inputs = quant.make_inputs(case, seed=5)
    out = jax.jit(functools.partial(api.quant_matmul, kernels=kernels), compiler_options=FAST_COMPILE)(
        inputs.x_MK, inputs.weight
    )
    return out, quant.expected(inputs)


class TestQuant:
    @pytest.mark.parametrize("case", FITTING, ids=lambda case: case.name)
    def test_equals_float64(self, case: quant.QuantCase) -> None:
        out, right = multiply(case)
        assert out.dtype == jnp.float32
        assert relative_error(out, right) < tolerance(case.x_dtype)

    @pytest.mark.parametrize("splits, unroll", [(1, 1), (3, 2), (8, 4), (40, 1)])
    def test_any_split_of_the_contraction(self, splits: int, unroll: int) -> None:
        blocks = GpuQuantBlocks(rows=16, columns=32, depth=16, unroll=unroll, splits=splits, num_warps=4, stages=2)
        case = quant.QuantCase(
            name="", rows=20, contraction=192, columns=72, bits=8, group=32, affine=True, x_dtype="float32"
        )
        out, right = multiply(case, replace(GPU, blocks=(blocks,)))
        assert relative_error(out, right) < tolerance(jnp.float32)

    def test_the_lowest_and_highest_values_of_four_bits(self) -> None:
        values = jnp.tile(jnp.arange(-8, 8, dtype=jnp.int8), (32, 1)).astype(jnp.int4)
        weight = GroupQuant(values, jnp.ones((1, 16), jnp.float32))
        whole = GroupQuant(jnp.tile(values, (2, 1)), jnp.ones((2, 16), jnp.float32))
        for w, rows in ((weight, 32), (whole, 64)):
            out = api.quant_matmul(jnp.ones((1, rows), jnp.float32), w, kernels=GPU)
            np.testing.assert_array_equal(out[0], rows * np.arange(-8, 8))

    def test_odd_columns_of_four_bits_are_refused(self) -> None:
        case = next(case for case in quant.TINY_CASES if case not in FITTING)
        with pytest.raises(UnsupportedCase, match="130 columns of 4-bit values"):
            multiply(case)

    def test_groups_that_no_dot_can_cut_are_refused(self) -> None:
        with pytest.raises(UnsupportedCase, match="groups of 24 rows"):
            multiply(quant.QuantCase(name="", rows=1, contraction=96, columns=32, bits=8, group=24))

    def test_weights_whose_offsets_would_wrap_are_refused(self) -> None:
        values = jax.ShapeDtypeStruct((1 << 16, (1 << 15) + 128), jnp.int8)
        scale = jax.ShapeDtypeStruct((1 << 11, values.shape[1]), jnp.bfloat16)
        x = jax.ShapeDtypeStruct((1, 1 << 16), jnp.bfloat16)
        with pytest.raises(UnsupportedCase, match="wrap its 32-bit offsets"):
            jax.eval_shape(functools.partial(api.quant_matmul, kernels=GPU), x, GroupQuant(values, scale))


class TestGrouped:
    @pytest.mark.parametrize("case", grouped.TINY_CASES, ids=lambda case: case.name)
    def test_equals_float64(self, case: grouped.GroupedCase) -> None:
        inputs = grouped.make_inputs(case, seed=5)
        run = jax.jit(functools.partial(api.grouped_matmul, kernels=GPU), compiler_options=FAST_COMPILE)
        out = run(inputs.x_MK, inputs.weight, inputs.group_sizes_G, group_offset=inputs.group_offset)
        right = grouped.expected(inputs)
        assert out.dtype == jnp.float32
        assert relative_error(out, right) < tolerance(case.x_dtype)
        np.testing.assert_array_equal(np.asarray(out)[~right.any(axis=1)], 0)

    @pytest.mark.parametrize("name", ["tiny, last shard, padding", "tiny, shard without rows", "tiny, int8"])
    def test_a_layer_of_a_stack_gives_the_same_bits(self, name: str) -> None:
        inputs = grouped.make_inputs(next(case for case in grouped.TINY_CASES if case.name == name), seed=5)
        run = jax.jit(functools.partial(api.grouped_matmul, kernels=GPU), compiler_options=FAST_COMPILE)
        alone = run(inputs.x_MK, inputs.weight, inputs.group_sizes_G, group_offset=inputs.group_offset)
        weight = grouped.in_a_stack(inputs, 1, layers=3)
        out = run(inputs.x_MK, weight, inputs.group_sizes_G, group_offset=inputs.group_offset, layer=1)
        np.testing.assert_array_equal(out, alone)

    def test_tiles_of_many_rows(self) -> None:
        case = next(case for case in grouped.TINY_CASES if "borders inside tiles" in case.name)
        inputs = grouped.make_inputs(case, seed=6)
        blocks = GpuGroupedBlocks(rows=32, columns=32, depth=32, num_warps=4, stages=2)
        call = functools.partial(api.grouped_matmul, kernels=replace(GPU, blocks=(blocks,)))
        run = jax.jit(call, compiler_options=FAST_COMPILE)
        out = run(inputs.x_MK, inputs.weight, inputs.group_sizes_G)
        assert relative_error(out, grouped.expected(inputs)) < tolerance(case.x_dtype)

    def test_weights_of_idle_experts_are_not_read(self) -> None:
        """NaN in them changes no bit: with few tokens the time is that of the active experts' weights."""
        case = next(case for case in grouped.TINY_CASES if case.name == "tiny, one row")
        inputs = grouped.make_inputs(case, seed=5)
        run = jax.jit(functools.partial(api.grouped_matmul, kernels=GPU), compiler_options=FAST_COMPILE)
        clean = run(inputs.x_MK, inputs.weight, inputs.group_sizes_G)
        weight = np.array(inputs.weight)
        weight[inputs.group_sizes_G == 0] = np.nan
        np.testing.assert_array_equal(run(inputs.x_MK, weight, inputs.group_sizes_G), clean)
