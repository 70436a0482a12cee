"""Autobahn's test suite, sections 1 to 7 and 10, against our listener: RFC 6455 as others read it.

Needs a Python 2.7 with pip (--python2): the suite has nothing newer. Its environment lies apart from the project's
(--folder). A case may fail, or pass without being strict, only if EXCEPTIONS names it and why.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from scripts import evidence
from tests.live import start_command

SUITE = "autobahntestsuite==25.10.1"
SUITE_SHA256 = "b083d6e15330fc16f3e5f0975cce2b15f21bfa0c6db09547316b1852c6dbd6df"
REQUIREMENTS = Path(__file__).parent / "autobahn" / "requirements.txt"
SECTIONS = ("1", "2", "3", "4", "5", "6", "7", "10")
NUM_CASES = 247
"""Of these sections, in that release."""
AGENT = "Headrace"
GOOD = frozenset({"OK", "INFORMATIONAL"})
RUN_LIMIT_S = 900.0

_SAME_SEGMENT = (
    "A good message and a broken frame come in one segment. The connection fails with 1002 before the echo of the "
    "message is sent; the RFC allows either."
)
_AT_THE_END = (
    "Text that is not UTF-8 is refused with 1007 when its last fragment is there, not at the first wrong byte; the RFC "
    "allows either."
)
EXCEPTIONS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("3.2", "3.3", "3.4", "4.1.3", "4.1.4", "4.1.5", "4.2.3", "4.2.4", "4.2.5", "5.15"),
        ("NON-STRICT", _SAME_SEGMENT),
    ),
    **dict.fromkeys(("6.4.1", "6.4.2", "6.4.3", "6.4.4"), ("NON-STRICT", _AT_THE_END)),
    "7.1.5": (
        "FAILED",
        "A close frame in the middle of a message is answered with 1002 and not with the code that it carries, by "
        "choice of the `websockets` library. The connection ends either way.",
    ),
}
"""Case -> (the worst verdict that it may get, reason). Whether an echo is out before a segment is read to its end is a
matter of time, so some of these pass now and then."""


def find_python2(given: str | None) -> str:
    """Raises: SystemExit, with what to do."""
    for name in (
        (given,)
        if given
        else ("python2.7", *map(str, Path("~/.pyenv/versions").expanduser().glob("2.7*/bin/python2.7")))
    ):
        path = shutil.which(name)
        if path and subprocess.run([path, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0:
            return path
    raise SystemExit("no Python 2.7 with pip was found; install one (pyenv has it) and give it as --python2 PATH")


def install(folder: Path, python2: str, say: Console) -> dict[str, str]:
    """The suite and what it needs, below folder; the environment to run it in."""
    libraries, source = folder / "libraries", folder / "source"
    done = folder / "complete"
    if not done.exists():
        say.print(f"installing {SUITE} into {folder}")
        shutil.rmtree(folder, ignore_errors=True)
        source.mkdir(parents=True)
        pip = ["-m", "pip", "--disable-pip-version-check", "--quiet"]
        subprocess.run(
            [python2, *pip, "install", "--no-deps", "--target", str(libraries), "-r", str(REQUIREMENTS)],
            check=True,
            stderr=subprocess.DEVNULL,
        )
        (libraries / "zope" / "__init__.py").touch()
        subprocess.run([sys.executable, *pip, "download", "--no-deps", "--dest", str(source), SUITE], check=True)
        [archive] = source.glob("*.tar.gz")
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != SUITE_SHA256:
            raise SystemExit(f"{archive.name} has SHA-256 {found}, not the pinned {SUITE_SHA256}")
        with tarfile.open(archive) as tar:
            tar.extractall(source, filter="data")
        done.touch()
    [suite] = source.glob("autobahntestsuite-*/")
    return {**os.environ, "PYTHONPATH": f"{libraries}:{suite}", "PYTHONDONTWRITEBYTECODE": "1"}


def run_suite(
    python2: str, environment: dict[str, str], url: str, sections: tuple[str, ...], work: Path
) -> Iterator[str]:
    """Each case's id as it begins."""
    spec = work / "spec.json"
    spec.write_text(
        json.dumps(
            {
                "outdir": str(work / "report"),
                "servers": [{"agent": AGENT, "url": url.replace("http", "ws", 1) + "/echo"}],
                "cases": [f"{section}.*" for section in sections],
                "exclude-cases": [],
                "exclude-agent-cases": {},
            }
        )
    )
    code = "from autobahntestsuite.wstest import run; run()"
    command = [python2, "-u", "-c", code, "-m", "fuzzingclient", "-s", str(spec)]
    with (
        (work / "log").open("wb") as log,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("Running test case ID"):
                yield line.split()[4]
    if process.returncode != 0:
        raise SystemExit(f"the suite ended with {process.returncode}:\n{(work / 'log').read_text()[-2000:]}")


def faults(results: dict[str, dict[str, object]]) -> list[str]:
    """Cases that are worse than good, or than their exception allows."""
    found = []
    for case, result in results.items():
        allowed = GOOD
        if case in EXCEPTIONS:
            verdict = EXCEPTIONS[case][0]
            allowed = allowed | {verdict} | ({"WRONG CODE"} if verdict == "FAILED" else set())
        bad = {str(result["behavior"]), str(result["behaviorClose"])} - allowed
        if bad:
            found.append(f"{case} is {', '.join(sorted(bad))}")
    return found


def order(case: str) -> list[int]:
    return [int(part) for part in case.split(".")]


def table(results: dict[str, dict[str, object]]) -> str:
    """The committed page."""
    counts = Counter(str(result["behavior"]) for result in results.values())
    lines = [
        "# Autobahn's test suite against Headrace's listener",
        "",
        f"`make autobahn` writes this page: {SUITE}, sections {', '.join(SECTIONS)}. The listener, its guards",
        "and its limits are those of `headrace serve`; behind them is an echo that only",
        "`scripts/autobahn/echo_server.py` has. NON-STRICT is a pass: the RFC allows what the server does.",
        "",
        f"{len(results)} cases: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()) + ".",
        "",
        "## Exceptions",
        "",
        "What a case may get at worst, and why:",
        "",
        *(
            f"* {', '.join(case for case, what in EXCEPTIONS.items() if what == reason)}: {reason[0]}. {reason[1]}"
            for reason in dict.fromkeys(EXCEPTIONS.values())
        ),
        "",
        "## All cases",
        "",
        "| case | verdict | closing handshake | close code of the server |",
        "|---|---|---|---|",
    ]
    for case in sorted(results, key=order):
        result = results[case]
        lines.append(
            f"| {case} | {result['behavior']} | {result['behaviorClose']} | {result['remoteCloseCode'] or ''} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = evidence.arguments(__doc__)
    parser.add_argument("--python2", help="interpreter of Python 2.7  [default: python2.7, or one of pyenv's]")
    parser.add_argument("--folder", type=Path, default=Path(".venv-autobahn"), help="where the suite is installed")
    parser.add_argument("--sections", nargs="+", default=SECTIONS)
    parser.add_argument("--table", type=Path, help="page with every case to write")
    args = parser.parse_args()
    return check(args, Console(stderr=True))


def check(args: argparse.Namespace, say: Console) -> int:
    python2 = find_python2(args.python2)
    environment = install(args.folder.absolute(), python2, say)
    sections = tuple(args.sections)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        server = start_command(work / "server", [sys.executable, "-m", "scripts.autobahn.echo_server"], 60.0)
        try:
            with Progress(console=say) as progress:
                bar = progress.add_task("Autobahn", total=NUM_CASES if sections == SECTIONS else None)
                for case in run_suite(python2, environment, server.url, sections, work):
                    progress.update(bar, advance=1, description=f"Autobahn {case}")
        finally:
            exit_code = server.stop()
        results = json.loads((work / "report" / "index.json").read_text())[AGENT]
    found = faults(results)
    is_whole = sections == SECTIONS
    if is_whole and len(results) != NUM_CASES:
        found.append(f"{len(results)} cases ran, not {NUM_CASES}")
    if args.table and is_whole:
        args.table.write_text(table(results))
    return evidence.write(
        args.out,
        not found and exit_code == 0,
        suite=SUITE,
        sections=sections,
        verdicts=dict(Counter(str(result["behavior"]) for result in results.values())),
        verdicts_of_closing=dict(Counter(str(result["behaviorClose"]) for result in results.values())),
        not_ok={case: result for case, result in sorted(results.items()) if result["behavior"] != "OK"},
        exceptions=EXCEPTIONS,
        faults=found,
        server_exit_code=exit_code,
    )


if __name__ == "__main__":
    raise SystemExit(main())
