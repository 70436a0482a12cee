"""PROTOCOL.md says what the code does, and its client works as printed."""

import asyncio
import re
import sys

import pytest

from headrace.serving.edge import messages
from headrace.serving.edge.errors import ErrorCode
from headrace.serving.edge.fields import FIELDS
from scripts.make_protocol import PARTS, TARGET, main, protocol_text
from tests.serving.edge.live_edge import running_edge


def test_the_page_is_current() -> None:
    assert main(["--check"]) == 0, "run: make protocol"


def test_a_page_that_is_not_current_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARTS, "limits", lambda: "another text")
    assert main(["--check"]) == 1


def test_everything_is_on_the_page() -> None:
    page = TARGET.read_text("utf-8")
    for kind in (*messages.CLIENT_MESSAGES, *messages.SERVER_MESSAGES):
        assert f"### `{kind.__struct_config__.tag}`\n" in page
    for name in (*(str(code) for code in ErrorCode), *(field.name for field in FIELDS)):
        assert f"| `{name}` |" in page
    for code in messages.CloseCode:
        assert f"| {int(code)} |" in page
    for kind in (*messages.CLIENT_MESSAGES, *messages.SERVER_MESSAGES, *messages.NESTED_OBJECTS):
        for field in kind.__struct_fields__:
            row = re.search(rf"^\| `{field}` \| [^|]+ \| [^|]+ \| (.+) \|$", page, re.MULTILINE)
            assert row is not None and row[1].strip(), f"{kind.__name__}.{field} has no meaning"


def test_a_mark_without_a_part_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(PARTS, "limits")
    with pytest.raises(ValueError, match="mark"):
        protocol_text()


async def test_the_first_client_works_as_printed() -> None:
    code = re.search(r"```python\n(.*?)```", TARGET.read_text("utf-8"), re.DOTALL)
    assert code is not None
    async with running_edge() as edge:
        program = code[1].replace("127.0.0.1:8000", f"127.0.0.1:{edge.port}")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        output, errors = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, errors.decode()
        assert b"'type': 'done'" in output
