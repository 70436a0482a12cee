"""A tree of sources that compiles in a blink, in place of the kernels, and compilers that count or fail."""

import shutil
from pathlib import Path

import pytest

from headrace.pallas_kernels.native.compiler import NAMES

SOURCE = 'extern "C" __attribute__((visibility("default"))) int Answer() { return 42; }\n'


def make_root(folder: Path, source: str = SOURCE) -> Path:
    """A root whose native/ has one source of the base architecture and one of each instruction set."""
    native = folder / "root" / "native"
    native.mkdir(parents=True, exist_ok=True)
    (native / "answer.cc").write_text(source)
    (native / "answer.h").write_text("// nothing\n")
    (native / "each.isa.cc").write_text("namespace headrace::HEADRACE_ISA { int Answer() { return 42; } }\n")
    return native.parent


def real_compiler() -> str:
    """Skips the test where there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no C++ compiler")
    return found


def make_compiler(folder: Path, body: str, name: str = "c++") -> str:
    """A folder, for a search path, whose compiler is a shell script of this body; {real} is the real one."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / name
    script.write_text("#!/bin/sh\n" + body.replace("{real}", real_compiler()) + "\n")
    script.chmod(0o755)
    return str(folder)


def counting_compiler(folder: Path, delay_s: float = 0.0) -> tuple[str, Path]:
    """The real one, which adds a line to a file for each object that it makes. Returns (search path, the file)."""
    count = folder / "count"
    body = f'case "$*" in *" -c "*) echo once >> "{count}"; sleep {delay_s};; esac\nexec {{real}} "$@"'
    return make_compiler(folder / "bin", body), count
