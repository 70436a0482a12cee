"""Compiles the CPU kernels with the system's compiler into a cache.

Sources named ``*.isa.cc`` are compiled once for each instruction set, with HEADRACE_ISA defined as its name (which is
the namespace of what they define); other ``*.cc`` once, for the base architecture.
"""

import hashlib
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("native", "quant_matmul/cpu", "paged_attention/cpu")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-Wall", "-Wextra")
ISAS = {
    "x86_64": {
        "avx2": ("-mavx2", "-mfma", "-mf16c"),
        "avx512": (
            "-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni",
        ),
    },
    "aarch64": {"neon": ("-march=armv8.2-a+dotprod+fp16",)},
}  # fmt: skip


class BuildError(RuntimeError):
    """The library cannot be built; the message says why and what to do."""


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.cc"))


def built(cache: Path | None = None) -> Path:
    """Path of the library, compiled where the cache has none of these sources."""
    cache = cache or Path.home() / ".cache" / "headrace" / "native"
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError("no C++ compiler")
    digest = hashlib.sha256()
    for path in sorted(p for folder in FOLDERS for p in (ROOT / folder).glob("*.[ch]*")):
        digest.update(path.name.encode() + path.read_bytes())
    target = cache / f"headrace_kernels-{digest.hexdigest()[:16]}.so"
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    include = ("-I", str(ROOT), "-isystem", jax.ffi.include_dir())
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        jobs = []
        for source in sources():
            name = source.relative_to(ROOT).as_posix().replace("/", "_")
            each = ISAS[platform.machine()] if source.name.endswith(".isa.cc") else {"": ()}
            for isa, flags in each.items():
                defines = (f"-DHEADRACE_ISA={isa}", f"-DHEADRACE_ISA_{isa.upper()}=1") if isa else ()
                out = str(Path(folder) / f"{name}.{isa}.o")
                jobs.append((out, [compiler, *FLAGS, *flags, *defines, *include, "-c", str(source), "-o", out]))
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda job: subprocess.run(job[1], check=True), jobs))
        made = Path(folder) / "out.so"
        subprocess.run([compiler, "-shared", "-o", str(made), *(out for out, _ in jobs), "-pthread"], check=True)
        made.rename(target)
    return target
