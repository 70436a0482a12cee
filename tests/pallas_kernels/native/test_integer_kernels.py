"""Integer kernels of quant_matmul keep their sums in registers, use the wide products, and agree bit for bit."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.pallas_kernels.native import build, instruction_sets
from headrace.pallas_kernels.native.compiler import BuildError, find_compiler
from headrace.pallas_kernels.quant_matmul import cpu
from headrace.pallas_kernels.quant_matmul.cpu.tiles import tiled
from headrace.pallas_kernels.types import Activations, Implementation, Kernels
from tests.pallas_kernels.native.assembly import functions, spills
from tests.pallas_kernels.tiled_weights import FORMS, ISAS, Form, on_device, random_weight, running

SOURCES = ("int8_kernels.isa.cc", "int16_kernels.isa.cc")
NUM_FORMS = 8
"""Kernels of one function: 4 or 8 bits, groups of 16 or 32, with offsets or without."""
MOST_SPILLS = {"avx2": 8, "avx512": 0, "neon": 8}
"""In one loop. AVX2 has 16 registers: 8-bit weights take 6 of about 160 instructions there."""


def compiled(source: str, isa: str, folder: Path) -> Path:
    try:
        compiler = find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    job = next(job for job in build.jobs([isa]) if job.source.name == source)
    made = folder / "made.o"
    include = ("-I", str(build.ROOT), "-isystem", jax.ffi.include_dir())
    compiler.run((*build.FLAGS, *job.flags, *include, "-c", str(job.source), "-o", str(made)), source)
    return made


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("isa", instruction_sets.of_architecture(instruction_sets.architecture()))
def test_sums_stay_in_registers(isa: str, source: str, tmp_path: Path) -> None:
    found = spills(compiled(source, isa, tmp_path), r"(Many|Few)Rows<")
    assert len(found) >= 3 * NUM_FORMS
    assert {name: number for name, number in found.items() if number > MOST_SPILLS[isa]} == {}


@pytest.mark.skipif(instruction_sets.architecture() != "x86_64", reason="AVX-512 VNNI")
@pytest.mark.parametrize(("source", "per_row"), [("int8_kernels.isa.cc", 1), ("int16_kernels.isa.cc", 2)])
def test_one_wide_product_for_four_values(source: str, per_row: int, tmp_path: Path) -> None:
    """One row and one tile of 32 values: 8 vpdpbusd in int8 and twice as many in int16, on whole registers."""
    found = functions(compiled(source, "avx512", tmp_path), r"FewRows<\d, 32, \w+, \w+, 1>")
    counts = {
        sum(one.name == "vpdpbusd" and one.operands.count("%zmm") >= 2 for one in code) for code in found.values()
    }
    assert len(found) == NUM_FORMS // 2
    assert counts == {8 * per_row}


@pytest.mark.skipif(len(ISAS) < 2, reason="one instruction set on this machine")
@pytest.mark.parametrize("mode", [Activations.INT16, Activations.INT8])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_instruction_sets_give_the_same_bits(form: Form, mode: Activations) -> None:
    """Rows that are tiny, large and zero too: 1, 2 and many take different loops, and 80 columns an odd tile."""
    rng = np.random.default_rng(7)
    weight = on_device(tiled(random_weight(rng, form, 192, 80)))
    x = rng.standard_normal((67, 192), np.float32) * np.exp2(rng.uniform(-40, 40, (67, 1))).astype(np.float32)
    x[5], x[6, :32], x[7] = 0, 0, 1e-36
    kernels = Kernels(implementation=Implementation.CPU, activations=mode)
    for rows in (1, 2, 3, 67):
        outs = []
        for isa in ISAS:
            with running(isa):
                out = cpu.fused_matmul(jnp.asarray(x[:rows]), (weight,), None, False, None, None, kernels)
                outs.append(np.asarray(out))
        for out in outs[1:]:
            np.testing.assert_array_equal(out.view(np.uint32), outs[0].view(np.uint32))
