"""Command line of Headrace. Imports stay light: JAX starts in the engine process, or in ``generate``."""

import os
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from headrace.model.errors import ModelFileError
from headrace.model.pull import CATALOG, DEFAULT_MODEL, PullError, ResolvedModel, default_cache_dir, resolve_model
from headrace.serving.app.bench_command import bench
from headrace.serving.app.build import DEVICES, DTYPES, EngineOptions
from headrace.serving.app.console import ProgressDisplay
from headrace.serving.app.engine_flags import compute, engine_options, memory, resolved_options, running
from headrace.serving.app.help_sections import A_FOLDER, SectionCommand, section
from headrace.serving.app.observe_flags import observe_options
from headrace.serving.app.options import ServeOptions, host_place
from headrace.serving.app.plan_flags import plan
from headrace.serving.app.probe_command import contract, probe, readiness_fields, readiness_options
from headrace.serving.app.replay_command import replay
from headrace.serving.app.simulate_command import cost_model, simulate
from headrace.serving.app.tenant_flags import LimitOptions, limit_options
from headrace.serving.app.workload_command import make_workload
from headrace.serving.core.errors import ConfigError
from headrace.serving.engine.host_messages import MAX_HOSTS

A_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

SAMPLING_FLAGS = (
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "ignore_eos",
)

network = section("Network")
access = section("Access")
model = section("Model")
several = section("Hosts")
sampling = section("Generation")
output = section("Output")


def main() -> int:
    """Run the command; its exit code. 2: wrong use or configuration, 1: it failed, 130: interrupted."""
    try:
        return int(commands.main(prog_name="headrace", standalone_mode=False) or 0)
    except click.exceptions.Abort:
        return 130
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except ConfigError as error:
        return _say(str(error), 2)
    except (PullError, ModelFileError) as error:
        return _say(str(error), 1)


def _say(message: str, exit_code: int) -> int:
    click.echo(f"headrace: {message}", err=True)
    return exit_code


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(version("headrace"), prog_name="headrace")
def commands() -> None:
    """Headrace serves language models: paged memory, continuous batching, replies streamed over WebSocket."""


@commands.command()
@click.argument("name", default=DEFAULT_MODEL)
@click.option("--cache-dir", type=A_FOLDER, help=f"Where models are kept.  [default: {default_cache_dir()}]")
def pull(name: str, cache_dir: Path | None) -> None:
    """Fetch a model and print its path.

    NAME is smollm2-135m (the default), tiny, or a Hugging Face name org/name[@revision].
    """
    if name not in CATALOG and Path(name).exists():
        raise click.UsageError(f"{name} is a path already; pull takes a name: {', '.join(CATALOG)} or org/name")
    click.echo(_find_model(name, cache_dir).path)


def _find_model(name: str, cache_dir: Path | None) -> ResolvedModel:
    with ProgressDisplay(Console(stderr=True)) as display:
        return resolve_model(name, cache_dir=cache_dir, progress=display.update)


@commands.command(cls=SectionCommand)
@click.argument("model_source", metavar="[MODEL]", default=DEFAULT_MODEL)
@model("--served-model-name", metavar="NAME", help="What the API calls the model.  [default: the name it came by]")
@network("--host", default="127.0.0.1", help="Address to listen on; beyond loopback it needs --api-keys.")
@network("--port", type=click.IntRange(0, 65535), default=8000, help="Port to listen on; 0 takes a free one.")
@network("--tls-cert", type=A_FILE, help="Certificate chain (PEM); needs --tls-key.")
@network("--tls-key", type=A_FILE, help="Private key (PEM).")
@network(
    "--heartbeat-seconds",
    type=click.FloatRange(1, 3600),
    default=20.0,
    help="Between pings on a WebSocket; a client that is silent for as long again is cut off.",
)
@access("--api-keys", type=A_FILE, help="File of keys, made by 'headrace key'; without it nobody is asked for one.")
@access("--allow-origin", multiple=True, metavar="ORIGIN", help="Web origin that may connect, besides our own.")
@access("--allow-host", multiple=True, metavar="HOST", help="Host header to accept, besides the listening address.")
@access("--unsafe-bind", is_flag=True, help="Listen beyond loopback without keys.")
@engine_options(max_streams=16)
@several(
    "--hosts",
    type=click.IntRange(1, MAX_HOSTS),
    default=1,
    help="Hosts that serve one model together, in equal parts of --mesh. Give all the same options but --rank.",
)
@several("--rank", type=int, help="Of this host; 0 has the clients and schedules, the others follow it.")
@several(
    "--coordinator",
    metavar="HOST:PORT",
    help="Where rank 0 listens for the others: an address of its own, in a network that is private to them.",
)
@several(
    "--join-seconds",
    type=click.FloatRange(1, 120),
    help="How long ranks wait for each other at the start.  [default: 120]",
)
@limit_options
@memory("--max-queued", type=int, default=512, help="Requests that may wait; more are refused with queue_full.")
@memory("--max-queued-tokens", type=int, default=524_288, help="Prompt tokens that may wait.")
@running("--drain-seconds", type=click.FloatRange(0), default=30.0, help="How long SIGTERM lets requests go on.")
@running("--restart-engine", is_flag=True, help="Start a dead engine again instead of ending with an error.")
@readiness_options
@running("--allow-unknown-fields", is_flag=True, help="Ignore unknown body fields with a warning header.")
@observe_options
def serve(model_source: str, cache_dir: Path | None, **flags: Any) -> int:
    """Serve MODEL over WebSocket and HTTP.

    MODEL is smollm2-135m (the default, fetched on first use), tiny (random weights, ready in seconds), a .gguf file, a
    model directory, or a Hugging Face name. The URL is printed on standard output when the server is ready; everything
    else goes to standard error.
    """
    place = host_place(flags["hosts"], flags["rank"], flags["coordinator"], flags["join_seconds"])
    found = _find_model(model_source, cache_dir)
    if place is not None and place.rank > 0:
        from headrace.serving.app.follow import run_follower

        name = flags["served_model_name"] or found.name
        return run_follower(resolved_options(found, flags, place), name, Console(stderr=True))
    from headrace.serving.app.serve import run_server

    options = ServeOptions(
        model_name=flags["served_model_name"] or found.name,
        model_path=found.path,
        # Without keys all requests are one tenant's: nobody else's newcomer has to find room.
        engine=replace(resolved_options(found, flags, place), is_shared=flags["api_keys"] is not None),
        host=flags["host"],
        port=flags["port"],
        api_keys=flags["api_keys"],
        allow_origins=flags["allow_origin"],
        allow_hosts=flags["allow_host"],
        tls_cert=flags["tls_cert"],
        tls_key=flags["tls_key"],
        unsafe_bind=flags["unsafe_bind"],
        heartbeat_s=flags["heartbeat_seconds"],
        drain_s=flags["drain_seconds"],
        restart_engine=flags["restart_engine"],
        allow_unknown_fields=flags["allow_unknown_fields"],
        **readiness_fields(flags),
        otlp_endpoint=flags["otlp_endpoint"],
        limits=LimitOptions.of_flags(flags),
    )
    return run_server(options, Console(stderr=True))


@commands.command()
@click.argument("name")
@click.option("--file", "path", type=click.Path(dir_okay=False, path_type=Path), help="Key file to add it to.")
def key(name: str, path: Path | None) -> None:
    """Make an API key for the tenant NAME and print it, once.

    The key file holds only its SHA-256, in a line that --file adds (making the file, readable by you alone).
    """
    from headrace.serving.edge.keys import digest_line, new_key

    made = new_key()
    line = digest_line(name, made)
    if path is None:
        click.echo(f"Line for the file of --api-keys: {line}", err=True)
    else:
        try:
            with open(path, "a", opener=lambda file, flags: os.open(file, flags, 0o600)) as file:
                file.write(line + "\n")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
        click.echo(f"Added to {path}. Keep the key: it is not shown again.", err=True)
    click.echo(made)


@commands.command(cls=SectionCommand)
@click.argument("prompt")
@model("--model", "model_source", default=DEFAULT_MODEL, help="As for serve: a name, a .gguf file or a directory.")
@sampling("--chat", is_flag=True, help="Put the prompt into the model's chat template.")
@sampling("--system", help="A system message before the prompt; needs --chat.")
@sampling("--max-tokens", type=int, help="Most new tokens.  [default: 16; with --chat the rest of the context]")
@sampling("--min-tokens", type=int, default=0, help="Hold off every end for so many tokens.")
@sampling("--temperature", type=float, default=1.0, help="0 is greedy.")
@sampling("--top-k", type=int, default=0, help="Draw from the k likeliest tokens; 0 is off.")
@sampling("--top-p", type=float, default=1.0, help="Draw from the likeliest tokens of this much probability.")
@sampling("--min-p", type=float, default=0.0, help="Leave out tokens below this share of the likeliest.")
@sampling("--repetition-penalty", type=float, default=1.0, help="Above 1 makes used tokens less likely.")
@sampling("--presence-penalty", type=float, default=0.0, help="Subtracted once from tokens generated before.")
@sampling("--frequency-penalty", type=float, default=0.0, help="Subtracted for each time a token was generated.")
@sampling("--seed", type=int, help="Makes the draw repeatable.  [default: random]")
@sampling("--stop", multiple=True, metavar="TEXT", help="End before this text; may be given several times.")
@sampling("--ignore-eos", is_flag=True, help="Go on past the end-of-sequence token.")
@output("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
@engine_options(max_streams=1)
def generate(prompt: str, model_source: str, cache_dir: Path | None, as_json: bool, **flags: Any) -> int:
    """Complete PROMPT, without a server; '-' reads it from standard input.

    Standard output gets the text as it comes, or one JSON object with text, token_ids, prompt_token_ids, finish_reason,
    usage and metrics.
    """
    from headrace.serving.app.generate import Prompt, run_generate

    text = _standard_input() if prompt == "-" else prompt
    wanted = Prompt(text=text, chat=flags.pop("chat"), system=flags.pop("system"))
    parameters = {name: flags[name] for name in SAMPLING_FLAGS}
    if flags["max_tokens"] is not None:
        parameters["max_tokens"] = flags["max_tokens"]
    options = resolved_options(_find_model(model_source, cache_dir), flags)
    return run_generate(wanted, options, parameters, as_json=as_json, console=Console(stderr=True))


@commands.command(cls=SectionCommand)
@click.argument("model_source", metavar="MODEL")
@click.argument("target", metavar="DIR", type=A_FOLDER)
@compute("--device", type=click.Choice(DEVICES), default="auto", help="Whose memory holds the model meanwhile.")
@compute("--mesh", help="As for serve, such as tensor=8: in how many parts each weight is written.")
@compute("--dtype", type=click.Choice(DTYPES), default="auto", help="Type of matrices; auto: as serve has it.")
@running("--cache-dir", type=A_FOLDER, help=f"Where models are kept.  [default: {default_cache_dir()}]")
def checkpoint(model_source: str, target: Path, cache_dir: Path | None, **flags: Any) -> int:
    """Write MODEL as an Orbax checkpoint to DIR, for serve and generate to load.

    It restores onto every mesh, and each device reads its own parts. MODEL is as for serve; its tokenizer, chat
    template and configuration come along.
    """
    from headrace.serving.app.checkpoint_command import CheckpointRequest, run_checkpoint

    found = _find_model(model_source, cache_dir)
    options = EngineOptions(model=str(found.path), **flags)
    return run_checkpoint(CheckpointRequest(model=found.path, target=target), options, Console(stderr=True))


commands.add_command(plan)
commands.add_command(bench)
commands.add_command(simulate)
commands.add_command(cost_model)
commands.add_command(contract)
commands.add_command(probe)
commands.add_command(replay)
commands.add_command(make_workload)


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not UTF-8 (byte {error.start})") from None
