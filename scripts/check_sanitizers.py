"""CPU kernels under sanitizers, and their loops: what is too long for the suite.

Drivers in C++ run the products, the attention, the draw and the thread team under gcc's thread, address and
undefined-behaviour sanitizers, over odd sizes and random steps; planted mistakes have to be found. Then machine code
of the integer products: sums stay in registers, and every instruction set gives the same bits.
"""

import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

from scripts import evidence

FOLDER = "tests/pallas_kernels/native"
COMMAND = (sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "--heavy-kernels", FOLDER)


def outcomes(report: Path) -> list[dict[str, object]]:
    """Name, seconds and outcome of each test, from pytest's report in JUnit's format."""
    found: list[dict[str, object]] = []
    for case in ET.parse(report).iter("testcase"):
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        reason = next(
            (re.sub(r"\s+", " ", child.get("message", ""))[:200] for child in case if child.tag in kinds), None
        )
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        found.append(
            {
                "test": name,
                "seconds": round(float(case.get("time", "0")), 1),
                "outcome": kinds[0] if kinds else "passed",
                **({} if reason is None else {"reason": reason}),
            }
        )
    return found


def main() -> int:
    args = evidence.arguments(__doc__).parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        code = subprocess.run([*COMMAND, f"--junitxml={report}"], check=False).returncode
        tests = outcomes(report) if report.exists() else []
    # A skip (no sanitizer here) shows nothing, so it is no pass.
    passed = code == 0 and bool(tests) and all(test["outcome"] == "passed" for test in tests)
    return evidence.write(args.out, passed, tests=tests, seconds=round(time.monotonic() - began, 1))


if __name__ == "__main__":
    sys.exit(main())
