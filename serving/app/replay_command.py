"""``headrace replay FILE``: run the scheduler again from a journal and compare every plan."""

from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
from rich.console import Console

from headrace.serving.app.console import ProgressDisplay
from headrace.serving.core.errors import ConfigError
from headrace.serving.engine.journal import AnyRecord, JournalError, read_with_sizes
from headrace.serving.engine.replay import ReplayReport
from headrace.serving.engine.replay import replay as replay_records

PROGRESS_RECORDS = 1000


@click.command()
@click.argument("path", metavar="FILE", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def replay(path: Path, as_json: bool) -> int:
    """Run the scheduler again from FILE, a journal of 'headrace serve --journal', and compare every plan.

    The exit code is 0 when every plan and every answer is as recorded, and 1 at the first that is not; both sides of it
    are printed. Needs no model.
    """
    console = Console(stderr=True)
    try:
        with ProgressDisplay(console) as display:
            report = replay_records(_with_progress(path, display))
    except (JournalError, OSError) as error:
        raise ConfigError(f"{path} cannot be replayed: {error}") from error
    if as_json:
        click.echo(msgspec.json.encode({"equal": report.difference is None, **_as_dict(report)}).decode())
    else:
        _print(report)
    return 0 if report.difference is None else 1


def _with_progress(path: Path, display: ProgressDisplay) -> Iterator[AnyRecord]:
    size, done = path.stat().st_size, 0
    for number, (record, num_bytes) in enumerate(read_with_sizes(path)):
        if number % PROGRESS_RECORDS == 0:
            display.update(f"replaying {path.name}", done, size)
        done += num_bytes
        yield record


def _as_dict(report: ReplayReport) -> dict[str, object]:
    values: dict[str, object] = msgspec.to_builtins(report)
    return values


def _print(report: ReplayReport) -> None:
    for note in report.notes:
        click.echo(note)
    click.echo(
        f"{report.segments:,} segments, {report.records:,} records: {report.commands:,} commands, {report.steps:,} "
        f"steps, {report.generated_tokens:,} sampled tokens"
    )
    found = report.difference
    if found is None:
        click.echo("Every plan and every event is as recorded.")
        return
    click.echo(f"Difference at record {found.record} (segment {found.segment}, {found.now_s:.3f} s): {found.what}.")
    for part in found.parts:
        click.echo(f"  {part.part}\n    recorded: {part.recorded}\n    replayed: {part.replayed}")
