"""Options of ``headrace serve`` for watching it: the journal, the form of log lines, traces."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from headrace.serving.app.help_sections import ByteSize, section
from headrace.serving.app.logs import LogFormat
from headrace.serving.engine.host_messages import HostPlace
from headrace.serving.engine.journal_file import JournalOptions

watching = section("Watching")


def observe_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds them, in this order."""
    options = (
        watching(
            "--journal",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Append what the scheduler is asked and answers to a file, for 'headrace replay'; it holds the token "
            "ids of prompts and answers.",
        ),
        watching(
            "--journal-limit",
            type=ByteSize(),
            default="1GiB",
            help="The journal stops when its file is so large; the service goes on.",
        ),
        watching(
            "--log-format",
            type=click.Choice([form.value for form in LogFormat]),
            default=LogFormat.TEXT.value,
            help="Form of log lines on standard error; json: one object a line.",
        ),
        watching(
            "--otlp-endpoint",
            metavar="URL",
            help="Send OpenTelemetry traces there, such as http://localhost:4318; needs pip install 'headrace[otel]'.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def journal_options(flags: dict[str, Any], place: HostPlace | None = None) -> JournalOptions | None:
    """Rank 0 alone schedules. Commands without the option have no journal."""
    path = flags.get("journal")
    if path is None or (place is not None and place.rank > 0):
        return None
    return JournalOptions(path=str(path.absolute()), limit_bytes=flags["journal_limit"])
