"""What ``headrace plan`` refuses before a compiler is asked."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("llama-3.1-8b",), "--topology"),
        (
            ("llama-3.1-9b", "--topology", "v6e:2x2"),
            "neither a file or directory nor a published name; known: llama-3.1-8b",
        ),
        (("llama-3.1-8b", "--topology", "v6e:2x2", "--mesh", "tensors=2"), "axis 'tensors' is not known"),
        (("llama-3.1-8b", "--topology", "v6e:2x2", "--workload", "1024"), "--workload '1024' is not IN:OUT"),
        (("llama-3.1-8b", "--topology", "v6e:2x2", "--workload", "0:5"), "must be at least 1"),
        (("llama-3.1-8b", "--topology", "v6e:2x2", "--plot", "x.gif"), "its name must end in .svg, .png, .pdf"),
    ],
)
def test_a_wish_that_cannot_be_is_named(arguments: tuple[str, ...], says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "plan", *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and done.stdout == ""
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
