"""Log lines of the server's processes, as text or as one JSON object a line."""

import io
import logging
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import TextIO

import msgspec
from rich.console import Console

MAX_LINE_BYTES = 4096
"""Of a message; what is longer is cut, and says so. A traceback keeps its end, which names the error."""

CONSOLE_WIDTH = 200


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


TEXT_FORMATS = {
    "edge": "%(asctime)s %(levelname)s %(name)s: %(message)s",
    "engine": "engine: %(levelname)s: %(message)s",
}
"""By process; the engine's lines come between those of the edge, which started it."""


class JsonLines(logging.Formatter):
    """time (ISO 8601, UTC, ms), level, logger, process, message, then what the line gave as ``extra={"fields": …}``,
    such as request_id, and exception where there is one."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "message": cut(record.getMessage()),
        }
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict):
            entry |= {name: value for name, value in fields.items() if name not in entry}
        if record.exc_info is not None:
            entry["exception"] = cut(self.formatException(record.exc_info), keep_end=True)
        return msgspec.json.encode(entry).decode()


class TextLines(logging.Formatter):
    """Messages cut as in JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and a traceback where there is one."""
        return cut(super().format(record), keep_end=record.exc_info is not None)


def cut(text: str, *, keep_end: bool = False) -> str:
    """At most MAX_LINE_BYTES of UTF-8 and a few words."""
    data = text.encode(errors="backslashreplace")
    if len(data) <= MAX_LINE_BYTES:
        return data.decode()
    left_out = len(data) - MAX_LINE_BYTES
    if keep_end:
        return f"[{left_out} bytes cut] " + data[-MAX_LINE_BYTES:].decode(errors="ignore")
    return data[:MAX_LINE_BYTES].decode(errors="ignore") + f" [{left_out} bytes cut]"


class LinesToLog(io.TextIOBase):
    """A text stream whose lines become log lines: what is printed for a person, where a program reads along."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._begun = ""

    def write(self, text: str) -> int:
        """Blank lines are left out."""
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            if line.strip():
                self._logger.info("%s", line.rstrip())
        return len(text)


def console_for(form: LogFormat, console: Console) -> Console:
    """The console itself, or one that writes into the log."""
    if form is LogFormat.TEXT:
        return console
    return Console(file=LinesToLog(logging.getLogger("headrace.start")), width=CONSOLE_WIDTH, force_terminal=False)


def set_up_logging(form: LogFormat, process: str, stream: TextIO | None = None) -> None:
    """For all loggers of this process, from INFO on; may be called again. process: a key of TEXT_FORMATS."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonLines(process) if form is LogFormat.JSON else TextLines(TEXT_FORMATS[process]))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
