"""What the check scripts share: the machine and versions that a figure belongs to, and the JSON file it goes into."""

import argparse
import json
import os
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="evidence file to write")
    return parser


def machine() -> dict[str, object]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime()),
        "commit": commit.stdout.strip(),
        "cores": os.cpu_count(),
        "cpu": _cpu_name(),
        "python": platform.python_version(),
        "jax": version("jax"),
    }


def write(path: Path, passed: bool, **sections: object) -> int:
    """Write the file, print it, and return the exit code."""
    print(save(path, passed, **sections))
    return 0 if passed else 1


def save(path: Path, passed: bool, **sections: object) -> str:
    """Write the file, and return its text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"passed": passed, "machine": machine(), **sections}, indent=2, ensure_ascii=False)
    path.write_text(text + "\n")
    return text


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
