"""Large arrays and kernels in HLO text as XLA:TPU writes it."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from tests.aot.hlo import kernel_names, layered_sums, made
from tests.aot.matrix import Built
from tests.aot.tpu import copies

TEXT = """\
HloModule jit_call, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

%fused_computation.2 (param_0: s8[16,8,64,256]) -> s8[16,8,64,256] {
  %param_0 = s8[16,8,64,256]{3,2,1,0:T(32,128)(4,1)} parameter(0)
  ROOT %add.1 = s8[16,8,64,256]{3,2,1,0:T(32,128)(4,1)} add(%param_0, %param_0)
}

%body (p: (s32[], s8[16,8,64,256])) -> (s32[], s8[16,8,64,256]) {
  %p = (s32[], s8[16,8,64,256]{3,2,1,0:T(32,128)(4,1)}) parameter(0)
  %gte = s8[16,8,64,256]{3,2,1,0:T(32,128)(4,1)} get-tuple-element(%p), index=1
  INSIDE
}

ENTRY %main (pool: s8[16,8,64,256], scale: f32[16,8,2,64]) -> s8[16,8,64,256] {
  %pool = s8[16,8,64,256]{3,2,1,0:T(32,128)(4,1)} parameter(0)
  %scale = f32[16,8,2,64]{3,2,1,0:T(2,128)} parameter(1)
  %write.1 = (s8[16,8,64,256]{3,2,1,0:T(32,128)(4,1)}, f32[16,8,2,64]{3,2,1,0:T(2,128)}) custom-call(%pool, %scale), \
custom_call_target="tpu_custom_call", output_to_operand_aliasing={{0}: (0, {})}
  %small = f32[4,2]{1,0:T(4,128)} copy(%other)
  ENTRY_LINE
  ROOT %out = s8[16,8,64,256]{3,2,1,0:T(32,128)(4,1)} get-tuple-element(%write.1), index=0
}
"""
POOL = (jax.ShapeDtypeStruct((16, 8, 64, 256), jnp.int8), jax.ShapeDtypeStruct((16, 8, 2, 64), jnp.float32))
BUILT = Built(function=print, arguments=(POOL,), donated=(0,), donated_bytes=1, bound_bytes=1 << 20)


def found(*, inside: str = "", entry: str = "") -> list[str]:
    return copies(TEXT.replace("INSIDE", inside).replace("ENTRY_LINE", entry), BUILT)


def test_a_kernel_in_place_makes_nothing() -> None:
    assert found() == []
    assert kernel_names(TEXT, "tpu_custom_call") == {"write.1"}
    assert [instruction.name for instruction in made(TEXT)] == ["small"]


def test_copies_of_a_pool_are_found_by_size_whatever_they_are_called() -> None:
    copy = "%copy.1 = s8[16,8,64,256]{3,2,1,0:T(32,128)(4,1)} copy(%gte)"
    start = (
        "%copy-start = (f32[16,8,2,64]{3,2,1,0:T(2,128)S(1)}, f32[16,8,2,64]{3,2,1,0}, u32[]{:S(2)}) copy-start(%scale)"
    )
    fusion = "%add = s8[16,8,64,256]{3,2,1,0} fusion(%pool), kind=kLoop, calls=%fused_computation.2"
    turned = "%turned = s8[8192,256]{1,0} transpose(%pool)"
    for text in (copy, start, fusion, turned):
        assert len(found(entry=text)) == 1, text
    assert len(found(inside=copy)) == 1


def test_an_array_that_reaches_the_bound_is_found_in_memory_but_not_on_the_chip() -> None:
    assert len(found(entry="%w = bf16[1024,512]{1,0:T(8,128)} fusion(%x), calls=%fused_computation.9")) == 1
    assert found(entry="%w = bf16[1024,512]{1,0:T(8,128)S(1)} fusion(%x), calls=%fused_computation.9") == []
    assert found(entry="%w = bf16[1023,512]{1,0:T(8,128)} fusion(%x), calls=%fused_computation.9") == []


def test_what_a_copy_is_started_from_is_not_made_by_it() -> None:
    """Weights brought onto the chip ahead of their use."""
    there, here = "bf16[1024,512]{1,0:T(8,128)S(1)}", "bf16[1024,512]{1,0:T(8,128)}"
    assert found(entry=f"%start = ({there}, {here}, u32[]{{:S(2)}}) copy-start(%w)") == []
    assert len(found(entry=f"%start = ({here}, {here}, u32[]{{:S(2)}}) copy-start(%w)")) == 1


def test_what_a_fusion_is_started_on_is_not_made_by_it() -> None:
    """XLA:GPU of JAX 0.12 copies slices of stacked weights so."""
    start = "%fusion-start.1 = ((bf16[30,1024,512]{2,1,0}, s32[]), bf16[1,SIZE,512]{2,1,0}, u32[]) fusion-start(%w, %i)"
    assert len(found(entry=start.replace("SIZE", "1024"))) == 1
    assert found(entry=start.replace("SIZE", "1023")) == []


def test_a_weight_is_copied_to_the_chip_alone() -> None:
    built = replace(BUILT, weights=(jax.ShapeDtypeStruct((512, 96), jnp.bfloat16),))
    for place, count in (("", 1), ("S(1)", 0)):
        line = f"%w.1 = bf16[1,512,96]{{2,1,0:T(8,128){place}}} fusion(%x), calls=%fused_computation.9"
        assert len(copies(TEXT.replace("ENTRY_LINE", line), built)) == count


def test_sums_in_the_loop_over_layers_count_as_often_as_it_runs() -> None:
    def reduce(name: str, shape: str, path: str, op: str = "all-reduce") -> str:
        return f'  %{name} = {shape} {op}(%x), to_apply=%add, metadata={{op_name="jit(step)/shard_map/{path}psum"}}\n'

    text = "ENTRY %main (x: f32[16,64]) -> f32[16,64] {\n" + "".join(
        (
            reduce("a", "f32[16,64]{1,0:T(8,128)S(1)}", ""),
            reduce("b", "f32[16,64]{1,0:T(8,128)S(1)}", "while/body/closed_call/jit(_layer)/"),
            reduce(
                "c", "(f32[16,64]{1,0}, f32[16,64]{1,0})", "while/body/closed_call/jit(_layer)/", "all-reduce-start"
            ),
            reduce("d", "f32[16]{0}", "while/body/"),
        )
    )
    assert layered_sums(text + "}\n", 16 * 64 * 4, layers=12, period=2) == 1 + 3 * 6
