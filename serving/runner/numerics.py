"""What fixes the bits of a result, as far as a device can be asked: libraries, drivers, instruction set, threads."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

from headrace.serving.runner.backend import platform_of

ISA_CLASSES = (
    ("avx512", ("avx512f", "avx512bw", "avx512dq", "avx512vl")),
    ("avx2", ("avx2", "fma")),
    ("avx", ("avx",)),
    ("sve2", ("sve2",)),
    ("sve", ("sve",)),
    ("neon", ("asimd",)),
)
"""(name, features that all must be there), the widest of an architecture first."""
ISA_EXTRAS = ("amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx_vnni", "bf16", "i8mm")
"""Features that change which products XLA and its libraries choose."""
ACCELERATOR_PACKAGES = ("libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")


def numerics_of(device: jax.Device) -> dict[str, str]:
    """By name; what does not exist for a device is left out."""
    kind = platform_of(device)
    found = {
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        "device": f"{kind}:{device.device_kind}",
        "matmul_precision": str(jax.config.jax_default_matmul_precision or "default"),
    }
    if kind == "cpu":
        return found | {"isa": isa(), "threads": str(num_threads())}
    for package in ACCELERATOR_PACKAGES:
        if (installed := _version(package)) is not None:
            found[package] = installed
    # libtpu's build, or the versions of CUDA and its driver.
    found["runtime"] = " ".join(str(device.client.platform_version).split())[:200]
    return found


def num_threads() -> int:
    """Of XLA's pool on a CPU: cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def isa() -> str:
    """Class of the instruction set, such as "x86_64 avx512+avx512_vnni"."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return platform.machine()
    return f"{platform.machine()} {isa_class(text)}"


def isa_class(cpuinfo: str) -> str:
    """From the text of /proc/cpuinfo: the widest class that the first core has, with what it has beyond it."""
    lines = [line for line in cpuinfo.splitlines() if line.startswith(("flags", "Features"))]
    features = set(lines[0].partition(":")[2].split()) if lines else set()
    found = next((name for name, needed in ISA_CLASSES if features.issuperset(needed)), "base")
    return "+".join([found, *(name for name in ISA_EXTRAS if name in features)])


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
