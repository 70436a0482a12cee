"""The command line as a user meets it: real processes, exit codes, no traceback."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from headrace.serving.edge.keys import KeyRing


def headrace(*arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)


def test_version() -> None:
    done = headrace("--version")
    assert (done.returncode, done.stdout) == (0, f"headrace, version {version('headrace')}\n")


def test_help_groups_options_and_shows_defaults() -> None:
    text = headrace("serve", "--help").stdout
    headings = ["Model:", "Network:", "Access:", "Memory and steps:", "Running:"]
    positions = [text.index(f"\n{heading}\n") for heading in headings]
    assert positions == sorted(positions)
    for option, default in (("--port", "8000"), ("--max-streams", "16"), ("--chunk-tokens", "256")):
        described = " ".join(text[text.index(option) :].split())
        assert f"[default: {default}" in described.split("--", 2)[1] or f"[default: {default}" in described[:200]


@pytest.mark.parametrize(
    ("arguments", "exit_code", "says"),
    [
        (("serve", "no-such-model"), 1, "neither a file nor a known name"),
        (("serve", "--kv-memory", "3zb"), 2, "write it like 2GiB"),
        (("serve", "--port", "70000"), 2, "70000"),
        (("serve", "--tls-cert", "no-such-file"), 2, "no-such-file"),
        (("serve", "--hosts", "2", "--rank", "1"), 2, "--hosts 2 needs --coordinator"),
        (("pull", "smollm2-135"), 1, "did you mean 'smollm2-135m'"),
        (("generat",), 2, "No such command"),
    ],
)
def test_mistakes_are_answered_in_a_sentence(arguments: tuple[str, ...], exit_code: int, says: str) -> None:
    done = headrace(*arguments)
    assert done.returncode == exit_code
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_pull_prints_the_path_alone(smollm2_path: Path) -> None:
    done = headrace("pull")
    assert (done.returncode, done.stdout) == (0, f"{smollm2_path}\n")


def test_key_goes_out_once_and_its_digest_into_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    keys = []
    for name in ("ann", "bob"):
        done = headrace("key", name, "--file", str(path))
        assert done.returncode == 0
        keys.append(done.stdout.strip())
    ring = KeyRing(path)
    assert ring.names == ("ann", "bob")
    for name, key in zip(("ann", "bob"), keys, strict=True):
        identity = ring.identify(key)
        assert identity is not None and identity.tenant == name
        assert key not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_name_that_no_key_line_can_have_writes_nothing(tmp_path: Path) -> None:
    done = headrace("key", "two words", "--file", str(tmp_path / "keys"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "1 to 64 characters" in done.stderr
    assert not (tmp_path / "keys").exists()
