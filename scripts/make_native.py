"""A wheel of this checkout with the CPU kernels in it, compiled for every instruction set of this architecture.

It is tagged for this platform and for any Python 3. Who installs it needs no compiler, as long as the installed jaxlib
has the FFI headers that it was compiled with; with others the kernels are compiled on first use as ever.
"""

import argparse
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from headrace.pallas_kernels.native.build import build_into

ROOT = Path(__file__).resolve().parent.parent
PARTS = (
    "model", "pallas_kernels", "serving", "sharding", "pyproject.toml", "README.md", "LICENSE",
)  # fmt: skip


def make(out: Path) -> Path:
    """Build in a copy, so that no checkout has a compiled library in it. Returns the wheel."""
    with tempfile.TemporaryDirectory() as work:
        tree, made = Path(work) / "tree", Path(work) / "made"
        tree.mkdir()
        for part in PARTS:
            if (ROOT / part).is_dir():
                shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__", "prebuilt"))
            else:
                shutil.copy(ROOT / part, tree)
        build_into(
            tree / "pallas_kernels" / "native" / "prebuilt",
            progress=lambda done, total, name: print(f"[{done}/{total}] {name}", file=sys.stderr),
        )
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(made), str(tree)]
        command.append(f"--config-settings=--build-option=--plat-name={platform}")
        subprocess.run(command, check=True, stdout=sys.stderr)
        (wheel,) = made.glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, out))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("dist"), help="directory of the wheel")
    print(make(parser.parse_args().out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
