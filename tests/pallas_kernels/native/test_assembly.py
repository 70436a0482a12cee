"""The check of spills finds planted ones, and none in the pure read's loop."""

from pathlib import Path

import jax
import pytest

from headrace.pallas_kernels.native import build, instruction_sets
from headrace.pallas_kernels.native.compiler import BuildError, find_compiler
from tests.pallas_kernels.native.assembly import Instruction, functions, loops, spills

HERE = Path(__file__).resolve().parent


def compiled(source: Path, flags: tuple[str, ...], folder: Path) -> Path:
    try:
        compiler = find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    made = folder / "made.o"
    include = ("-I", str(build.ROOT), "-isystem", jax.ffi.include_dir())
    compiler.run((*build.FLAGS, *flags, *include, "-c", str(source), "-o", str(made)), source.name)
    return made


@pytest.mark.skipif(instruction_sets.architecture() != "x86_64", reason="the planted loop is written for AVX2")
def test_planted_spills_are_counted(tmp_path: Path) -> None:
    made = compiled(HERE / "spilling.cc", instruction_sets.FLAGS["x86_64"]["avx2"], tmp_path)
    found = spills(made, r"^Sums")
    assert found["SumsInRegisters(float const*, float*, long)"] == 0
    assert found["SumsOnTheStack(float const*, float*, long)"] >= 8
    with pytest.raises(AssertionError, match="has no function"):
        spills(made, "Renamed")


@pytest.mark.parametrize("isa", instruction_sets.of_this_machine())
def test_the_pure_read_loads_and_spills_nothing(isa: str, tmp_path: Path) -> None:
    job = next(job for job in build.jobs([isa]) if job.source.name == "stream.isa.cc")
    made = compiled(job.source, job.flags, tmp_path)
    (code,) = functions(made, r"ExclusiveOr").values()
    assert loops(code)
    assert spills(made, r"ExclusiveOr").popitem()[1] == 0


@pytest.mark.parametrize(
    ("name", "operands", "counts"),
    [
        ("vmovaps", "%ymm3,0x40(%rsp)", True),
        ("vmovdqu64", "%zmm17,-0x40(%rbp)", True),
        ("movaps", "%xmm1,(%rsp)", True),
        ("vmovaps", "0x40(%rsp),%ymm3", False),
        ("vmovups", "%ymm3,0x40(%rdi)", False),
        ("vmovss", "%xmm0,0x8(%rsp)", False),
        ("mov", "%rax,0x8(%rsp)", False),
        ("vfmadd231ps", "0x20(%rsp),%ymm1,%ymm2", False),
        ("str", "q8, [sp, #32]", True),
        ("stp", "q8, q9, [sp, #64]", True),
        ("ldr", "q8, [sp, #32]", False),
        ("str", "q8, [x0, #32]", False),
        ("str", "x8, [sp, #32]", False),
    ],
)
def test_what_a_spill_is(name: str, operands: str, counts: bool) -> None:
    assert Instruction(0, name, operands).stores_vector_on_stack is counts
