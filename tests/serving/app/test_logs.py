"""Log lines as JSON: one object a line, cut where they are long, whatever is logged."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from headrace.serving.app.logs import MAX_LINE_BYTES, LinesToLog, LogFormat, console_for, set_up_logging


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What the process logs as JSON; the loggers are as before afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    stream = io.StringIO()
    set_up_logging(LogFormat.JSON, "edge", stream)
    yield stream
    root.handlers = handlers
    root.setLevel(level)


def entries(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_has_its_fields_and_may_not_hide_the_fixed_ones(lines: io.StringIO) -> None:
    logging.getLogger("headrace.x").warning("two\nlines %d", 7, extra={"fields": {"request_id": "r", "level": "none"}})
    (entry,) = entries(lines)
    assert str(entry.pop("time")).endswith("+00:00")
    assert entry == {
        "level": "warning", "logger": "headrace.x", "process": "edge", "message": "two\nlines 7", "request_id": "r",
    }  # fmt: skip


def test_tracebacks_and_long_messages_stay_one_bounded_line(lines: io.StringIO) -> None:
    try:
        raise ValueError("the end " + "é" * 9000 + " of it")
    except ValueError:
        logging.exception("x" * 9000)
    (entry,) = entries(lines)
    assert len(str(entry["message"]).encode()) < MAX_LINE_BYTES + 40 and "bytes cut" in str(entry["message"])
    assert str(entry["exception"]).endswith(" of it") and "bytes cut" in str(entry["exception"])


def test_what_is_printed_for_a_person_becomes_lines(lines: io.StringIO) -> None:
    console = console_for(LogFormat.JSON, None)  # type: ignore[arg-type]
    console.print("model  x\n\nport   y")
    assert [(e["logger"], e["message"]) for e in entries(lines)] == [
        ("headrace.start", "model  x"),
        ("headrace.start", "port   y"),
    ]


def test_half_lines_wait_for_their_end(lines: io.StringIO) -> None:
    stream = LinesToLog(logging.getLogger("a"))
    stream.write("one ")
    assert not lines.getvalue()
    stream.write("two\nthree")
    assert [e["message"] for e in entries(lines)] == ["one two"]


def test_text_stays_text() -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    stream = io.StringIO()
    try:
        set_up_logging(LogFormat.TEXT, "engine", stream)
        logging.getLogger("headrace.y").error("hello %s", "y" * 9000)
    finally:
        root.handlers = handlers
        root.setLevel(level)
    assert stream.getvalue().startswith("engine: ERROR: hello yyy")
    assert len(stream.getvalue()) < MAX_LINE_BYTES + 40
