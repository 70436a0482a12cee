"""The command ``headrace bench``: one workload against one running server, in a closed or an open loop."""

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from headrace.serving.app.compare_command import compare
from headrace.serving.app.help_sections import SectionCommand, section
from headrace.serving.app.workload_command import LENGTHS_HELP
from headrace.serving.core.errors import ConfigError

APIS = ("native", "openai")
A_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
CLOSED_ONLY = ("streams",)
OPEN_ONLY = ("duration_s", "arrivals", "keys", "max_in_flight", "connections", "repeat", "plot")
PLANNED = ("rate", "duration_s", "requests", "arrivals", "prompt_words", "prompt_tokens", "max_tokens", "temperature",
           "ignore_eos", "seed")  # fmt: skip
"""What a workload file has of its own."""

target = section("Server")
closed = section("Closed loop")
open_loop = section("Open loop")
work = section("Requests")
output = section("Output")


class BenchCommand(SectionCommand):
    """A URL cannot be the word ``compare``, so that word alone leads to the other command."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args[:1] == ["compare"]:
            return compare.make_context(f"{info_name} compare", args[1:], parent=parent, **extra)
        return super().make_context(info_name, args, parent=parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)


@click.command(cls=BenchCommand)
@click.argument("url")
@target("--api", type=click.Choice(APIS), default="native", help="Our WebSocket, or OpenAI's completions over HTTP.")
@target("--model", help="Name to ask for.  [default: the first that the server lists; native: none]")
@target("--api-key-file", type=A_FILE, help="File whose first line is the API key.")
@target("--keys", type=A_FILE, help="File with a line tenant:key for each tenant of the workload.")
@target("--timeout", "timeout_s", type=click.FloatRange(0.1, 86_400), default=600.0, help="Seconds for one request.")
@target("--sockets", type=click.IntRange(1, 1_024), default=1, help="WebSockets that requests share, of each tenant.")
@target("--connections", type=click.IntRange(1, 60_000), default=512, help="Most HTTP connections.")
@closed("--streams", type=int, default=16, help="Requests at the same time; each asks again when it has its answer.")
@open_loop("--workload", type=A_FILE, help="File of planned requests; see headrace make-workload --help.")
@open_loop("--rate", type=float, help="Or requests per second, for --duration or --requests.")
@open_loop("--duration", "duration_s", type=float, help="Seconds over which requests come.")
@open_loop("--arrivals", type=click.Choice(("poisson", "uniform")), default="poisson", help="Random, or evenly spaced.")
@open_loop("--max-in-flight", type=click.IntRange(1, 1_000_000), default=8_192, help="Most requests without an end.")
@open_loop("--repeat", type=click.IntRange(1, 100), default=1, help="Runs of the same plan with new drawn prompts.")
@work("--requests", type=int, help="Requests in all.  [default: 64 in a closed loop]")
@work("--warmup", type=int, default=2, help="Requests before that, one after the other, which do not count.")
@work("--prompt-words", metavar="LENGTH", help="Words of a prompt.  [default: 128]")
@work("--prompt-tokens", metavar="LENGTH", help="Tokens of a prompt, sent as random ids; instead of words.")
@work("--max-tokens", metavar="LENGTH", default="64", help=f"Tokens of an answer; in an open loop {LENGTHS_HELP}.")
@work("--temperature", type=float, default=0.0, help="0 is greedy.")
@work("--ignore-eos/--no-ignore-eos", default=True, help="Ask for answers of --max-tokens; not every server can.")
@work("--seed", type=int, default=0, help="Of the prompts, all different; a new seed finds no cached prefixes.")
@output(
    "--slo",
    metavar="OBJECTIVE",
    help="Count what meets it, such as ttft=1s,itl=250ms,e2e=30s: the first token, the mean time of a later token, the "
    "whole answer; with itl_p=95 the 95th percentile of a request's pauses instead of that mean, 100: the longest.",
)
@output("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="File for figures and requests.")
@output(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Picture of an open loop, .svg, .png or .pdf: first tokens and refusals over time.",
)
@click.pass_context
def bench(ctx: click.Context, url: str, **flags: Any) -> int:
    """Measure the server at URL, such as http://127.0.0.1:8000.

    A closed loop keeps --streams requests running. With --rate or --workload requests start when they are planned,
    whatever became of the others, and latencies count from there: an open loop, as users are.

    headrace bench compare A B ... lays servers side by side; see headrace bench compare --help.

    Standard output gets tables, standard error the progress. The exit code is 0 when every request ended well, in an
    open loop when some ended well and the others were refused; 1 when some failed or the server cannot be asked, 2 for
    options that cannot be, 130 when interrupted: an open loop then sends no more, and reports what it sent.
    """
    from headrace.serving.app.bench_run import BenchRequest, run_closed, run_open
    from headrace.serving.bench.objective import parse_objective

    given = {name for name in flags if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT}
    is_open = flags["rate"] is not None or flags["workload"] is not None
    check_apart(given, is_open=is_open, has_file=flags["workload"] is not None)
    if "sockets" in given and flags["api"] != "native":
        raise ConfigError("--sockets is of --api native; HTTP has --connections")
    slo = flags.pop("slo")
    names = ("api", "model", "api_key_file", "keys", "timeout_s", "sockets", "connections", "json_file", "plot")
    wanted = BenchRequest(
        url=url, objective=None if slo is None else parse_objective(slo), **{name: flags.pop(name) for name in names}
    )
    if is_open:
        return run_open(wanted, open_workload(flags), _name_of(flags["workload"]), **open_options(flags))
    return run_closed(wanted, closed_workload(flags))


def check_apart(given: set[str], *, is_open: bool, has_file: bool) -> None:
    """Raises: ConfigError for an option of the other loop, or one that a workload file replaces."""

    def named(names: tuple[str, ...]) -> str:
        found = [f"--{name.removesuffix('_s').replace('_', '-')}" for name in names if name in given]
        return ", ".join(found)

    if is_open and (found := named(CLOSED_ONLY)):
        raise ConfigError(f"{found} is of a closed loop; leave it out with --rate or --workload")
    if not is_open and (found := named(OPEN_ONLY)):
        raise ConfigError(f"{found} needs an open loop; give --rate or --workload")
    if has_file and (found := named(PLANNED)):
        raise ConfigError(f"the file of --workload has what {found} would say; leave it out, or make another file")


def open_options(flags: dict[str, Any]) -> dict[str, Any]:
    return {name: flags[name] for name in ("max_in_flight", "repeat", "warmup")}


def open_workload(flags: dict[str, Any]) -> Any:
    """From the file, or from a rate. Raises: ConfigError."""
    from headrace.serving.app.workload_command import lengths_of, phases_of
    from headrace.serving.bench.make_workload import WorkloadPlan, make_workload
    from headrace.serving.bench.workload_file import load_workload

    if flags["workload"] is not None:
        return load_workload(flags["workload"])
    plan = WorkloadPlan(
        phases=phases_of(flags["rate"], flags["duration_s"], flags["requests"]),
        **{name: flags[name] for name in ("requests", "arrivals", "temperature", "ignore_eos", "seed")},
        **lengths_of(dict(flags)),
    )
    return make_workload(plan)


def closed_workload(flags: dict[str, Any]) -> Any:
    """Raises: ConfigError where lengths are not fixed."""
    from headrace.serving.app.workload_command import lengths_of
    from headrace.serving.bench.workload import Workload

    lengths = lengths_of(dict(flags))
    prompt, answer = lengths["prompt"].fixed, lengths["max_tokens"].fixed
    if prompt is None or answer is None:
        raise ConfigError("a closed loop has prompts and answers of one length each; give --rate for an open loop")
    return Workload(
        requests=64 if flags["requests"] is None else flags["requests"],
        prompt_words=prompt if lengths["is_words"] else 0,
        prompt_tokens=0 if lengths["is_words"] else prompt,
        max_tokens=answer,
        **{name: flags[name] for name in ("streams", "warmup", "temperature", "ignore_eos", "seed")},
    )


def _name_of(path: Path | None) -> str | None:
    return None if path is None else path.name
