import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.pallas_kernels import api
from headrace.pallas_kernels.grouped_matmul.cases import (
    TINY_CASES,
    GroupedCase,
    GroupedInputs,
    expected,
    in_a_stack,
    make_inputs,
)
from headrace.pallas_kernels.grouped_matmul.tpu import GroupedBlocks, heuristic
from headrace.pallas_kernels.grouped_matmul.visits import make_visits, max_visits
from headrace.pallas_kernels.tolerances import relative_error, tolerance
from headrace.pallas_kernels.types import GroupQuant, Implementation, Kernels, UnsupportedCase
from tests.pallas_kernels import interpreter

REFERENCE = Kernels()


def multiply(inputs: GroupedInputs, kernels: Kernels) -> np.ndarray:
    run = jax.jit(functools.partial(api.grouped_matmul, kernels=kernels))
    out = run(inputs.x_MK, inputs.weight, inputs.group_sizes_G, group_offset=inputs.group_offset)
    assert out.dtype == jnp.float32
    return np.asarray(out)


IN_STACKS = ("tiny, last shard, padding", "tiny, shard without rows", "tiny, int8", "tiny, no rows at all")


def rows_elsewhere(case: GroupedCase, inputs: GroupedInputs) -> np.ndarray:
    """Rows of the batch that must be 0."""
    ends = np.cumsum(inputs.group_sizes_G)
    first = ends[case.group_offset] - inputs.group_sizes_G[case.group_offset]
    row = np.arange(case.rows)
    return (row < first) | (row >= ends[case.group_offset + case.experts_here - 1])


def with_idle_experts_poisoned(case: GroupedCase, inputs: GroupedInputs) -> jax.Array | GroupQuant:
    """NaN in whatever weight and scale belongs to an expert without rows (and the largest integers)."""
    sizes = inputs.group_sizes_G[case.group_offset : case.group_offset + case.experts_here]

    def poison(array: np.ndarray) -> np.ndarray:
        array = np.array(array)
        array[sizes == 0] = 127 if array.dtype == np.int8 else np.nan
        return array

    return jax.tree.map(poison, inputs.weight)


@pytest.mark.parametrize("case", TINY_CASES, ids=lambda case: case.name)
class TestReference:
    def test_equals_float64(self, case: GroupedCase) -> None:
        inputs = make_inputs(case, seed=5)
        out = multiply(inputs, REFERENCE)
        assert relative_error(out, expected(inputs)) < tolerance(jnp.float32)
        np.testing.assert_array_equal(out[rows_elsewhere(case, inputs)], 0)

    def test_weights_of_idle_experts_change_no_bit(self, case: GroupedCase) -> None:
        inputs = make_inputs(case, seed=5)
        clean = multiply(inputs, REFERENCE)
        np.testing.assert_array_equal(
            jax.jit(functools.partial(api.grouped_matmul, kernels=REFERENCE))(
                inputs.x_MK,
                with_idle_experts_poisoned(case, inputs),
                inputs.group_sizes_G,
                group_offset=inputs.group_offset,
            ),
            clean,
        )


class TestVisits:
    @pytest.mark.parametrize(("tile", "seed"), [(1, 0), (1, 1), (4, 2), (8, 3), (8, 4), (64, 5)])
    def test_cover_every_row_once_and_every_tile(self, tile: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        sizes = rng.integers(0, 9, 10) * rng.integers(0, 2, 10)
        rows = int(sizes.sum()) + int(rng.integers(0, 12)) + 1
        offset, experts = int(rng.integers(0, 4)), int(rng.integers(1, 7))
        make = jax.jit(functools.partial(make_visits, num_experts=experts, num_rows=rows, tile_rows=tile))
        visits = jax.tree.map(np.asarray, make(sizes, offset))
        count = int(visits.count[0])
        assert count <= max_visits(rows, experts, tile) == visits.tile_V.size

        expert_of_row = np.full(rows, -1)
        for tile_index, expert, first, last in zip(
            visits.tile_V, visits.expert_V, visits.first_V, visits.last_V, strict=True
        ):
            own = np.arange(max(first, tile_index * tile), min(last, (tile_index + 1) * tile))
            if first < last and own.size:
                assert (expert_of_row[own] == -1).all() or (expert_of_row[own] == expert).all()
                expert_of_row[own] = expert
        right = np.repeat(np.arange(10) - offset, sizes)
        right = np.concatenate([np.where((right >= 0) & (right < experts), right, -1), np.full(rows, -1)])[:rows]
        np.testing.assert_array_equal(expert_of_row, right)
        np.testing.assert_array_equal(np.unique(visits.tile_V[:count]), np.arange(-(-rows // tile)))
        assert (np.diff(visits.tile_V) >= 0).all()
        np.testing.assert_array_equal(visits.is_new_V[:count], np.r_[1, np.diff(visits.tile_V[:count]) > 0])
        # Idle experts are not even named, so that no weight of theirs is loaded.
        local = sizes[offset : offset + experts]
        if local.any():
            assert set(visits.expert_V) <= set(np.flatnonzero(local))
        assert not visits.last_V[count:].any()

    def test_one_visit_for_each_busy_expert_of_a_small_batch(self) -> None:
        visits = make_visits(jnp.array([0, 1, 0, 2, 0, 0, 1, 0]), 0, 8, num_rows=4, tile_rows=8)
        assert int(visits.count[0]) == 3
        np.testing.assert_array_equal(visits.expert_V[:3], [1, 3, 6])


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("name", IN_STACKS)
def test_a_layer_of_a_stack_gives_the_same_bits(name: str, layer: int) -> None:
    inputs = make_inputs(next(case for case in TINY_CASES if case.name == name), seed=5)
    run = jax.jit(functools.partial(api.grouped_matmul, kernels=REFERENCE))
    out = run(
        inputs.x_MK,
        in_a_stack(inputs, layer, layers=3),
        inputs.group_sizes_G,
        group_offset=inputs.group_offset,
        layer=layer,
    )
    np.testing.assert_array_equal(out, multiply(inputs, REFERENCE))


def test_a_stack_without_a_layer_and_a_layer_without_a_stack_are_refused() -> None:
    inputs = make_inputs(TINY_CASES[0], seed=5)
    for weight, layer in ((inputs.weight, 0), (inputs.weight[None], None)):
        with pytest.raises(UnsupportedCase, match="does not fit inputs"):
            api.grouped_matmul(inputs.x_MK, weight, inputs.group_sizes_G, layer=layer, kernels=REFERENCE)


class TestTpu:
    def kernels(self, *blocks: GroupedBlocks) -> Kernels:
        parameters = interpreter.parameters()
        return Kernels(implementation=Implementation.TPU, chip="v6e", interpret=parameters, blocks=blocks)

    def run(self, inputs: GroupedInputs, kernels: Kernels) -> np.ndarray:
        run = jax.jit(functools.partial(api.grouped_matmul, kernels=kernels))
        arguments = inputs.x_MK, inputs.weight, inputs.group_sizes_G
        return interpreter.run_without_race(run, *arguments, group_offset=inputs.group_offset)

    @pytest.mark.parametrize("case", [case for case in TINY_CASES if not case.group], ids=lambda case: case.name)
    def test_equals_float64_whatever_idle_experts_hold(self, case: GroupedCase) -> None:
        inputs = make_inputs(case, seed=5)
        inputs = replace(inputs, weight=with_idle_experts_poisoned(case, inputs))
        right = expected(replace(inputs, weight=make_inputs(case, seed=5).weight))
        out = self.run(inputs, self.kernels())
        assert out.dtype == jnp.float32
        assert relative_error(out, right) < tolerance(case.x_dtype)
        np.testing.assert_array_equal(out[rows_elsewhere(case, inputs)], 0)

    @pytest.mark.parametrize(
        "blocks",
        [
            GroupedBlocks(rows=8, columns=128, loop_rows=128),  # borders in tiles, partial columns, a loop
            GroupedBlocks(rows=16, columns=200, loop_rows=256),
        ],
        ids=str,
    )
    def test_any_blocks_give_the_same(self, blocks: GroupedBlocks) -> None:
        case = GroupedCase(
            name="",
            num_experts=5,
            contraction=256,
            columns=200,
            group_sizes=(9, 3, 0, 20, 5),
            padding_rows=13,
            group_offset=1,
            local_experts=3,
            x_dtype="float32",
        )
        inputs = make_inputs(case, seed=5)
        out = self.run(inputs, self.kernels(blocks))
        assert relative_error(out, expected(inputs)) < tolerance(case.x_dtype)
        np.testing.assert_array_equal(out[rows_elsewhere(case, inputs)], 0)

    def test_the_grid_is_as_long_as_there_are_busy_experts(self) -> None:
        case = GroupedCase(name="", num_experts=64, contraction=64, columns=128, group_sizes=(0, 1, 0, 1) + (0,) * 60)
        inputs = make_inputs(case, seed=5)
        rows = heuristic(2, 64, 64, 128, jnp.bfloat16, jnp.bfloat16).rows
        assert int(make_visits(jnp.asarray(inputs.group_sizes_G), 0, 64, rows, rows).count[0]) == 3  # one of padding
        arguments = inputs.x_MK, inputs.weight, inputs.group_sizes_G
        program = jax.make_jaxpr(functools.partial(api.grouped_matmul, kernels=self.kernels()))(*arguments)
        (call,) = [equation for equation in program.eqns if equation.primitive.name == "pallas_call"]
        assert call.params["grid_mapping"].num_dynamic_grid_bounds == 1

    @pytest.mark.parametrize("name", IN_STACKS)
    def test_a_layer_of_a_stack_gives_the_same_bits(self, name: str) -> None:
        inputs = make_inputs(next(case for case in TINY_CASES if case.name == name), seed=5)
        run = jax.jit(functools.partial(api.grouped_matmul, kernels=self.kernels()))
        weight = in_a_stack(inputs, 1, layers=3)
        arguments = inputs.x_MK, weight, inputs.group_sizes_G
        out = interpreter.run_without_race(run, *arguments, group_offset=inputs.group_offset, layer=jnp.int32(1))
        np.testing.assert_array_equal(out, self.run(inputs, self.kernels()))

    @pytest.mark.parametrize("change", [{"group": 32}, {"bits": 4}], ids=str)
    def test_other_weights_are_refused(self, change: dict[str, int]) -> None:
        case = replace(next(case for case in TINY_CASES if case.name == "tiny, int8"), **change)
        inputs = make_inputs(case, seed=5)
        with pytest.raises(UnsupportedCase, match="one scale per column"):
            api.grouped_matmul(inputs.x_MK, inputs.weight, inputs.group_sizes_G, kernels=self.kernels())
