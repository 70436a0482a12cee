"""What reads the CUDA compiler's output, on pieces of it. The compilations themselves are ``make aot-cuda``'s."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from headrace.pallas_kernels.chips import CHIPS
from headrace.pallas_kernels.types import Implementation
from headrace.sharding.topologies import target_description
from tests.aot import cuda, cuda_faults
from tests.aot.matrix import Built

GPUS = [chip for chip in CHIPS.values() if chip.implementation is Implementation.GPU]
POOL = jax.ShapeDtypeStruct((8192, 8, 32, 256), jnp.bfloat16)
BUILT = Built(function=lambda x: x, arguments=(POOL,), donated=(0,), donated_bytes=1 << 30, bound_bytes=1 << 29)
HLO = """HloModule jit_call

%fused_scatter (param_0.4: bf16[8192,8,32,256], param_1.9: bf16[64,8,256]) -> bf16[8192,8,32,256] {
  %param_0.4 = bf16[8192,8,32,256]{3,2,1,0} parameter(0)
  ROOT %scatter.1 = bf16[8192,8,32,256]{3,2,1,0} scatter(%param_0.4, %i.2, %u.3), to_apply=%region_0.1
}

ENTRY %main (pool.1: bf16[8192,8,32,256]) -> bf16[8192,8,32,256] {
  %pool.1 = bf16[8192,8,32,256]{3,2,1,0} parameter(0)
  %input_scatter_fusion = bf16[8192,8,32,256]{3,2,1,0} fusion(%pool.1, %new.1), kind=kInput, calls=%fused_scatter
  %pallas_call.5 = f32[64,8,16,128]{3,2,1,0} custom-call(%input_scatter_fusion), \
custom_call_target="__gpu$xla.gpu.triton", backend_config={grid_x = 64 : i32, ir = "ML\\EF", name = "paged_decode"}
  ROOT %out = bf16[8192,8,32,256]{3,2,1,0} bitcast(%input_scatter_fusion)
}
""".replace("\\\n", "")

FUSED_ADD = """
%fused_add (param_0.5: bf16[8192,8,32,256]) -> bf16[8192,8,32,256] {
  %param_0.5 = bf16[8192,8,32,256]{3,2,1,0} parameter(0)
  ROOT %add.1 = bf16[8192,8,32,256]{3,2,1,0} add(%param_0.5, %one.2)
}
"""


@pytest.mark.parametrize("chip", GPUS, ids=lambda chip: chip.name)
def test_descriptions_agree_with_the_table_of_chips(chip: object) -> None:
    text = target_description(chip.name)
    fields = dict(re.findall(r"^\s*(\w+): (.+)$", text, re.MULTILINE))
    assert fields["device_description_str"].strip('"') in chip.device_kinds
    assert int(fields["shared_memory_per_block_optin"]) == chip.on_chip_bytes
    assert int(fields["memory_bandwidth"]) == pytest.approx(chip.hbm_bytes_per_s, rel=0.001)
    assert int(fields["device_memory_size"]) == pytest.approx(chip.hbm_bytes, rel=0.08)


def test_the_report_of_ptxas_gives_registers_and_spills() -> None:
    report = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'paged_decode' for 'sm_90a'
ptxas info    : Function properties for paged_decode
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 96 registers, used 1 barriers
ptxas info    : Compiling entry function 'paged_prefill' for 'sm_90a'
ptxas info    : Function properties for paged_prefill
    712 bytes stack frame, 508 bytes spill stores, 724 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes smem
"""
    assert cuda.read_report(report) == [("paged_decode", 96, 0), ("paged_prefill", 255, 1232)]


def test_a_report_in_another_form_is_no_pass() -> None:
    with pytest.raises(AssertionError, match="another form"):
        cuda.read_report("ptxas info : Compiling entry function 'a' for 'sm_90a'\n registers: 12, spills: none")
    with pytest.raises(AssertionError, match="another form"):
        cuda.largest_temporary("buffers: 3")


def test_the_largest_temporary_is_that_of_one_array() -> None:
    assignment = """BufferAssignment:
allocation 0: size 1073741824, parameter 2, shape |bf16[8192,8,32,256]| at ShapeIndex {}:
 value: <120 pool @0> (size=1073741824,offset=0): bf16[8192,8,32,256]{3,2,1,0}
allocation 31: size 10616856, preallocated-temp:
 value: <285 pallas_call.9 @0> (size=2097152,offset=8388608): bf16[256,32,128]{2,1,0}
 value: <288 pallas_call.5{0} @0> (size=8388608,offset=0): f32[64,8,2,16,128]{4,3,2,1,0}

Total bytes used: 1084358680
"""
    assert cuda.largest_temporary(assignment) == 8388608
    assert cuda.largest_temporary(assignment.split("allocation 31")[0]) == 0


def test_kernels_are_found_by_the_names_that_they_were_given() -> None:
    assert cuda.our_names(HLO) == {"paged_decode"}


def test_a_write_in_place_is_no_copy() -> None:
    assert cuda.copies(HLO, BUILT) == []


@pytest.mark.parametrize(
    "made",
    [
        "  %copy.1 = bf16[8192,8,32,256]{3,2,1,0} copy(%pool.1)",
        "  %t.1 = bf16[8192,32,8,256]{3,2,1,0} transpose(%pool.1), dimensions={0,2,1,3}",
        "  %loop_add_fusion = bf16[8192,8,32,256]{3,2,1,0} fusion(%pool.1), kind=kLoop, calls=%fused_add",
        "  %convert.1 = f32[4096,8,32,256]{3,2,1,0} fusion(%pool.1), kind=kLoop, calls=%fused_add",
    ],
    ids=["copy", "transpose", "fusion", "half of it, as float32"],
)
def test_another_array_of_its_size_is_one(made: str) -> None:
    text = HLO.replace("  %pallas_call.5", f"{made}\n  %pallas_call.5")
    if "%fused_add" in made:
        text = text.replace("ENTRY", f"{FUSED_ADD}\nENTRY")
    assert len(cuda.copies(text, BUILT)) == 1


def test_launches_give_shared_memory() -> None:
    line = (
        "007: kCustomKernel [prev=006 (1) | next=008 (1)] paged_decode grid: [64, 8, 2] threads: [128, 1, 1]  "
        "shared_memory: 42496 bytes"
    )
    found = cuda._LAUNCH.search(line)
    assert found is not None
    assert (found["name"], int(found["bytes"])) == ("paged_decode", 42496)


def test_every_check_has_a_planted_fault_that_trips_it() -> None:
    tripped = {failing for _, failing, _ in cuda_faults.FAULTS.values()}
    # A refusal and a missed fault are findings, not checks; launches above the limit are XLA's to refuse, as the
    # overflow shows, and a pool that is not aliased has been copied.
    by_others = {cuda.Failing.UNSUPPORTED, cuda.Failing.MISSED, cuda.Failing.SHARED, cuda.Failing.ALIAS}
    assert tripped == set(cuda.Failing) - by_others


@pytest.mark.parametrize("name", cuda_faults.FAULTS)
def test_faults_are_built_of_the_matrix(name: str) -> None:
    make, _, _ = cuda_faults.FAULTS[name]
    built = make()
    assert built.bound_bytes > 0
    assert replace(built, donated=()).arguments
