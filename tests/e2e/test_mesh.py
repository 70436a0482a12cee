"""A real server whose model is cut over three devices of a CPU."""

import subprocess
import sys
from pathlib import Path

import openai
import pytest

from tests.live import start_server

ONE_STREAM = ("--max-streams", "1", "--context", "256", "--chunk-tokens", "64")
"""Two programs, of thirty layers each."""
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def test_a_mesh_answers_as_one_device_does(tmp_path: Path) -> None:
    server = start_server(tmp_path / "log", "smollm2-135m", *ONE_STREAM, "--device", "cpu", "--mesh", "tensor=3")
    try:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        chunks = client.chat.completions.create(
            model="smollm2-135m",
            messages=MESSAGES,  # type: ignore[arg-type]
            temperature=0,
            stream=True,
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    finally:
        code = server.stop()
    assert (text, code) == ("The capital of France is Paris.", 0)
    assert "mesh tensor=3" in server.log.read_text()


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("tensor=2", "--mesh tensor=2: layers.0.q_DX of shape [576, 576]: its axis heads (9 heads) does not divide"),
        ("tensors=2", "--mesh: mesh 'tensors=2': axis 'tensors' is not known"),
        ("data=2", "--mesh data=2: axis data is not served yet"),
    ],
)
def test_a_mesh_that_cannot_be_ends_the_start_by_name(mesh: str, words: str) -> None:
    command = [sys.executable, "-m", "headrace", "serve", "smollm2-135m", "--port", "0", "--mesh", mesh]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and words in " ".join(done.stderr.split()), done.stderr
