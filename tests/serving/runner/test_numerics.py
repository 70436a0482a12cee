"""What fixes the bits of a result, as the engine reports it."""

import jax
import pytest

from headrace.serving.runner.numerics import isa_class, num_threads, numerics_of


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("processor: 0\nflags\t\t: fpu sse4_2 avx avx2 fma\nflags : none\n", "avx2"),
        ("flags: avx avx2 fma avx512f avx512bw avx512dq avx512vl avx512_bf16 amx_bf16", "avx512+amx_bf16+avx512_bf16"),
        ("flags: avx avx2 fma avx512f avx_vnni", "avx2+avx_vnni"),
        ("flags: sse2", "base"),
        ("Features\t: fp asimd sve bf16 i8mm", "sve+bf16+i8mm"),
        ("Features\t: fp asimd", "neon"),
        ("", "base"),
    ],
)
def test_the_class_of_an_instruction_set(cpuinfo: str, expected: str) -> None:
    assert isa_class(cpuinfo) == expected


def test_a_cpu_has_an_instruction_set_and_threads() -> None:
    found = numerics_of(jax.local_devices(backend="cpu")[0])
    assert found["jax"] == jax.__version__ and found["device"] == "cpu:cpu"
    assert int(found["threads"]) == num_threads() >= 1 and found["isa"]


def test_an_accelerator_has_a_runtime_instead() -> None:
    class Client:
        platform_version = "PJRT C API\nTFRT TPU v6 lite\nBuilt on Jan 1"

    class Device:
        platform, device_kind, client = "tpu", "TPU v6 lite", Client()

    found = numerics_of(Device())  # type: ignore[arg-type]
    assert (found["device"], found["runtime"]) == ("tpu:TPU v6 lite", "PJRT C API TFRT TPU v6 lite Built on Jan 1")
    assert "threads" not in found and "isa" not in found
