import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.pallas_kernels import api
from headrace.pallas_kernels.quant_matmul.cases import (
    MODEL_CASES,
    TINY_CASES,
    QuantCase,
    dequantized,
    expected,
    make_inputs,
)
from headrace.pallas_kernels.quant_matmul.quantize import quantize_groups
from headrace.pallas_kernels.quant_matmul.tpu import QuantBlocks, heuristic, is_aligned
from headrace.pallas_kernels.tolerances import relative_error, tolerance
from headrace.pallas_kernels.types import GroupQuant, Implementation, Kernels, UnsupportedCase
from tests.pallas_kernels import interpreter

REFERENCE = Kernels()
SMALL = 1 << 21
"""Weights of models up to this many values run here."""


def multiply(case: QuantCase, kernels: Kernels, seed: int = 5) -> tuple[np.ndarray, np.ndarray]:
    inputs = make_inputs(case, seed)
    out = jax.jit(functools.partial(api.quant_matmul, kernels=kernels))(inputs.x_MK, inputs.weight)
    assert out.dtype == jnp.float32
    return np.asarray(out), expected(inputs)


class TestReference:
    @pytest.mark.parametrize(
        "case",
        [*TINY_CASES, *(case for case in MODEL_CASES if case.contraction * case.columns < SMALL)],
        ids=lambda case: case.name,
    )
    def test_equals_float64(self, case: QuantCase) -> None:
        out, right = multiply(case, REFERENCE)
        assert relative_error(out, right) < tolerance(jnp.float32)

    @pytest.mark.parametrize(
        ("contraction", "group"),
        [(1024, 1024), (1024, 32), (1536, 768), (1021, 1021), (2048, 1024)],
        ids=lambda value: str(value),
    )
    def test_blocks_of_any_group(self, contraction: int, group: int) -> None:
        case = QuantCase(name="", rows=2, contraction=contraction, columns=8, bits=8, group=group, affine=True)
        out, right = multiply(case, REFERENCE)
        assert relative_error(out, right) < tolerance(jnp.float32)


class TestRefusals:
    x_MK = jax.ShapeDtypeStruct((2, 64), jnp.float32)

    def refuse(self, values: tuple[int, ...], scales: tuple[int, ...]) -> str:
        weight = GroupQuant(jax.ShapeDtypeStruct(values, jnp.int8), jax.ShapeDtypeStruct(scales, jnp.float32))
        with pytest.raises(UnsupportedCase) as error:
            jax.eval_shape(functools.partial(api.quant_matmul, kernels=REFERENCE), self.x_MK, weight)
        return error.value.why

    def test_other_contraction(self) -> None:
        assert "(32, 8)" in self.refuse((32, 8), (1, 8))

    def test_scales_that_do_not_fit(self) -> None:
        assert "(2, 4)" in self.refuse((64, 8), (2, 4))

    def test_groups_that_do_not_divide(self) -> None:
        assert "(3, 8)" in self.refuse((64, 8), (3, 8)) and "(0, 8)" in self.refuse((64, 8), (0, 8))


class TestQuantize:
    w_KN = np.random.default_rng(2).standard_normal((256, 24), np.float32) + np.float32(0.3)

    @pytest.mark.parametrize("affine", [False, True])
    @pytest.mark.parametrize("group", [32, 128, 256])
    @pytest.mark.parametrize("bits", [4, 8])
    def test_every_value_is_within_half_a_step(self, bits: int, group: int, affine: bool) -> None:
        weight = quantize_groups(self.w_KN, bits, group, affine=affine)
        step_KN = np.repeat(np.asarray(weight.scale_GN, np.float64), group, axis=0)
        # At the ends of the range the rounding of scale and offset to bfloat16 (2^-9) comes on top.
        slack = 2.0**-8 * (1 << (bits - 1))
        assert (np.abs(dequantized(weight) - self.w_KN) <= (0.5 + slack) * step_KN).all()
        assert (weight.offset_GN is not None) == affine

    def test_float32_scales_give_half_a_step(self) -> None:
        weight = quantize_groups(self.w_KN, 8, 32, affine=True, scale_dtype=jnp.float32)
        step_KN = np.repeat(np.asarray(weight.scale_GN, np.float64), 32, axis=0)
        assert (np.abs(dequantized(weight) - self.w_KN) <= 0.501 * step_KN).all()

    def test_offsets_make_off_center_weights_finer(self) -> None:
        errors = [
            np.abs(dequantized(quantize_groups(self.w_KN + 3, 4, 32, affine=affine)) - self.w_KN - 3).mean()
            for affine in (False, True)
        ]
        assert errors[1] < 0.6 * errors[0]

    def test_symmetric_levels_leave_out_the_lowest(self) -> None:
        assert np.asarray(quantize_groups(self.w_KN, 4, 32).values_KN).astype(np.int8).min() == -7

    @pytest.mark.parametrize("affine", [False, True])
    def test_equal_values_come_back(self, affine: bool) -> None:
        weight = quantize_groups(np.zeros((32, 4), np.float32), 4, 32, affine=affine)
        np.testing.assert_array_equal(dequantized(weight), 0)

    def test_experts_are_quantized_apart(self) -> None:
        w_EKN = np.stack([self.w_KN, 2 * self.w_KN])
        both, second = quantize_groups(w_EKN, 8, 32), quantize_groups(2 * self.w_KN, 8, 32)
        np.testing.assert_array_equal(both.values_KN[1], second.values_KN)
        np.testing.assert_array_equal(both.scale_GN[1], second.scale_GN)

    @pytest.mark.parametrize(("bits", "group", "named"), [(5, 32, "5 bits"), (8, 48, "groups of 48")])
    def test_refusals(self, bits: int, group: int, named: str) -> None:
        with pytest.raises(UnsupportedCase, match=named):
            quantize_groups(self.w_KN, bits, group)


class TestTpu:
    def kernels(self, blocks: QuantBlocks | None = None) -> Kernels:
        return Kernels(
            implementation=Implementation.TPU,
            chip="v6e",
            interpret=interpreter.parameters(),
            blocks=() if blocks is None else (blocks,),
        )

    @pytest.mark.parametrize("case", [case for case in TINY_CASES if case.group], ids=lambda case: case.name)
    def test_equals_float64_without_a_race(self, case: QuantCase) -> None:
        inputs = make_inputs(case, seed=5)
        run = jax.jit(functools.partial(api.quant_matmul, kernels=self.kernels()))
        out = interpreter.run_without_race(run, inputs.x_MK, inputs.weight)
        assert out.dtype == jnp.float32
        assert relative_error(out, expected(inputs)) < tolerance(case.x_dtype)

    @pytest.mark.parametrize(
        "blocks",
        [
            QuantBlocks(rows=16, columns=128, loop_rows=256),  # partial tiles of rows and columns, a loop
            QuantBlocks(rows=32, columns=256, loop_rows=128),  # an unrolled loop
            QuantBlocks(rows=48, columns=300, loop_rows=512),  # one tile, one iteration
        ],
        ids=str,
    )
    def test_any_blocks_give_the_same(self, blocks: QuantBlocks) -> None:
        case = QuantCase(name="", rows=40, contraction=512, columns=300, bits=4, group=32, affine=True)
        inputs = make_inputs(case, seed=5)
        run = jax.jit(functools.partial(api.quant_matmul, kernels=self.kernels(blocks)))
        out = interpreter.run_without_race(run, inputs.x_MK, inputs.weight)
        assert relative_error(out, expected(inputs)) < tolerance(case.x_dtype)

    @pytest.mark.parametrize("case", [case for case in TINY_CASES if not case.group], ids=lambda case: case.name)
    def test_one_scale_per_column_goes_through_xla(self, case: QuantCase) -> None:
        run = jax.jit(functools.partial(api.quant_matmul, kernels=self.kernels()))
        inputs = make_inputs(case, seed=5)
        assert "pallas" not in str(jax.make_jaxpr(run)(inputs.x_MK, inputs.weight))
        out = run(inputs.x_MK, inputs.weight)
        assert relative_error(out, expected(inputs)) < tolerance(case.x_dtype)

    def test_the_products_of_chips_without_bfloat16_vectors(self) -> None:
        case = next(case for case in TINY_CASES if case.group == 32 and case.x_dtype == "bfloat16")
        inputs = make_inputs(case, seed=5)
        kernels = replace(self.kernels(), chip="v5e")
        out = interpreter.run_without_race(
            jax.jit(functools.partial(api.quant_matmul, kernels=kernels)), inputs.x_MK, inputs.weight
        )
        assert relative_error(out, expected(inputs)) < tolerance(case.x_dtype)

    def test_blocks_beyond_vmem_are_refused(self) -> None:
        case = next(case for case in MODEL_CASES if case.name == "llama-3.1-8b up, int4 in 32, 16 rows")
        blocks = QuantBlocks(rows=16, columns=case.columns * 4, loop_rows=512)
        shapes = (
            jax.ShapeDtypeStruct((16, case.contraction), jnp.bfloat16),
            GroupQuant(
                jax.ShapeDtypeStruct((case.contraction, case.columns), jnp.int4),
                jax.ShapeDtypeStruct((case.contraction // 32, case.columns), jnp.bfloat16),
            ),
        )
        with pytest.raises(UnsupportedCase, match="VMEM"):
            jax.eval_shape(functools.partial(api.quant_matmul, kernels=self.kernels(blocks)), *shapes)

    @pytest.mark.parametrize("chip", ["v5e", "v6e"])
    @pytest.mark.parametrize("case", [case for case in MODEL_CASES if case.group], ids=lambda case: case.name)
    def test_the_heuristic_fits_models(self, case: QuantCase, chip: str) -> None:
        blocks = heuristic(case.rows, case.contraction, case.columns, case.bits, case.group_rows, case.x_dtype, chip)
        assert case.contraction % blocks.loop_rows == 0 == blocks.loop_rows % case.group_rows
        assert blocks.columns % 128 == 0 or blocks.columns == case.columns
        steps = case.contraction // blocks.loop_rows
        assert is_aligned(blocks.loop_rows, case.group_rows) or steps <= 4
