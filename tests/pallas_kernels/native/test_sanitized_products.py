"""The products' kernels under sanitizers."""

import pytest

from headrace.pallas_kernels.native import instruction_sets
from tests.pallas_kernels.native.sanitized import ADDRESS, THREAD, run_driver

KERNELS = ("exact", "prologue", "table", "int8_kernels", "int16_kernels", "integer_records")
SOURCES = (
    "native/team.cc", "native/cpu_features.cc", "quant_matmul/cpu/products.cc", "quant_matmul/cpu/columns.cc",
    *(f"quant_matmul/cpu/{name}.isa.cc" for name in KERNELS),
)  # fmt: skip


@pytest.mark.parametrize("sanitizer", [THREAD, ADDRESS])
def test_products_of_all_forms(sanitizer: str) -> None:
    done = run_driver("quant_matmul_driver.cc", sanitizer, sources=SOURCES)
    assert done.returncode == 0, done.stderr[-3000:]
    for isa in instruction_sets.of_this_machine():
        assert f"{isa}: " in done.stdout


@pytest.mark.parametrize(("mistake", "finding"), [("value", "failed: a product"), ("overrun", "heap-buffer-overflow")])
def test_a_planted_mistake_is_found(mistake: str, finding: str) -> None:
    done = run_driver("quant_matmul_driver.cc", ADDRESS, sources=SOURCES, arguments=[mistake])
    assert done.returncode != 0
    assert finding in done.stderr
