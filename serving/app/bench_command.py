"""The command ``headrace bench``: one workload against one running server."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from headrace.serving.app.help_sections import SectionCommand, section
from headrace.serving.core.errors import ConfigError

APIS = ("native", "openai")
PLAIN_TELL_S = 10.0
"""Between two lines of progress where standard error is no terminal."""
MAX_KEY_FILE_BYTES = 4096

target = section("Server")
work = section("Workload")
output = section("Output")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """What the flags said besides the workload."""

    url: str
    api: str
    model: str | None
    api_key_file: Path | None
    timeout_s: float
    json_file: Path | None


@click.command(cls=SectionCommand)
@click.argument("url")
@target("--api", type=click.Choice(APIS), default="native", help="Our WebSocket, or OpenAI's completions over HTTP.")
@target("--model", help="Name to ask for.  [default: the first that the server lists; native: none]")
@target(
    "--api-key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File whose first line is the API key.",
)
@target("--timeout", "timeout_s", type=click.FloatRange(0.1, 86_400), default=600.0, help="Seconds for one request.")
@work("--streams", type=int, default=16, help="Requests at the same time; each asks again when it has its answer.")
@work("--requests", type=int, default=64, help="Requests in all.")
@work("--warmup", type=int, default=2, help="Requests before that, one after the other, which do not count.")
@work("--prompt-words", type=int, help="Words of a prompt.  [default: 128]")
@work("--prompt-tokens", type=int, help="Tokens of a prompt, sent as random ids; instead of words.")
@work("--max-tokens", type=int, default=64, help="Tokens of an answer.")
@work("--temperature", type=float, default=0.0, help="0 is greedy.")
@work("--ignore-eos/--no-ignore-eos", default=True, help="Ask for answers of --max-tokens; not every server can.")
@work("--seed", type=int, default=0, help="Of the prompts, all different; a new seed finds no cached prefixes.")
@output("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="File for all figures.")
def bench(url: str, **flags: Any) -> int:
    """Measure the server at URL, such as http://127.0.0.1:8000, with a closed loop of requests.

    Standard output gets a table, standard error the progress. The exit code is 0 when every request ended well, 1 when
    some failed or the server cannot be asked, 2 for options that cannot be, 130 when interrupted.
    """
    from headrace.serving.bench.workload import Workload

    names = ("url", "api", "model", "api_key_file", "timeout_s", "json_file")
    wanted = BenchRequest(**{name: (url if name == "url" else flags.pop(name)) for name in names})
    words, tokens = flags.pop("prompt_words"), flags.pop("prompt_tokens")
    if words is None and tokens is None:
        words = 128
    return run_bench(wanted, Workload(prompt_words=words or 0, prompt_tokens=tokens or 0, **flags))


def run_bench(wanted: BenchRequest, workload: Any) -> int:
    """workload: a ``serving.bench.workload.Workload``. Raises: ConfigError."""
    from headrace.serving.app.bench_report import check_writable, print_table, result_of, write_json
    from headrace.serving.bench.outcome import summarize
    from headrace.serving.bench.targets import BenchError, Server, base_of

    server = Server(base=base_of(wanted.url), key=_key(wanted.api_key_file), limit_s=wanted.timeout_s)
    if wanted.json_file is not None:
        check_writable(wanted.json_file)
    console = Console(stderr=True)
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    try:
        contract, outcomes = asyncio.run(_measure(server, wanted, workload, console))
    except BenchError as error:
        click.echo(f"headrace: {error}", err=True)
        return 1
    found = summarize(outcomes)
    result = result_of(server.base, wanted.api, started, workload, contract, found, outcomes)
    print_table(result, Console())
    if wanted.json_file is not None:
        write_json(wanted.json_file, result)
    return 1 if found["failed"] else 0


async def _measure(server: Any, wanted: BenchRequest, workload: Any, console: Console) -> tuple[Any, Any]:
    from headrace.serving.bench.closed_loop import run
    from headrace.serving.bench.native_target import NativeTarget
    from headrace.serving.bench.openai_target import OpenAITarget
    from headrace.serving.bench.targets import contract_of, model_of

    contract = await contract_of(server)
    with ProgressLine(console) as line:
        if wanted.api == "native":
            async with NativeTarget(server, wanted.model) as native:
                return contract, await run(workload, native, line.show)
        model = wanted.model or await model_of(server)
        async with OpenAITarget(server, model, workload.streams) as openai:
            return contract, await run(workload, openai, line.show)


class ProgressLine:
    """One line that changes on a terminal; elsewhere a line now and then. Use as a context."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("connecting") if console.is_terminal else None
        self._told_s = 0.0

    def __enter__(self) -> "ProgressLine":
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, standing: Any) -> None:
        """standing: a ``serving.bench.closed_loop.Standing``."""
        if self._status is None and standing.seconds - self._told_s < PLAIN_TELL_S:
            return
        self._told_s = standing.seconds
        rate = standing.output_tokens / standing.seconds if standing.seconds else 0.0
        text = (
            f"{standing.done} of {standing.requests} requests, {standing.failed} failed, "
            f"{standing.output_tokens:,} tokens, {rate:,.1f} tokens/s, {standing.seconds:.0f} s"
        )
        if self._status is None:
            self._console.print(text, highlight=False)
        else:
            self._status.update(text)


def _key(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            lines = file.read(MAX_KEY_FILE_BYTES).decode("ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path} cannot be read: {error}") from None
    if not lines or not lines[0].strip():
        raise ConfigError(f"--api-key-file {path}: its first line is empty; put the key there")
    return lines[0].strip()
