"""The products' kernels under sanitizers."""

import pytest

from headrace.pallas_kernels.native import instruction_sets
from tests.pallas_kernels.native.sanitized import ADDRESS, THREAD, run_driver


@pytest.mark.parametrize("sanitizer", [THREAD, ADDRESS])
def test_products_of_all_forms(sanitizer: str) -> None:
    sources = ["native/team.cc", "native/cpu_features.cc"]
    kernels = ["exact", "prologue", "table", "int8_kernels", "int16_kernels", "integer_records", "integer_plain"]
    sources += [f"quant_matmul/cpu/{name}.isa.cc" for name in kernels]
    sources += [f"quant_matmul/cpu/{name}.cc" for name in ("products", "columns")]
    done = run_driver("quant_matmul_driver.cc", sanitizer, sources=sources)
    assert done.returncode == 0, done.stderr[-3000:]
    for isa in instruction_sets.of_this_machine():
        assert f"{isa}: " in done.stdout
