"""What the scripts that compile for absent chips share: jobs run with progress, and a line for each as it ends."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.aot import workers
from tests.aot.outcome import Outcome


def run(
    console: Console, part: str, jobs: Sequence[workers.Named], num_workers: int, prepare: workers.Prepare
) -> Iterator[Outcome]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(part, total=len(jobs))
        for outcome in workers.run(jobs, num_workers, prepare):
            state = "[red]failed[/red]" if outcome.failures else "ok"
            progress.console.print(f"{outcome.seconds:7.1f} s  {outcome.name}  {state}")
            progress.advance(task)
            yield outcome
