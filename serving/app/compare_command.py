"""The command ``headrace bench compare``: several servers side by side under the same workloads, in turns."""

from pathlib import Path
from typing import Any

import click

from headrace.serving.app.help_sections import SectionCommand, section
from headrace.serving.core.errors import ConfigError

A_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
TO_WRITE = click.Path(dir_okay=False, path_type=Path)

source = section("Servers")
work = section("One workload, without --file")
running = section("Running")
output = section("Output")


class FileCommand(SectionCommand):
    """Its help ends with what a comparison's file may have."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from headrace.serving.bench import compare_file

        for heading, meanings in (
            ("A file of --file: TOML with", compare_file.FILE_MEANINGS),
            ("Each [servers.NAME]", compare_file.SERVER_MEANINGS),
            ("Each [[workloads]]", compare_file.WORKLOAD_MEANINGS),
        ):
            with formatter.section(heading):
                formatter.write_dl(list(meanings.items()))


@click.command("compare", cls=FileCommand)
@click.argument("servers", nargs=-1, metavar="[SERVER]...")
@source("--file", type=A_FILE, help="TOML with servers and workloads, as below.")
@source("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A value of the file's table [values]; several.")
@work("--loop", type=click.Choice(("closed", "poisson", "uniform")), default="closed", help="How requests arrive.")
@work("--streams", type=click.IntRange(1, 4_096), default=4, help="Closed loop: requests at the same time.")
@work("--rate", type=float, help="Open loop: requests per second.")
@work("--requests", type=click.IntRange(1, 100_000), help="In all.  [default: as many as streams; open loop: 32]")
@work("--prompt-words", type=click.IntRange(1, 100_000), help="Words of a prompt.  [default: 128]")
@work("--prompt-tokens", type=click.IntRange(1, 1_000_000), help="Or tokens, sent as random ids.")
@work("--max-tokens", type=click.IntRange(1, 100_000), default=64, help="Tokens of an answer.")
@work("--seed", type=click.IntRange(0, 2**31 - 1), default=0, help="Of prompts and arrivals.")
@work("--timeout", "timeout_s", type=click.FloatRange(0.1, 86_400), default=600.0, help="Seconds for one request.")
@running("--repetitions", type=click.IntRange(1, 100), help="Of each workload.  [default: the file's, or 5]")
@running("--only", "workloads", multiple=True, metavar="WORKLOAD", help="A workload of the file; several.")
@running(
    "--minutes",
    type=click.FloatRange(0, min_open=True),
    help="Be done by then: no repetition begins that would end later.",
)
@running("--logs", type=click.Path(file_okay=False, path_type=Path), help="Folder for what started servers print.")
@output("--baseline", metavar="NAME", help="Ratios of each other server to it.  [default: of the first to each]")
@output("--json", "json_file", type=TO_WRITE, help="File for figures, ratios and every request.")
@output("--html", "html_file", type=TO_WRITE, help="File for a report with pictures; needs the plot extra.")
def compare(servers: tuple[str, ...], **flags: Any) -> int:
    """Lay servers side by side: NAME=URL[,kind=llama][,pid=4242] each, or names of --file.

    Servers take turns within each repetition, in an order that rotates, with the same prompts, which are new in each
    repetition. Those whose processes are known, by a command in the file or by pid, are stopped (SIGSTOP) while others
    are measured; the CPU time of all is watched. Ratios are of values of the same repetition.

    The exit code is 0 when all was measured and comparable, 1 when a request failed or a check did not hold, 2 for
    options or a file that cannot be, 130 when interrupted: no more turns are taken then, and those taken are reported.
    """
    from headrace.serving.app.compare_run import CompareRequest, run_compare

    names = ("json_file", "html_file", "baseline", "minutes", "logs")
    wanted = CompareRequest(comparison=comparison_of(servers, flags), **{name: flags[name] for name in names})
    return run_compare(wanted)


def comparison_of(servers: tuple[str, ...], flags: dict[str, Any]) -> Any:
    """From the file, or from the flags. Raises: ConfigError."""
    from headrace.serving.bench.compare_file import load_comparison, parse_server
    from headrace.serving.bench.compare_plan import ComparedWorkload, Comparison

    settings = dict(parse_setting(text) for text in flags["settings"])
    if flags["file"] is not None:
        if given := [text for text in servers if "=" in text]:
            raise ConfigError(f"{given[0]!r}: with --file, name its servers; it has their URLs")
        found = load_comparison(flags["file"], settings)
        return found.only(servers=servers, workloads=flags["workloads"], repetitions=flags["repetitions"])
    if settings or flags["workloads"]:
        raise ConfigError("--set and --only are about a --file")
    if not servers:
        raise ConfigError("give servers as NAME=URL, or a --file")
    is_closed = flags["loop"] == "closed"
    if flags["prompt_words"] and flags["prompt_tokens"]:
        raise ConfigError("give either --prompt-words or --prompt-tokens")
    if is_closed == (flags["rate"] is not None):
        raise ConfigError("--rate is of --loop poisson or uniform, which need it")
    workload = ComparedWorkload(
        name=f"{flags['loop']}-{flags['streams'] if is_closed else format(flags['rate'], 'g')}",
        loop=flags["loop"],
        streams=flags["streams"],
        requests=flags["requests"] or (flags["streams"] if is_closed else 32),
        prompt_words=0 if flags["prompt_tokens"] else flags["prompt_words"] or 128,
        prompt_tokens=flags["prompt_tokens"] or 0,
        max_tokens=flags["max_tokens"],
        rate=flags["rate"],
    )
    return Comparison(
        servers=tuple(parse_server(text) for text in servers),
        workloads=(workload,),
        repetitions=flags["repetitions"] or 5,
        seed=flags["seed"],
        timeout_s=flags["timeout_s"],
    )


def parse_setting(text: str) -> tuple[str, str]:
    """NAME=VALUE. Raises: ConfigError."""
    name, found, value = text.partition("=")
    if not found or not name.isidentifier():
        raise ConfigError(f"--set {text!r} must be NAME=VALUE")
    return name, value
