"""The commands ``headrace contract`` and ``headrace probe``, and the readiness flags of ``serve``. JAX-free."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from headrace.serving.app.help_sections import section
from headrace.serving.core.errors import ConfigError

T = TypeVar("T")

readiness = section("Readiness")
KEY_FILE = click.option(
    "--api-key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File whose first line is the API key.",
)


def readiness_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The flags of ``serve``; ``readiness_fields`` reads them."""
    options = (
        readiness(
            "--probe",
            "probes",
            multiple=True,
            type=click.Path(exists=True, path_type=Path),
            metavar="FILE|DIR",
            help="Probe record, or directory of records, one of which this server must match to be ready; see "
            "'headrace probe'.  [default: a record that comes with Headrace, where one is for this model]",
        ),
        readiness("--require-probe", is_flag=True, help="Without a record for this model and set-up stay not ready."),
        readiness(
            "--probe-interval-seconds",
            type=click.FloatRange(1, 86_400),
            default=300.0,
            help="Between two runs of the probe; it also runs after each start of the engine.",
        ),
        readiness(
            "--probe-limit-seconds",
            type=click.FloatRange(0.1, 3600),
            default=60.0,
            help="Of one run. A late one is tried again before the first pass, and proves nothing after it.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def readiness_fields(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ServeOptions``."""
    return {
        "probes": flags["probes"],
        "require_probe": flags["require_probe"],
        "probe_interval_s": flags["probe_interval_seconds"],
        "probe_limit_s": flags["probe_limit_seconds"],
    }


@click.command()
@click.argument("url", required=False)
@click.option("--diff", nargs=2, metavar="A B", help="Compare two: URLs, saved contracts, or probe records.")
@KEY_FILE
def contract(url: str | None, diff: tuple[str, str] | None, api_key_file: Path | None) -> int:
    """Print the contract of the server at URL, or compare two with --diff.

    With --diff, standard output gets a line for each part that differs, first of the contract, then of the numerics.
    The exit code is 0 when all is the same, 1 when something differs or a server cannot be asked, 2 for wrong use.
    """
    from headrace.serving.app.bench_keys import read_key
    from headrace.serving.app.probe_client import Probed, contract_at

    if (url is None) == (diff is None):
        raise click.UsageError("give a URL, or --diff A B")
    key = read_key(api_key_file)
    if diff is None:
        assert url is not None
        document = _ask(Probed(url, key).contract())
        click.echo(json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False))
        return 0
    first, second = (_ask(contract_at(source, key)) for source in diff)
    return _print_differences(first, second)


def _print_differences(first: Any, second: Any) -> int:
    """first, second: ``core.contract.Contract``. The exit code."""
    from headrace.serving.core.contract import differences

    found = False
    for name, here, there in (
        ("contract", first.parts, second.parts),
        ("numerics", first.numerics, second.numerics),
    ):
        for difference in differences(here, there):
            found = True
            click.echo(f"{name}.{difference.part}: {difference.here} | {difference.there}")
    if not found:
        click.echo(f"the same: {first.fingerprint} {first.numerics_hash}")
    return int(found)


@click.group()
def probe() -> None:
    """Record what a server answers to fixed prompts, and check others against it.

    A record holds prompts, their token ids, greedy answers and the likeliest ids of each step with their logprobs. Make
    it on a replica that you trust; 'headrace serve --probe FILE' then is ready only while it answers so.
    """


@probe.command("record")
@click.argument("url")
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help="File to write.")
@click.option("--tokens", type=click.IntRange(1, 64), default=16, show_default=True, help="Of each answer.")
@click.option(
    "--tolerance",
    type=click.FloatRange(0, 10, min_open=True),
    help="How far logprobs may lie apart.  [default: 0.001 where all is float32, else 0.1]",
)
@KEY_FILE
def record_command(url: str, output: Path, tokens: int, tolerance: float | None, api_key_file: Path | None) -> int:
    """Ask the server at URL the fixed prompts, twice, and write the record to a file."""
    from headrace.serving.app.bench_keys import read_key
    from headrace.serving.app.probe_client import Probed, record
    from headrace.serving.edge.probe_files import record_bytes

    server = Probed(url, read_key(api_key_file))
    made = _ask(record(server, num_tokens=tokens, tolerance=tolerance))
    try:
        output.write_bytes(record_bytes(made))
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}") from None
    steps = sum(len(prompt.ids) for prompt in made.prompts)
    click.echo(
        f"{output}: {len(made.prompts)} prompts, {steps} steps, tolerance {made.tolerance:g}, for {made.fingerprint}"
    )
    return 0


@probe.command("check")
@click.argument("url")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@KEY_FILE
def check_command(url: str, file: Path, api_key_file: Path | None) -> int:
    """Hold the server at URL against the record in FILE.

    Standard output gets a line for each part that differs. The exit code is 0 when none does, 1 when one does or the
    server cannot be asked, 2 for a file that is no record.
    """
    from headrace.serving.app.bench_keys import read_key
    from headrace.serving.app.probe_client import Probed, check
    from headrace.serving.edge.probe_files import read_record

    wanted = read_record(file)
    faults = _ask(check(Probed(url, read_key(api_key_file)), wanted))
    for fault in faults:
        click.echo(f"differs: {fault}")
    if not faults:
        steps = sum(len(prompt.ids) for prompt in wanted.prompts)
        click.echo(f"as recorded: {len(wanted.prompts)} prompts, {steps} steps within {wanted.tolerance:g}")
    return int(bool(faults))


def _ask(work: Coroutine[Any, Any, T]) -> T:
    from headrace.serving.app.probe_client import ServerError

    try:
        return asyncio.run(work)
    except ServerError as error:
        raise click.ClickException(str(error)) from None
