"""``headrace generate`` on the real model, as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.live import SMALL

QUESTION = "What is the capital of France?"
ANSWER_IDS = [504, 3575, 282, 4649, 314, 7042, 30, 2]


def generate(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace", "generate", *SMALL, *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=280)


@pytest.mark.usefixtures("smollm2_path")
def test_one_json_object_and_nothing_else() -> None:
    done = generate("--chat", QUESTION, "--temperature", "0", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert answer["token_ids"] == ANSWER_IDS
    assert answer["text"] == "The capital of France is Paris."
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", 2)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(answer["prompt_token_ids"]), len(ANSWER_IDS))
    assert answer["metrics"]["first_token_ms"] > 0


def test_text_goes_to_standard_output_alone(smollm2_path: Path) -> None:
    done = generate("-", "--model", str(smollm2_path), "--chat", "--temperature", "0", stdin=QUESTION)
    assert (done.returncode, done.stdout) == (0, "The capital of France is Paris.\n")
    assert "8 new tokens, ended by stop" in " ".join(done.stderr.split())


@pytest.mark.usefixtures("smollm2_path")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--max-tokens", "100000"), "512"),
        (("--stop", ""), "--stop"),
        (("--system", "Be brief."), "--chat"),
        (("--model", "/no/such/model.gguf"), "neither a file nor a known name"),
        (("--attention", "tpu"), "--attention tpu needs a TPU, and the device is cpu"),
        (("--device", "gpu"), "--device gpu: JAX found only cpu"),
        (("--memory-fraction", "0.5", "--pages", "9"), "pages and memory_fraction both give the size"),
    ],
)
def test_what_cannot_be_had_is_said_in_a_sentence(arguments: tuple[str, ...], says: str) -> None:
    done = generate("Hello", *arguments)
    assert done.returncode in (1, 2)
    assert (done.stdout, "Traceback" in done.stderr) == ("", False)
    assert says in done.stderr.splitlines()[-1]
