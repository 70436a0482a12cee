"""The system's C++ compiler: finding it, and running it with errors that say what to do."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NAMES = ("c++", "g++", "clang++")
LIMIT_S = 300.0
SHOWN_LINES = 12


class BuildError(RuntimeError):
    """The library cannot be built or loaded; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """path: of the program. version: the first line that it prints about itself, and what it compiles for."""

    path: str
    version: str

    def run(self, arguments: Sequence[str], what: str) -> str:
        """Run it; what: names the work in errors. Returns its warnings. Raises BuildError."""
        return _run([self.path, *arguments], what)


def find_compiler(search_path: str | None = None) -> Compiler:
    """The first of NAMES in search_path, by default the process' own PATH. Raises BuildError."""
    path = next((found for name in NAMES if (found := shutil.which(name, path=search_path))), None)
    if path is None:
        raise BuildError(
            f"no C++ compiler: none of {', '.join(NAMES)} is in PATH. The CPU kernels are compiled on first use: "
            f"install g++ 9 or clang++ 10 or newer ({_how_to_install()}), or choose XLA alone"
        )
    version = _run([path, "--version"], "--version").partition("\n")[0]
    target = _run([path, "-dumpmachine"], "-dumpmachine").strip()
    return Compiler(path=path, version=f"{version}, {target}")


def _how_to_install() -> str:
    if sys.platform == "darwin":
        return "xcode-select --install"
    if Path("/etc/debian_version").exists():
        return "apt-get install g++"
    return "the package g++ or gcc-c++ of your system"


def _run(command: Sequence[str], what: str) -> str:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise BuildError(
            f"{command[0]} has worked on {what} for {LIMIT_S:.0f} s and was ended; is the machine out of memory?"
        ) from None
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be started ({error.strerror}): reinstall the compiler") from None
    if done.returncode != 0:
        reasons = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
        shown = "\n".join(line[:300] for line in reasons[:SHOWN_LINES]) or "(it said nothing)"
        raise BuildError(
            f"{command[0]} failed on {what} with exit code {done.returncode}; g++ 9 or clang++ 10 or newer is needed, "
            f"with its standard library. It said:\n{shown}"
        )
    return done.stdout + done.stderr if what.startswith("-") else done.stderr
