"""The command ``headrace bench``: one workload against one running server, in a closed or an open loop."""

import json
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from headrace.serving.app.compare_command import compare
from headrace.serving.app.help_sections import SectionCommand, section
from headrace.serving.app.workload_command import LENGTHS_HELP, TRACE_HELP
from headrace.serving.bench.dialect import KINDS
from headrace.serving.core.errors import ConfigError

APIS = ("native", "openai", "chat")
API_HELP = "Our WebSocket, or over HTTP OpenAI's completions (openai) or chat completions (chat)."
A_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
TO_WRITE = click.Path(dir_okay=False, path_type=Path)
CLOSED_ONLY = ("streams",)
OPEN_ONLY = ("duration_s", "arrivals", "speed", "max_in_flight", "connections", "plot")
OPENERS = ("rate", "phases", "trace", "workload")
"""Each makes it an open loop."""
MAX_LEVELS = 32
"""Numbers of streams."""
OPTION_OF = {"tenants": "tenant", "priorities": "priority", "prefixes": "shared-prefix", "phases": "phase"}
PLAN_FIELDS = ("arrivals", "temperature", "ignore_eos", "seed", "deadline_ms", "cancel_share", "cancel_after_s")
PLANNED = ("rate", "phases", "trace", "speed", "duration_s", "requests", "arrivals", "prompt_words", "prompt_tokens",
           "max_tokens", "temperature", "ignore_eos", "seed", "tenants", "priorities", "prefixes", "deadline_ms",
           "cancel_share", "cancel_after_s")  # fmt: skip
"""What a workload file has of its own."""

target = section("Server")
closed = section("Closed loop")
open_loop = section("Open loop")
work = section("Requests")
who = section("Tenants, prefixes, cancels")
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
@target("--api", type=click.Choice(APIS), default="native", help=API_HELP)
@target(
    "--kind",
    type=click.Choice(KINDS),
    default="any",
    help="Of server over HTTP: openai leaves out --ignore-eos, which OpenAI's own refuses; the others take it.",
)
@target("--body", metavar="JSON", help="Object of fields for every request, such as '{\"cache_prompt\": false}'.")
@target("--model", help="Name to ask for.  [default: the first that the server lists; native: none]")
@target("--api-key-file", type=A_FILE, help="File whose first line is the API key.")
@target("--keys", type=A_FILE, help="File with a line tenant:key for each tenant of the workload.")
@target("--timeout", "timeout_s", type=click.FloatRange(0.1, 86_400), default=600.0, help="Seconds for one request.")
@target("--sockets", type=click.IntRange(1, 1_024), default=1, help="WebSockets that requests share, of each tenant.")
@target("--connections", type=click.IntRange(1, 60_000), default=512, help="Most HTTP connections.")
@closed(
    "--streams",
    metavar="N[,N...]",
    default="16",
    help="Requests at the same time; each asks again when it has its answer. Several numbers: a run of each.",
)
@open_loop("--workload", type=A_FILE, help="File of planned requests; see headrace make-workload --help.")
@open_loop("--rate", type=float, help="Or requests per second, for --duration or --requests.")
@open_loop("--duration", "duration_s", type=float, help="Seconds over which requests come.")
@open_loop("--arrivals", type=click.Choice(("poisson", "uniform")), default="poisson", help="Random, or evenly spaced.")
@open_loop("--max-in-flight", type=click.IntRange(1, 1_000_000), default=8_192, help="Most requests without an end.")
@open_loop(
    "--phase",
    "phases",
    multiple=True,
    metavar="RATE:SECONDS",
    help="Or several rates, such as --phase 2:60 --phase 9:60.",
)
@open_loop("--trace", type=A_FILE, help=TRACE_HELP)
@open_loop("--speed", type=float, default=1.0, help="How many seconds of the trace pass in one.")
@work("--requests", type=int, help="Requests in all.  [default: 64 in a closed loop]")
@work("--warmup", type=int, default=2, help="Requests before that, one after the other, which do not count.")
@work("--prompt-words", metavar="LENGTH", help="Words of a prompt.  [default: 128]")
@work("--prompt-tokens", metavar="LENGTH", help="Tokens of a prompt, sent as random ids; instead of words.")
@work("--max-tokens", metavar="LENGTH", default="64", help=f"Tokens of an answer: {LENGTHS_HELP}.")
@work("--temperature", type=float, default=0.0, help="0 is greedy.")
@work("--ignore-eos/--no-ignore-eos", default=True, help="Ask for answers of --max-tokens; not every server can.")
@work("--repeat", type=click.IntRange(1, 100), default=1, help="Runs of the same plan with new drawn prompts.")
@work("--seed", type=int, default=0, help="Of the prompts, all different; a new seed finds no cached prefixes.")
@who("--tenant", "tenants", multiple=True, metavar="NAME=SHARE", help="Of the requests, such as gold=3; several.")
@who("--priority", "priorities", multiple=True, metavar="NAME=SHARE", help="Such as high=1; several.")
@who(
    "--shared-prefix",
    "prefixes",
    multiple=True,
    metavar="NAME=LENGTH[:SHARE]",
    help="Words or tokens that a share (of 1) of the prompts begins with, such as system=200:0.5; several.",
)
@who("--deadline-ms", type=click.IntRange(1), help="Deadline that the server is told.")
@who("--cancel-share", type=click.FloatRange(0, 1), default=0.0, help="Share of requests that the client cancels.")
@who("--cancel-after", "cancel_after_s", type=click.FloatRange(0), default=1.0, help="Seconds after their start.")
@output(
    "--slo",
    metavar="OBJECTIVE",
    help="Count what meets it, such as ttft=1s,itl=250ms,e2e=30s: the first token, the mean time of a later token, the "
    "whole answer; with itl_p=95 the 95th percentile of a request's pauses instead of that mean, 100: the longest.",
)
@output("--json", "json_file", type=TO_WRITE, help="File for figures and requests.")
@output("--html", "html_file", type=TO_WRITE, help="File for a report with pictures; needs the plot extra.")
@output(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Picture of an open loop, .svg, .png or .pdf: first tokens and refusals over time.",
)
@click.pass_context
def bench(ctx: click.Context, url: str, **flags: Any) -> int:
    """Measure the server at URL, such as http://127.0.0.1:8000.

    A closed loop keeps --streams requests running. With --rate, --phase, --trace or --workload requests start when they
    are planned, whatever became of the others, and latencies count from there: an open loop, as users are.

    headrace bench compare A B ... lays servers side by side; see headrace bench compare --help.

    Standard output gets tables, standard error the progress. The exit code is 0 when every request ended well, in an
    open loop when some ended well and the others were refused; 1 when some failed or the server cannot be asked, 2 for
    options that cannot be, 130 when interrupted: an open loop then sends no more, and reports what it sent.
    """
    from headrace.serving.app.bench_run import BenchRequest, run_closed, run_open
    from headrace.serving.bench.objective import parse_objective

    given = {name for name in flags if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT}
    is_open = bool(given & set(OPENERS))
    check_apart(given, is_open=is_open, has_file=flags["workload"] is not None)
    check_door(given, flags)
    slo = flags.pop("slo")
    names = ("api", "kind", "model", "api_key_file", "keys", "timeout_s", "sockets", "connections", "json_file",
             "html_file", "plot")  # fmt: skip
    wanted = BenchRequest(
        url=url,
        objective=None if slo is None else parse_objective(slo),
        extra=parse_body(flags.pop("body")),
        **{name: flags.pop(name) for name in names},
    )
    if is_open:
        return run_open(wanted, open_workload(flags), _name_of(flags["workload"]), **open_options(flags))
    return run_closed(wanted, closed_workloads(flags))


def check_apart(given: set[str], *, is_open: bool, has_file: bool) -> None:
    """Raises: ConfigError for an option of the other loop, or one that a workload file replaces."""

    def named(names: tuple[str, ...]) -> str:
        found = [
            f"--{OPTION_OF.get(name, name.removesuffix('_s').replace('_', '-'))}" for name in names if name in given
        ]
        return ", ".join(found)

    if is_open and (found := named(CLOSED_ONLY)):
        raise ConfigError(f"{found} is of a closed loop; leave it out with --rate, --phase, --trace or --workload")
    if not is_open and (found := named(OPEN_ONLY)):
        raise ConfigError(f"{found} needs an open loop; give --rate, --phase, --trace or --workload")
    if has_file and (found := named(PLANNED)):
        raise ConfigError(f"the file of --workload has what {found} would say; leave it out, or make another file")


def check_door(given: set[str], flags: dict[str, Any]) -> None:
    """Raises: ConfigError for an option of another door, or of another kind of server."""
    if flags["api"] == "native":
        for name in ("kind", "body"):
            if name in given:
                raise ConfigError(f"--{name} is of HTTP; give --api openai or chat")
    elif "sockets" in given:
        raise ConfigError("--sockets is of --api native; HTTP has --connections")
    if flags["kind"] == "openai" and "ignore_eos" in given and flags["ignore_eos"]:
        raise ConfigError(
            "--ignore-eos: a server of --kind openai does not know it, and ends its answers where it likes"
        )
    if flags["api"] == "chat" and flags["prompt_tokens"] is not None:
        raise ConfigError("--prompt-tokens: a chat takes text; give --prompt-words, or --api openai")


def parse_body(text: str | None) -> dict[str, object]:
    """Raises: ConfigError."""
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"--body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError("--body must be a JSON object, such as '{\"cache_prompt\": false}'")
    return found


def parse_streams(text: str) -> list[int]:
    """One number, or several with commas. Raises: ConfigError."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--streams {text!r} must be a number, or several such as 1,4,16") from None
    if len(set(found)) < len(found) or len(found) > MAX_LEVELS:
        raise ConfigError(f"--streams {text!r}: give each number once, at most {MAX_LEVELS}")
    return found


def open_options(flags: dict[str, Any]) -> dict[str, Any]:
    return {name: flags[name] for name in ("max_in_flight", "repeat", "warmup")}


def open_workload(flags: dict[str, Any]) -> Any:
    """From the file, or from a rate, phases or a trace. Raises: ConfigError."""
    from headrace.serving.app.workload_command import arrivals_of, lengths_of, shares_of
    from headrace.serving.bench.make_workload import WorkloadPlan, make_workload
    from headrace.serving.bench.workload_file import load_workload

    if flags["workload"] is not None:
        return load_workload(flags["workload"])
    own = dict(flags)
    plan = WorkloadPlan(
        **arrivals_of(own),
        **shares_of(own),
        **lengths_of(own),
        **{name: own[name] for name in PLAN_FIELDS},
    )
    return make_workload(plan)


def closed_workloads(flags: dict[str, Any]) -> list[Any]:
    """Of each run, in order. Raises: ConfigError."""
    from headrace.serving.app.bench_levels import levels_of
    from headrace.serving.app.workload_command import lengths_of, shares_of
    from headrace.serving.bench.closed_plan import ClosedPlan
    from headrace.serving.bench.make_workload import WorkloadPlan, make_workload
    from headrace.serving.bench.workload import Workload

    own = dict(flags)
    lengths, shares, streams = lengths_of(own), shares_of(own), parse_streams(own["streams"])
    prompt, answer = lengths["prompt"].fixed, lengths["max_tokens"].fixed
    requests = 64 if flags["requests"] is None else flags["requests"]
    base: Workload | ClosedPlan
    if prompt is None or answer is None or any(shares.values()) or own["cancel_share"] or own["deadline_ms"]:
        plan = WorkloadPlan(
            phases=((1.0, max(requests, 1)),), requests=requests, **lengths, **shares,
            **{name: own[name] for name in PLAN_FIELDS},
        )  # fmt: skip
        base = ClosedPlan(plan=make_workload(plan, is_closed=True), streams=streams[0], warmup=own["warmup"])
    else:
        base = Workload(
            streams=streams[0],
            requests=requests,
            prompt_words=prompt if lengths["is_words"] else 0,
            prompt_tokens=0 if lengths["is_words"] else prompt,
            max_tokens=answer,
            **{name: own[name] for name in ("warmup", "temperature", "ignore_eos", "seed")},
        )
    return levels_of(base, streams, own["repeat"])


def _name_of(path: Path | None) -> str | None:
    return None if path is None else path.name
