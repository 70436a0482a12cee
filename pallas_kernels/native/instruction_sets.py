"""Instruction sets that CPU kernels are compiled for, with the compiler's flags, and those that this machine has."""

import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

FLAGS: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "x86_64": MappingProxyType(
            {
                "avx2": ("-mavx2", "-mfma", "-mf16c"),
                "avx512": (
                    "-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni",
                ),
            }
        ),
        "aarch64": MappingProxyType({"neon": ("-march=armv8.2-a+dotprod+fp16",)}),
    }
)  # fmt: skip
"""Architecture -> instruction set -> flags."""

_NEEDS = MappingProxyType(
    {
        "avx2": frozenset({"avx2", "fma", "f16c"}),
        "avx512": frozenset(
            {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
        ),
        "neon": frozenset({"asimddp", "asimdhp"}),
    }
)  # fmt: skip
"""Instruction set -> what Linux calls its parts in /proc/cpuinfo."""

CPUINFO = Path("/proc/cpuinfo")


def architecture() -> str:
    """x86_64 or aarch64 where there are kernels for this machine, else what the system calls it."""
    name = platform.machine()
    return {"arm64": "aarch64", "AMD64": "x86_64"}.get(name, name)


def of_architecture(name: str) -> tuple[str, ...]:
    """All instruction sets that kernels of an architecture are compiled for; none for an unknown one."""
    return tuple(FLAGS.get(name, {}))


def of_this_machine(cpuinfo: Path = CPUINFO) -> tuple[str, ...]:
    """Those that this CPU runs, by Linux's list. Where there is no such list: all of the architecture; the library
    itself asks the CPU again when it is loaded."""
    known = of_architecture(architecture())
    if sys.platform != "linux":
        return known
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return known
    listed = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    features = set(listed.partition(":")[2].split())
    return tuple(isa for isa in known if features >= _NEEDS[isa])
