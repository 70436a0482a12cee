"""Products on CPU against float64, for every form of weight, activation mode and instruction set of this machine."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.pallas_kernels import api
from headrace.pallas_kernels.quant_matmul import cpu
from headrace.pallas_kernels.quant_matmul.cases import dequantized
from headrace.pallas_kernels.quant_matmul.cpu.tiles import tiled
from headrace.pallas_kernels.types import (
    Activations,
    GroupQuant,
    Implementation,
    Kernels,
    Rms,
    TiledQuant,
    UnsupportedCase,
)
from tests.pallas_kernels.tiled_weights import FORMS, ISAS, Form, on_device, random_weight, running

BOUND = {Activations.EXACT: 1e-6, Activations.INT16: 1e-4, Activations.INT8: 1.5e-2}
"""Of ``distance``."""
ROWS = (*range(1, 41), 47, 48, 49, 127, 128, 129, 512)
EPS = 1e-5


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    with running(request.param):
        yield


def kernels(mode: Activations = Activations.EXACT) -> Kernels:
    return Kernels(implementation=Implementation.CPU, activations=mode)


def inputs(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Rows of different size."""
    return rng.standard_normal(shape, np.float32) * np.exp2(rng.uniform(-3, 3, (shape[0], 1))).astype(np.float32)


def distance(out: np.ndarray, x: np.ndarray, weight: GroupQuant) -> float:
    """Of x @ weight: root mean square of the error, relative to that of |row| * |column| / sqrt(K), which is what a
    product of random signs has; a result that happens to be near 0 does not count more."""
    x, w = x.astype(np.float64), dequantized(weight)
    size = np.outer(np.linalg.norm(x, axis=1), np.linalg.norm(w, axis=0)) / np.sqrt(len(w))
    error = (np.asarray(out, np.float64) - x @ w) / size
    return float(np.sqrt((error**2).mean()))


def fused(x, weights, *, norm=None, is_gated=False, residual=None, layer=None, mode=Activations.EXACT):
    return np.asarray(cpu.fused_matmul(jnp.asarray(x), weights, norm, is_gated, residual, layer, kernels(mode)))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("mode", Activations)
@pytest.mark.parametrize("form", FORMS, ids=str)
class TestAgainstFloat64:
    def test_any_shape(self, form: Form, mode: Activations) -> None:
        rng = np.random.default_rng(1)
        for rows, k, n in ((1, 32, 1), (2, 96, 15), (3, 576, 40), (7, 1120, 33), (13, 64, 100), (65, 320, 49)):
            weight = random_weight(rng, form, k, n)
            x = inputs(rng, rows, k)
            out = fused(x, (on_device(tiled(weight)),), mode=mode)
            assert distance(out, x, weight) < BOUND[mode], (rows, k, n)

    def test_a_row_is_the_same_among_any_number_of_rows(self, form: Form, mode: Activations) -> None:
        rng = np.random.default_rng(2)
        weight, x = on_device(tiled(random_weight(rng, form, 352, 72))), inputs(rng, max(ROWS), 352)
        everything = fused(x, (weight,), mode=mode)
        for rows in ROWS if form in FORMS[:2] else (1, 2, 3, 4, 5, 6, 7, 13, 49, 129):
            first = max(0, 300 - rows)
            part = fused(x[first : first + rows], (weight,), mode=mode)
            np.testing.assert_array_equal(part, everything[first : first + rows])

    def test_best_column_is_that_of_the_product(self, form: Form, mode: Activations) -> None:
        rng = np.random.default_rng(3)
        for rows, n in ((1, 5), (4, 257), (33, 1000), (140, 300)):
            weight, x = on_device(tiled(random_weight(rng, form, 96, n))), inputs(rng, rows, 96)
            norm = Rms(jnp.asarray(rng.uniform(0.5, 2, 96).astype(np.float32)), EPS)
            logits = fused(x, (weight,), norm=norm, mode=mode)
            column, value, is_finite = cpu.best_column(jnp.asarray(x), weight, norm, kernels(mode))
            np.testing.assert_array_equal(column, logits.argmax(axis=1))
            np.testing.assert_array_equal(value, logits.max(axis=1))
            assert np.all(is_finite)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("mode", Activations)
class TestFused:
    def test_norm_and_residual(self, mode: Activations) -> None:
        rng = np.random.default_rng(4)
        for rows, k in ((1, 576), (5, 100), (40, 72), (150, 96)):
            weight, x = random_weight(rng, Form(bits=8), k, 50), inputs(rng, rows, k)
            scale, residual = rng.uniform(0.5, 2, k).astype(np.float32), inputs(rng, rows, 50)
            wide = x.astype(np.float64)
            normal = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + EPS) * scale
            norm = Rms(jnp.asarray(scale), EPS)
            plain = fused(x, (on_device(tiled(weight)),), norm=norm, mode=mode)
            assert distance(plain, normal, weight) < BOUND[mode]
            out = fused(x, (on_device(tiled(weight)),), norm=norm, residual=residual, mode=mode)
            np.testing.assert_array_equal(out, plain + residual)

    def test_gate(self, mode: Activations) -> None:
        rng = np.random.default_rng(5)
        for rows, k in ((1, 1536), (3, 50), (40, 72)):
            weight, x = random_weight(rng, Form(bits=4, is_affine=True, group=k), k, 30), 4 * inputs(rng, rows, 2 * k)
            gate, value = np.split(x.astype(np.float64), 2, axis=1)
            gated = gate / (1 + np.exp(-gate)) * value
            out = fused(x, (on_device(tiled(weight)),), is_gated=True, mode=mode)
            assert distance(out, gated, weight) < BOUND[mode]

    def test_weights_side_by_side_are_as_alone(self, mode: Activations) -> None:
        rng = np.random.default_rng(6)
        weights = tuple(on_device(tiled(random_weight(rng, form, 192, 24 + i))) for i, form in enumerate(FORMS[:8]))
        for rows in (1, 9, 130):
            x = inputs(rng, rows, 192)
            alone = [fused(x, (weight,), mode=mode) for weight in weights]
            np.testing.assert_array_equal(fused(x, weights, mode=mode), np.concatenate(alone, axis=1))

    def test_a_layer_of_a_stack(self, mode: Activations) -> None:
        rng = np.random.default_rng(7)
        form = Form(bits=4, is_affine=True)
        layers = [random_weight(rng, form, 64, 40) for _ in range(3)]
        stack = on_device(tiled(jax.tree.map(lambda *leaves: np.stack(leaves), *layers)))
        scales, x = rng.uniform(0.5, 2, (3, 64)).astype(np.float32), inputs(rng, 4, 64)
        for i, weight in enumerate(layers):
            right = fused(x, (on_device(tiled(weight)),), norm=Rms(jnp.asarray(scales[i]), EPS), mode=mode)
            out = fused(x, (stack,), norm=Rms(jnp.asarray(scales), EPS), layer=jnp.int32(i), mode=mode)
            np.testing.assert_array_equal(out, right)

    def test_marked_padding_gives_0_and_changes_no_other_row(self, mode: Activations) -> None:
        rng = np.random.default_rng(9)
        weight = on_device(tiled(random_weight(rng, Form(bits=8), 96, 70)))
        norm = Rms(jnp.asarray(rng.uniform(0.5, 2, 96).astype(np.float32)), EPS)
        for rows in (1, 2, 5, 17, 64, 150):
            x, residual = inputs(rng, rows, 96), inputs(rng, rows, 70)
            for is_real in (np.arange(rows) < rows // 2, rng.random(rows) < 0.5, np.ones(rows, bool)):
                whole = api.fused_matmul(x, (weight,), norm=norm, residual_MN=residual, kernels=kernels(mode))
                spoiled = np.where(is_real[:, None], x, np.float32(np.nan))
                real_M = jnp.asarray(is_real)
                out = api.fused_matmul(
                    spoiled, (weight,), norm=norm, residual_MN=residual, real_M=real_M, kernels=kernels(mode)
                )
                np.testing.assert_array_equal(out, np.where(is_real[:, None], whole, np.float32(0)))
                best = api.best_column(x, weight, norm=norm, kernels=kernels(mode))
                found = api.best_column(spoiled, weight, norm=norm, real_M=real_M, kernels=kernels(mode))
                for mine, theirs, of_padding in zip(found, best, (0, 0, True), strict=True):
                    np.testing.assert_array_equal(mine, np.where(is_real, theirs, of_padding))

    def test_marks_of_another_number_of_rows_are_refused(self, mode: Activations) -> None:
        weight = on_device(tiled(random_weight(np.random.default_rng(9), Form(bits=8), 96, 70)))
        x, real_M = jnp.ones((3, 96)), jnp.ones(2, bool)
        with pytest.raises(UnsupportedCase, match="marks of shape .2,. for 3 rows"):
            api.fused_matmul(x, (weight,), real_M=real_M, kernels=kernels(mode))
        with pytest.raises(UnsupportedCase, match="marks of shape .2,. for 3 rows"):
            api.best_column(x, weight, real_M=real_M, kernels=kernels(mode))

    def test_values_that_are_not_finite_stay_in_their_row(self, mode: Activations) -> None:
        rng = np.random.default_rng(8)
        weight, x = on_device(tiled(random_weight(rng, Form(bits=8), 96, 200))), inputs(rng, 12, 96)
        clean = fused(x, (weight,), mode=mode)
        for bad in (np.nan, np.inf, -np.inf):
            spoiled = x.copy()
            spoiled[5, 40] = bad
            out = fused(spoiled, (weight,), mode=mode)
            others = np.arange(12) != 5
            np.testing.assert_array_equal(out[others], clean[others])
            assert not np.isfinite(out[5]).any()
            column, _, is_finite = cpu.best_column(jnp.asarray(spoiled), weight, None, kernels(mode))
            np.testing.assert_array_equal(is_finite, others)
            assert 0 <= int(column[5]) < 200


class TestBestColumn:
    def equal_columns(self, n: int, columns: list[int], value: int = 3) -> TiledQuant:
        values = np.full((32, n), -1, np.int8)
        values[:, columns] = value
        return on_device(tiled(GroupQuant(values, np.ones((1, n), np.float32)), bits=8))

    @pytest.mark.usefixtures("isa")
    def test_the_lowest_of_equals_wins(self) -> None:
        for n, equal in ((40, [7, 8]), (5000, [4999, 130, 4000]), (300, [299]), (17, [16])):
            column, value, _ = cpu.best_column(jnp.ones((20, 32)), self.equal_columns(n, equal), None, kernels())
            np.testing.assert_array_equal(column, np.full(20, min(equal)))
            np.testing.assert_array_equal(value, np.full(20, 96.0))

    @pytest.mark.usefixtures("isa")
    def test_padding_never_wins(self) -> None:
        weight = self.equal_columns(21, [18], value=-1)  # all are negative, columns of padding would give 0
        column, value, is_finite = cpu.best_column(jnp.ones((3, 32)), weight, None, kernels())
        np.testing.assert_array_equal(column, np.zeros(3))
        np.testing.assert_array_equal(value, np.full(3, -32.0))
        assert np.all(is_finite)

    def test_minus_infinity_everywhere_is_column_0(self) -> None:
        weight = self.equal_columns(600, [], value=0)
        x = np.full((2, 32), np.finfo(np.float32).max, np.float32)
        column, value, is_finite = api.best_column(jnp.asarray(x), weight, kernels=kernels())
        np.testing.assert_array_equal(column, [0, 0])
        assert np.all(value == -np.inf) and not np.any(is_finite)


class TestThreads:
    PROGRAM = """
import hashlib
import jax.numpy as jnp
import numpy as np
from headrace.pallas_kernels.quant_matmul import cpu
from headrace.pallas_kernels.quant_matmul.cpu.tiles import tiled
from headrace.pallas_kernels.types import Activations, Implementation, Kernels
from tests.pallas_kernels.tiled_weights import Form, on_device, random_weight
rng = np.random.default_rng(0)
weight = on_device(tiled(random_weight(rng, Form(bits=4, is_affine=True), 320, 1000)))
digest = hashlib.sha256()
for mode in Activations:
    for rows in (1, 5, 40, 200):
        x = jnp.asarray(rng.standard_normal((rows, 320), np.float32))
        kernels = Kernels(implementation=Implementation.CPU, activations=mode)
        digest.update(np.asarray(cpu.fused_matmul(x, (weight, weight), None, False, None, None, kernels)))
        for result in cpu.best_column(x, weight, None, kernels):
            digest.update(np.asarray(result))
print(digest.hexdigest())
"""

    def digest(self, threads: int) -> str:
        environment = os.environ | {"NPROC": str(threads)}  # the size of XLA's pool
        done = subprocess.run([sys.executable, "-c", self.PROGRAM], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def test_the_number_of_threads_changes_no_bit(self) -> None:
        assert self.digest(1) == self.digest(2) == self.digest(5)


class TestRefusals:
    weight = on_device(tiled(random_weight(np.random.default_rng(0), Form(bits=8), 64, 20)))

    def refused(self, *args, error=UnsupportedCase, **kwargs) -> str:
        with pytest.raises(error) as caught:
            fused(*args, **kwargs)
        return str(caught.value)

    def test_what_does_not_fit(self) -> None:
        x = np.ones((2, 64), np.float32)
        assert "(2, 63)" in self.refused(x[:, :63], (self.weight,))
        assert "bfloat16" in self.refused(jnp.asarray(x, jnp.bfloat16), (self.weight,))
        assert "0 weights" in self.refused(x, ())
        assert "9 weights" in self.refused(x, (self.weight,) * 9)
        assert "residual" in self.refused(x, (self.weight,), residual=np.ones((2, 19), np.float32))
        assert "a stack" in self.refused(x, (self.weight,), layer=0)
        norm = Rms(jnp.ones(64), EPS)
        assert "one or the other" in self.refused(
            np.ones((2, 128), np.float32), (self.weight,), norm=norm, is_gated=True
        )

    def test_a_norm_that_does_not_fit(self) -> None:
        x, stack = jnp.ones((2, 64)), replace(self.weight, blocks_NGU=self.weight.blocks_NGU[None])
        for scale, layer in ((jnp.ones(63), None), (jnp.ones(64, jnp.bfloat16), None), (jnp.ones(64), 0)):
            weight = self.weight if layer is None else stack
            assert f"a norm of {scale.dtype}" in self.refused(x, (weight,), norm=Rms(scale, EPS), layer=layer)
        with pytest.raises(UnsupportedCase, match="a norm of float32 .63"):
            cpu.best_column(x, self.weight, Rms(jnp.ones(63), EPS), kernels(Activations.EXACT))

    def test_columns_are_named_by_int32_of_one_axis(self) -> None:
        for index in (jnp.zeros(2, jnp.uint32), jnp.zeros((2, 1), jnp.int32)):
            with pytest.raises(UnsupportedCase, match=f"columns named by {index.dtype}"):
                cpu.columns(self.weight, index, kernels(Activations.EXACT))

    def test_the_library_checks_again(self) -> None:
        x = np.ones((2, 64), np.float32)
        for change, why in (
            ({"bits": 5}, "4 or 8 bits"),
            ({"num_columns": 33}, "33 columns"),
            ({"group": 16}, "blocks"),
        ):
            text = self.refused(x, (replace(self.weight, **change),), error=(ValueError, jax.errors.JaxRuntimeError))
            assert why in text

    def test_a_layer_outside_of_the_stack(self) -> None:
        stack = replace(self.weight, blocks_NGU=self.weight.blocks_NGU[None])
        for layer in (-1, 1):
            text = self.refused(
                np.ones((2, 64), np.float32),
                (stack,),
                layer=jnp.int32(layer),
                error=(ValueError, jax.errors.JaxRuntimeError),
            )
            assert f"layer {layer} of 1" in text

    def test_other_implementations_do_not_read_tiles(self) -> None:
        for implementation in (Implementation.REFERENCE, Implementation.TPU, Implementation.GPU):
            with pytest.raises(UnsupportedCase, match="tiles are for CPU"):
                api.quant_matmul(jnp.ones((2, 64)), self.weight, kernels=Kernels(implementation=implementation))
