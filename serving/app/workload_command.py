"""The command ``headrace make-workload``: a file of planned requests, for ``bench`` and ``simulate``."""

import re
from pathlib import Path
from typing import Any

import click

from headrace.serving.app.help_sections import SectionCommand, section
from headrace.serving.bench.workload_fields import HEADER_MEANINGS, MEANINGS, check_name
from headrace.serving.core.errors import ConfigError

LENGTHS_HELP = "128, uniform:64:256 or lognormal:MEDIAN:SIGMA[:MOST]"

TRACE_HELP = (
    "Instead of a rate: CSV with a header and a column at_s or TIMESTAMP; lengths and tenants from columns "
    "prompt_tokens (ContextTokens), max_tokens (GeneratedTokens) and tenant, where it has them."
)

arriving = section("Arrivals")
lengths = section("Requests")
who = section("Tenants, priorities and prefixes")
output = section("Output")


class FormatCommand(SectionCommand):
    """Its help ends with the fields of the file."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, meanings in (("First line of the file", HEADER_MEANINGS), ("Each further line", MEANINGS)):
            with formatter.section(f"{heading}, a JSON object with"):
                formatter.write_dl(list(meanings.items()))


@click.command("make-workload", cls=FormatCommand)
@arriving("--rate", type=float, help="Requests per second; with --duration or --requests.")
@arriving("--duration", "duration_s", type=float, help="Seconds over which they come.")
@arriving("--requests", type=int, help="How many come, instead of --duration.")
@arriving(
    "--phase",
    "phases",
    multiple=True,
    metavar="RATE:SECONDS",
    help="Instead of --rate; several follow each other, such as --phase 2:60 --phase 10:60 --phase 2:30.",
)
@arriving("--arrivals", type=click.Choice(("poisson", "uniform")), default="poisson", help="Random, or evenly spaced.")
@arriving("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help=TRACE_HELP)
@arriving("--speed", type=float, default=1.0, help="How many seconds of the trace pass in one.")
@lengths("--prompt-words", metavar="LENGTH", help=f"Words of a prompt: {LENGTHS_HELP}.  [default: 128]")
@lengths("--prompt-tokens", metavar="LENGTH", help="Tokens of a prompt, sent as random ids; instead of words.")
@lengths("--max-tokens", metavar="LENGTH", default="64", help="Tokens of an answer.")
@lengths("--deadline-ms", type=click.IntRange(1), help="Deadline that the server is told.")
@lengths("--cancel-share", type=click.FloatRange(0, 1), default=0.0, help="Share of requests that the client cancels.")
@lengths("--cancel-after", "cancel_after_s", type=click.FloatRange(0), default=1.0, help="Seconds after their start.")
@lengths("--temperature", type=click.FloatRange(0, 100), default=0.0, help="0 is greedy.")
@lengths("--ignore-eos/--no-ignore-eos", default=True, help="Ask for answers of full length.")
@lengths("--seed", type=click.IntRange(0), default=0, help="Of arrivals, lengths and prompts.")
@who("--tenant", "tenants", multiple=True, metavar="NAME=SHARE", help="Of the requests, such as gold=3; several.")
@who("--priority", "priorities", multiple=True, metavar="NAME=SHARE", help="Such as high=1; several.")
@who(
    "--shared-prefix",
    "prefixes",
    multiple=True,
    metavar="NAME=LENGTH[:SHARE]",
    help="Words or tokens that a share (of 1) of the prompts begins with, such as system=200:0.5; several.",
)
@output("--out", "-o", "out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="File to write.")
def make_workload(out: Path, **flags: Any) -> int:
    """Write a workload file: one planned request a line, for `headrace bench --workload` and `headrace simulate`.

    The same options give the same file. Lines can be added, changed and mixed by any program; the format is below.
    """
    from headrace.serving.bench.make_workload import WorkloadPlan
    from headrace.serving.bench.make_workload import make_workload as make

    workload = make(WorkloadPlan(**shares_of(flags), **arrivals_of(flags), **lengths_of(flags), **flags))
    try:
        with out.open("w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in workload.lines())
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}") from error
    prompt = sum(workload.estimated_prompt_tokens(index) for index in range(len(workload.requests)))
    answers = sum(request.max_tokens for request in workload.requests)
    click.echo(
        f"{out}: {len(workload.requests):,} requests in {workload.duration_s:g} s ({workload.offered_per_s:.3g}/s), "
        f"about {prompt:,} prompt tokens, at most {answers:,} new ones; workload {workload.hash[:12]}",
        err=True,
    )
    return 0


def arrivals_of(flags: dict[str, Any]) -> dict[str, Any]:
    """Takes the options of rates, phases and traces out of flags. Raises: ConfigError where they contradict."""
    from headrace.serving.bench.trace_file import load_trace

    phases = tuple(parse_phase(text) for text in flags.pop("phases"))
    rate, duration_s = flags.pop("rate"), flags.pop("duration_s")
    trace, speed, requests = flags.pop("trace"), flags.pop("speed"), flags.pop("requests")
    if trace is None:
        if speed != 1:
            raise ConfigError("--speed is of a --trace")
        return {"phases": phases_of(rate, duration_s, requests, phases), "requests": requests}
    if phases or rate is not None or duration_s is not None:
        raise ConfigError("--trace has the arrivals; leave out --rate, --duration and --phase")
    return {"phases": (), "trace": load_trace(trace, speed=speed, most=requests)}


def shares_of(flags: dict[str, Any]) -> dict[str, Any]:
    """Takes the options of tenants, priorities and prefixes out of flags. Raises: ConfigError."""
    return {
        "tenants": tuple(parse_share("--tenant", text) for text in flags.pop("tenants")),
        "priorities": tuple(parse_share("--priority", text) for text in flags.pop("priorities")),
        "prefixes": parse_prefixes(flags.pop("prefixes")),
    }


def lengths_of(flags: dict[str, Any]) -> dict[str, Any]:
    """Takes the options of lengths out of flags. Raises: ConfigError."""
    from headrace.serving.bench.make_workload import parse_lengths

    words, tokens = flags.pop("prompt_words"), flags.pop("prompt_tokens")
    if words is not None and tokens is not None:
        raise ConfigError("give either --prompt-words or --prompt-tokens")
    is_words = tokens is None
    prompt = parse_lengths(words or "128", "--prompt-words") if is_words else parse_lengths(tokens, "--prompt-tokens")
    max_tokens = parse_lengths(flags.pop("max_tokens"), "--max-tokens")
    return {"prompt": prompt, "is_words": is_words, "max_tokens": max_tokens}


def phases_of(
    rate: float | None, duration_s: float | None, requests: int | None, phases: tuple[tuple[float, float], ...] = ()
) -> tuple[tuple[float, float], ...]:
    """Raises: ConfigError where the options contradict each other."""
    if phases:
        if rate is not None or duration_s is not None:
            raise ConfigError("--phase has rates and times; leave out --rate and --duration")
        return phases
    if rate is None or (duration_s is None) == (requests is None):
        raise ConfigError("give --rate with either --duration or --requests, or --phase")
    # A number of requests ends the phase; its time is what they take at that rate.
    return ((rate, duration_s if requests is None or not rate > 0 else max(requests, 1) / rate),)  # type: ignore[arg-type, return-value]


def parse_phase(text: str) -> tuple[float, float]:
    """Raises: ConfigError."""
    try:
        rate, seconds = (float(part) for part in text.split(":"))
    except ValueError:
        raise ConfigError(f"--phase {text!r} must be RATE:SECONDS, such as 2.5:60") from None
    return rate, seconds


def parse_share(option: str, text: str) -> Any:
    """NAME=SHARE. Raises: ConfigError."""
    from headrace.serving.bench.make_workload import Share

    name, _, share = text.partition("=")
    return Share(name=_name(option, text, name), share=_share(option, text, share or "1", 1e9))


def parse_prefixes(texts: tuple[str, ...]) -> tuple[Any, ...]:
    """NAME=LENGTH[:SHARE] each, of the shares of 1; what is left has none. Raises: ConfigError."""
    from headrace.serving.bench.make_workload import Share

    found = []
    for text in texts:
        matched = re.fullmatch(r"([^=]*)=(\d{1,6})(?::([^:]*))?", text)
        if matched is None or not int(matched[2]):
            raise ConfigError(f"--shared-prefix {text!r} must be NAME=LENGTH[:SHARE], such as system=200:0.5")
        name = _name("--shared-prefix", text, matched[1])
        share = _share("--shared-prefix", text, matched[3] or "1", 1.0)
        found.append(Share(name=name, share=share, length=int(matched[2])))
    left = 1 - sum(share.share for share in found)
    if left < -1e-9:
        raise ConfigError("shares of --shared-prefix add up to more than 1; give each its own, such as system=200:0.5")
    if len({share.name for share in found}) < len(found):
        raise ConfigError("two of --shared-prefix have one name")
    return (*found, Share(name=None, share=max(left, 0.0))) if found else ()


def _name(option: str, text: str, name: str) -> str:
    try:
        return check_name(option, name)
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: {error}") from None


def _share(option: str, text: str, share: str, most: float) -> float:
    try:
        found = float(share)
    except ValueError:
        found = -1.0
    if not 0 <= found <= most:
        raise ConfigError(f"{option} {text!r}: its share must be a number from 0 to {most:g}")
    return found
