"""What the commands show a person on standard error: configuration, memory arithmetic, progress, warm-up ledger."""

import platform
from importlib.metadata import version
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from headrace.model.config import ModelConfig
from headrace.serving.app.build import EngineOptions
from headrace.serving.app.options import ServeOptions
from headrace.serving.app.tenant_flags import LimitOptions
from headrace.serving.core.kv_memory import DeviceMemory, KVFormat
from headrace.serving.engine.host_messages import HostPlace
from headrace.serving.engine.journal_file import JournalOptions
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


def print_configuration(console: Console, options: ServeOptions, model: ModelConfig) -> None:
    """Everything that is decided before the engine looks at its device."""
    engine = options.engine
    _print_rows(
        console,
        ("Headrace", f"{version('headrace')}, JAX {version('jax')}, Python {platform.python_version()}"),
        ("model", _model_text(options.model_name, str(options.model_path), model)),
        ("asked for", _wishes_text(engine)),
        ("steps", _steps_text(engine)),
        ("queue", _queue_text(engine)),
        ("limits", _limits_text(options.limits)),
        *(() if engine.hosts is None else (("hosts", _hosts_text(engine.hosts)),)),
        ("access", _access_text(options)),
        ("stopping", f"SIGTERM lets running requests go on for up to {options.drain_s:g} s"),
        ("engine death", _death_text(options)),
        ("readiness", _readiness_text(options)),
        ("compiled code", engine.compile_cache or "not kept"),
        *(() if engine.journal is None else (("journal", _journal_text(engine.journal)),)),
    )


def print_follower(console: Console, engine: EngineOptions, place: HostPlace, name: str, model: ModelConfig) -> None:
    """The same for a host without clients."""
    _print_rows(
        console,
        ("Headrace", f"{version('headrace')}, JAX {version('jax')}, Python {platform.python_version()}"),
        ("model", _model_text(name, engine.model, model)),
        ("asked for", _wishes_text(engine)),
        ("steps", _steps_text(engine)),
        ("hosts", _hosts_text(place)),
        ("access", "no clients: what concerns them (sockets, keys, queue, drain) counts on rank 0 alone"),
        ("stopping", "with rank 0, after it has drained"),
        ("engine death", "of any rank ends all"),
        ("compiled code", engine.compile_cache or "not kept"),
    )


def _journal_text(journal: JournalOptions) -> str:
    return f"{journal.path}, up to {journal.limit_bytes:,} bytes: the ids of all prompts and answers"


def _hosts_text(place: HostPlace) -> str:
    return (
        f"rank {place.rank} of {place.num_hosts}, which meet at {place.coordinator} within {place.join_s:g} s; not "
        f"encrypted, for a private network"
    )


def _print_rows(console: Console, *rows: tuple[str, str]) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for name, text in rows:
        grid.add_row(name, text)
    console.print(grid, highlight=False)


def print_ledger(console: Console, model: ModelConfig, ready: Ready) -> None:
    """What the engine came to on its device, with the memory arithmetic; one row per compiled program; the totals."""
    _print_rows(
        console,
        ("device", _topology_text(ready)),
        ("kernels", _kernels_text(ready)),
        ("types", f"{_weights_text(ready)}, KV {ready.kv_dtype}"),
        *((("weights", "\n".join(ready.scheme_lines)),) if ready.scheme_lines else ()),
        *_memory_rows(model, ready),
    )
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("program")
    for heading in ("seconds", "scratch MB", "from cache"):
        table.add_column(heading, justify="right")
    for program in ready.programs:
        table.add_row(*_ledger_row(program))
    console.print(table, highlight=False)
    console.print(
        f"{ready.topology.device}: {ready.weights_bytes / 1e6:,.0f} MB of weights, {len(ready.programs)} programs, "
        f"ready after {ready.warmup_seconds:.1f} s",
        highlight=False,
    )


def _kernels_text(ready: Ready) -> str:
    """With the reason for them, and how products read their inputs where that is a choice."""
    inputs = f", inputs of products with quantized weights {ready.activations}" if ready.attention == "cpu" else ""
    return f"{ready.attention}{inputs}{f'; {ready.why}' if ready.why else ''}"


def _readiness_text(options: ServeOptions) -> str:
    records = ", ".join(map(str, options.probes)) or "one that comes with Headrace, where it is for this model"
    otherwise = "without a record not ready" if options.require_probe else "without a record unchecked"
    return f"by probe record: {records}; every {options.probe_interval_s:g} s; {otherwise}"


def _death_text(options: ServeOptions) -> str:
    if options.engine.hosts is not None:
        return "of any rank ends all with an error"
    return "restarts with back-off" if options.restart_engine else "ends the server with an error"


def _topology_text(ready: Ready) -> str:
    found = ready.topology
    if found.num_devices == 1:
        return f"{found.device}, mesh {ready.mesh}"
    hosts = f" of {ready.hosts} hosts, of which this is rank {ready.rank}" if ready.hosts > 1 else ""
    return f"{found.num_devices} × {found.device}{hosts}, mesh {ready.mesh}, joined by {found.link}"


def _ledger_row(program: ProgramInfo) -> tuple[str, str, str, str]:
    return (
        program.name,
        f"{program.seconds:.2f}",
        f"{program.temp_bytes / 1e6:.1f}",
        "yes" if program.from_cache else "no",
    )


def _model_text(name: str, path: str, model: ModelConfig) -> str:
    return (
        f"{name}: {model.family}, {model.num_layers} layers of width {model.width}, {model.num_heads} "
        f"query and {model.num_kv_heads} KV heads of {model.head_dim}, {model.vocab_size:,} ids\n{path}"
    )


def _weights_text(ready: Ready) -> str:
    if ready.weights == "native":
        return f"weights and products {ready.dtype}"
    return f"weights of products {ready.weights}; products {ready.dtype}"


def _wishes_text(engine: EngineOptions) -> str:
    place = f"--device {engine.device} --mesh {engine.mesh or 'tensor=1'}"
    types = (
        f"--attention {engine.attention} --activations {engine.activations} --dtype {engine.dtype} "
        f"--weights {engine.weights} --kv-dtype {engine.kv_dtype}"
    )
    return f"{place} {types}; what they come to is printed when the engine is ready"


def _swap_rows(ready: Ready, lanes: str) -> tuple[tuple[str, str], ...]:
    if not ready.num_swap_pages:
        return ()
    size = ready.num_lanes * ready.num_swap_pages * ready.page_size * ready.kv_bytes_per_token
    return (
        (
            "swap space",
            f"{lanes}{ready.num_swap_pages:,} pages of host memory, up to {size / 1e6:,.0f} MB; a page takes "
            f"{ready.swap_page_s * 1e3:.1f} ms there and back",
        ),
    )


def _memory_rows(model: ModelConfig, ready: Ready) -> tuple[tuple[str, str], ...]:
    kv, pages = KVFormat(dtype=ready.kv_dtype), ready.num_pages - 1
    tokens = ready.num_lanes * pages * ready.page_size
    per_stream = min(pages // ready.num_slots * ready.page_size, ready.max_context)
    contexts = pages / -(-ready.max_context // ready.page_size)
    lanes, null = "", "null page"
    if ready.num_lanes > 1:
        lanes, null = f"{ready.num_lanes} lanes × ", "null pages"
    head = f"{model.head_dim} × {kv.item_bytes}"
    head = f"({head} + {kv.scale_bytes} for its factor)" if kv.scale_bytes else head
    return (
        (
            "KV per token",
            f"2 × {model.num_layers} layers × {model.num_kv_heads} heads × {head} bytes "
            f"= {ready.kv_bytes_per_token:,} bytes",
        ),
        *(() if ready.memory is None else (("memory", _memory_text(ready.memory)),)),
        (
            "KV pool",
            f"{lanes}{pages:,} pages × {ready.page_size} tokens = {tokens:,} tokens, {ready.kv_bytes / 1e6:,.0f} MB "
            f"with the {null}",
        ),
        *_swap_rows(ready, lanes),
        (
            "fits",
            f"{contexts:.1f} streams of the whole context ({ready.max_context:,} tokens), or "
            f"{ready.num_slots} streams of {per_stream:,} tokens each{' in a lane' * (ready.num_lanes > 1)}",
        ),
    )


def _memory_text(memory: DeviceMemory) -> str:
    """The pages get what is left."""
    return (
        f"{memory.fraction:g} of {memory.limit_bytes / 1e6:,.0f} MB, less {memory.weights_bytes / 1e6:,.0f} MB of "
        f"weights, {memory.temporary_bytes / 1e6:,.0f} MB of temporaries, "
        f"{(memory.state_bytes + memory.steps_bytes) / 1e6:,.0f} MB of sampling state and steps; a page takes "
        f"{memory.page_bytes:,} bytes"
    )


def _steps_text(engine: EngineOptions) -> str:
    return (
        f"up to {engine.num_slots} streams and {engine.chunk_tokens} prompt tokens a step; prefix cache "
        f"{'on' if engine.prefix_cache else 'off'}"
    )


def _queue_text(engine: EngineOptions) -> str:
    return f"at most {engine.max_queued_requests:,} requests and {engine.max_queued_prompt_tokens:,} prompt tokens wait"


def _limits_text(limits: LimitOptions) -> str:
    objective = "first tokens without an objective"
    if limits.first_token_ms is not None:
        objective = f"first tokens within {limits.first_token_ms:,} ms by estimate, or refused"
    named = (
        ("streams", limits.max_live_streams),
        ("tokens in flight", limits.max_tokens_in_flight),
        ("live pages", limits.max_live_pages),
    )
    most = "".join(f"; at most {value:,} {name}" for name, value in named if value is not None)
    tenants = "all tenants alike" if limits.tenants is None else f"tenants as in {limits.tenants}"
    shared = "" if limits.shared_prefixes is None else f"; shared prefixes of {limits.shared_prefixes}"
    return f"{objective}{most}; {tenants}{shared}"


def _access_text(options: ServeOptions) -> str:
    keys = "no keys" if options.api_keys is None else f"keys of {options.api_keys}"
    reach = "this machine alone" if options.is_loopback else f"every machine that reaches {options.host}"
    origins = ", ".join(("the server's own", *options.allow_origins))
    return f"{reach}; {keys}; origins: {origins}; {options.scheme}"
