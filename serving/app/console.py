"""What the commands show a person on standard error: configuration, memory arithmetic, progress, warm-up ledger."""

import platform
from importlib.metadata import version
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from headrace.model.config import ModelConfig
from headrace.serving.app.build import KV_ITEM_BYTES, ResolvedEngine
from headrace.serving.app.options import ServeOptions
from headrace.serving.engine.messages import ProgramInfo, Ready


class ProgressDisplay:
    """One bar that changes its text; one line per text where standard error is no terminal. Use as a context."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._what: str | None = None
        self._task: TaskID | None = None
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )

    def __enter__(self) -> "ProgressDisplay":
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def update(self, what: str, done: int, total: int) -> None:
        """A ``Progress`` callback: what is being done, and how far it is."""
        if self._console.is_terminal:
            if self._task is None:
                self._task = self._bars.add_task(what)
            self._bars.update(self._task, description=what, completed=done, total=total or None)
        elif what != self._what:
            self._console.print(what, highlight=False)
        self._what = what


def print_configuration(console: Console, options: ServeOptions, model: ModelConfig, resolved: ResolvedEngine) -> None:
    """Everything that was decided before loading, with the memory arithmetic."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for name, text in (
        ("Headrace", f"{version('headrace')}, JAX {version('jax')}, Python {platform.python_version()}"),
        ("model", _model_text(options, model)),
        *_memory_rows(model, resolved),
        ("steps", _steps_text(resolved)),
        ("queue", _queue_text(resolved)),
        ("access", _access_text(options)),
        ("stopping", f"SIGTERM lets running requests go on for up to {options.drain_s:g} s"),
        ("engine death", "restarts with back-off" if options.restart_engine else "ends the server with an error"),
        ("compiled code", options.engine.compile_cache or "not kept"),
    ):
        grid.add_row(name, text)
    console.print(grid, highlight=False)


def print_ledger(console: Console, ready: Ready) -> None:
    """One row per compiled program, then the totals."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("program")
    for heading in ("seconds", "scratch MB", "from cache"):
        table.add_column(heading, justify="right")
    for program in ready.programs:
        table.add_row(*_ledger_row(program))
    console.print(table, highlight=False)
    console.print(
        f"{ready.device}: {ready.weights_bytes / 1e6:,.0f} MB of weights, {len(ready.programs)} programs, ready after "
        f"{ready.warmup_seconds:.1f} s",
        highlight=False,
    )


def _ledger_row(program: ProgramInfo) -> tuple[str, str, str, str]:
    return (
        program.name,
        f"{program.seconds:.2f}",
        f"{program.temp_bytes / 1e6:.1f}",
        "yes" if program.from_cache else "no",
    )


def _model_text(options: ServeOptions, model: ModelConfig) -> str:
    return (
        f"{options.model_name}: {model.family}, {model.num_layers} layers of width {model.width}, {model.num_heads} "
        f"query and {model.num_kv_heads} KV heads of {model.head_dim}, {model.vocab_size:,} ids\n{options.model_path}"
    )


def _memory_rows(model: ModelConfig, resolved: ResolvedEngine) -> tuple[tuple[str, str], ...]:
    config = resolved.scheduler
    pages = config.num_pages - 1
    tokens = pages * config.page_size
    per_stream = pages // config.num_slots * config.page_size
    return (
        (
            "KV per token",
            f"2 × {model.num_layers} layers × {model.num_kv_heads} heads × {model.head_dim} × {KV_ITEM_BYTES} bytes "
            f"= {resolved.kv_bytes_per_token:,} bytes",
        ),
        (
            "KV pool",
            f"{pages:,} pages × {config.page_size} tokens = {tokens:,} tokens, {resolved.kv_bytes / 1e6:,.0f} MB "
            f"with the null page",
        ),
        (
            "fits",
            f"{resolved.full_contexts:.1f} streams of the whole context ({config.max_context:,} tokens), or "
            f"{config.num_slots} streams of {min(per_stream, config.max_context):,} tokens each",
        ),
    )


def _steps_text(resolved: ResolvedEngine) -> str:
    config = resolved.scheduler
    return (
        f"up to {config.num_slots} streams and {config.chunk_tokens} prompt tokens a step; programs: decode "
        f"{'/'.join(map(str, config.decode_rows))}, mixed {'/'.join(map(str, config.prefill_tokens))}; prefix cache "
        f"{'on' if config.prefix_cache else 'off'}"
    )


def _queue_text(resolved: ResolvedEngine) -> str:
    config = resolved.scheduler
    return f"at most {config.max_queued_requests:,} requests and {config.max_queued_prompt_tokens:,} prompt tokens wait"


def _access_text(options: ServeOptions) -> str:
    keys = "no keys" if options.api_keys is None else f"keys of {options.api_keys}"
    reach = "this machine alone" if options.is_loopback else f"every machine that reaches {options.host}"
    origins = ", ".join(("the server's own", *options.allow_origins))
    return f"{reach}; {keys}; origins: {origins}; {options.scheme}"
