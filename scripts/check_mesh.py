"""Every mesh and family: the tests that ``make test`` has some of, and leaves out the rest of for time.

Tokens and logprobs of one device on each mesh of CPU devices, what devices exchange, transformers' logits of models
with experts, checkpoints that are restored onto other meshes, and a real server on every one of those meshes.
"""

import subprocess
import sys
import time

from scripts import evidence

TESTS = (
    "tests/serving/runner/test_mesh_steps.py",
    "tests/serving/runner/test_mesh_families.py",
    "tests/serving/runner/test_families.py",
    "tests/e2e/test_mesh.py",
    "tests/serving/runner/test_checkpoint.py",
    "tests/serving/runner/test_int8_steps.py",
    "tests/numerics/test_golden_on_meshes.py",
)


def main() -> int:
    args = evidence.arguments(__doc__).parse_args()
    started_s = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-m", "slow or not slow", "-n", "2", "--dist", "load", *TESTS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    return evidence.write(
        args.out,
        done.returncode == 0,
        seconds=round(time.monotonic() - started_s),
        result=lines[-1] if lines else done.stderr[-2000:],
        failures=[line for line in lines if line.startswith("FAILED")],
    )


if __name__ == "__main__":
    raise SystemExit(main())
