"""The list of whole steps, and what of their weights may not be made again."""

import jax.numpy as jnp

from headrace.model.specs import WeightScheme
from headrace.serving.core.plan import ProgramKind
from tests.aot.hlo import Shape
from tests.aot.steps import WholeStep, build_step, whole_steps

INT8 = WholeStep(
    chip="h100",
    model="llama-3.1-8b",
    kind=ProgramKind.DECODE,
    kv_dtype="bfloat16",
    weights=WeightScheme.INT8,
)


def test_names_are_unique_and_int8_is_there_for_each_kind_of_chip() -> None:
    steps = list(whole_steps(("v5e", "v6e", "h100")))
    assert len({step.name for step in steps}) == len(steps)
    names = [step.name for step in steps if step.weights is WeightScheme.INT8]
    assert "v5e:4x4 tensor=16 llama-3.1-70b decode step, int8 weights, bfloat16 pages" in names
    for chip in ("v5e", "v6e", "h100"):
        assert f"{chip} llama-3.1-8b mixed step, int8 weights, bfloat16 pages" in names


def test_an_int8_weight_may_be_neither_copied_nor_dequantized() -> None:
    built = build_step(INT8)
    size = 4096 * 14_336
    for kind in ("s8", "bf16", "f32"):
        assert built.is_copy(Shape(type=kind, size=size, is_on_chip=False))
    embed = {x.dtype for x in built.weights if x.shape == (128_256, 4096)}
    assert embed == {jnp.dtype(jnp.bfloat16)}
    assert not built.is_copy(Shape(type="s8", size=size, is_on_chip=True))
    assert not built.is_copy(Shape(type="f32", size=16 * 14_336, is_on_chip=False))
