"""The README's programs, as printed, against a real server."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.live import LiveServer

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
PRINTED_ADDRESS = "127.0.0.1:8000"


def program(marker: str) -> str:
    """The one Python block that contains marker."""
    [block] = [code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if marker in code]
    return block


def run(code: str, server: LiveServer, *arguments: str) -> str:
    assert PRINTED_ADDRESS in code
    code = code.replace(PRINTED_ADDRESS, server.url.removeprefix("http://"))
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("arguments", [(), ("What is the capital of France?",)])
def test_the_websockets_client(live_server: LiveServer, arguments: tuple[str, ...]) -> None:
    code = program("websockets.sync.client")
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    assert run(code, live_server, *arguments) == "The capital of France is Paris.\n[8 tokens]\n"


def test_the_openai_client(live_server: LiveServer) -> None:
    assert run(program("from openai import OpenAI"), live_server).strip()
