"""From options to a scheduler configuration, a runner and a launch order. Only build_engine imports JAX.

``check`` and ``resolve`` are arithmetic. What depends on the device (types, page size, on accelerators the number of
pages) is known in the engine process alone, which reports it when it is ready.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

import msgspec

from headrace.model.config import ModelConfig
from headrace.serving.app.logs import LogFormat
from headrace.serving.core.config import PreemptionPolicy, SchedulerConfig
from headrace.serving.core.errors import ConfigError
from headrace.serving.core.kv_memory import DeviceMemory, KVFormat
from headrace.serving.edge.engine_connection import EngineLaunch
from headrace.serving.engine.host_messages import HostPlace
from headrace.serving.engine.journal_file import JournalOptions
from headrace.serving.engine.link import encode_frame
from headrace.serving.engine.messages import Topology
from headrace.serving.engine.ports import Hosts, Progress, Runner
from headrace.sharding.errors import MeshError
from headrace.sharding.mesh_shape import MeshShape, parse_mesh

QUERY_BLOCK_TOKENS = 64
"""A prefill segment is padded to this many tokens where the chunk allows: a block of queries reads the KV once."""
FINE_QUERY_BLOCK_TOKENS = 16
"""With an objective for the gap between tokens, which late chunks of a long prompt keep to only if they are short."""
DEFAULT_KV_BYTES = 1 << 30
"""On CPU, where memory is shared with everything else."""
DEFAULT_SWAP_BYTES = 256 << 20
"""Of host memory, of each lane, for preempted requests; the system gives it as it is used. 5,800 tokens of
SmolLM2-135M."""
SWAP_POOLS = 4
"""No more host pages than so many times what all streams of a lane take at full length."""
DEFAULT_MEMORY_FRACTION = 0.9
"""On accelerators. The rest is for code, fragments and what the compiler does not report."""
DEVICES = ("auto", "cpu", "gpu", "tpu")
ATTENTIONS = ("auto", "tpu", "gpu", "cpu", "reference")
ACTIVATIONS = ("auto", "exact", "int16", "int8")
DTYPES = ("auto", "float32", "bfloat16")
WEIGHTS = ("native", "bf16", "f32", "int8", "int4")
KV_DTYPES = ("auto", "float32", "bfloat16", "int8", "fp8")
LADDER_STEP = 4
"""Between programs of a ladder; a row or token of padding costs less than one more program to compile."""
FINE_LADDER_STEP = 2
"""Between prefill programs where steps have to keep to an objective: there a program that is too dear is not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeOptions:
    """Tests only: a runner without a model. No command-line option leads here.

    step_ms: each step takes so long. num_experts: 0 = none. fault: None, or "hang:N", "raise:N", "raise_always:N",
    "exit:N" (what happens in step N), or "fail_start".
    """

    vocab_size: int = 256
    step_ms: float = 0.0
    fault: str | None = None
    num_experts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Everything that the engine process needs to know; no secrets.

    model: path of a .gguf file or a model directory. device, attention, activations, dtype, weights, kv_dtype: see
    DEVICES and the others. mesh: such as "tensor=4", or a .toml file; None = one device. num_slots: of all lanes
    together; each gets its share, rounded up. page_size: None = as the kernels like it. pages, kv_bytes or
    memory_fraction: size of the KV pool of each lane, one at most; None = on accelerators DEFAULT_MEMORY_FRACTION of
    their memory, on CPU enough for num_slots full contexts, at most DEFAULT_KV_BYTES. context: None = the model's own.
    chunk_tokens: most prompt tokens of a step, a multiple of page_size. compile_cache: directory of compiled programs;
    None = none. hosts: this host's place among several that serve one model together; None = it is alone. journal: None
    = none. interpret: tests only, no command-line option leads here: kernels run in Pallas's plain interpreter, on any
    device.

    swap_bytes: host memory of each lane for preempted requests; None = DEFAULT_SWAP_BYTES, or none with hosts.
    preemption: a PreemptionPolicy. inter_token_ms, aging_s, deterministic: see SchedulerConfig.
    """

    model: str
    device: str = "auto"
    mesh: str | None = None
    attention: str = "auto"
    activations: str = "auto"
    dtype: str = "auto"
    weights: str = "native"
    kv_dtype: str = "auto"
    page_size: int | None = None
    pages: int | None = None
    kv_bytes: int | None = None
    memory_fraction: float | None = None
    num_slots: int = 16
    context: int | None = None
    chunk_tokens: int = 256
    prefix_cache: bool = True
    max_queued_requests: int = 512
    max_queued_prompt_tokens: int = 524_288
    compile_cache: str | None = None
    hosts: HostPlace | None = None
    swap_bytes: int | None = None
    preemption: str = PreemptionPolicy.AUTO.value
    inter_token_ms: float | None = None
    aging_s: float = 10.0
    deterministic: bool = False
    journal: JournalOptions | None = None
    log_format: LogFormat = LogFormat.TEXT
    interpret: bool = False
    fake: FakeOptions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedEngine:
    """scheduler: what runs. kv: how pages are stored. kv_bytes_per_token: of all layers, with factors. memory: what the
    number of pages comes from, None where it was given or is CPU's default."""

    scheduler: SchedulerConfig
    kv: KVFormat
    kv_bytes_per_token: int
    memory: DeviceMemory | None = None

    @property
    def kv_bytes(self) -> int:
        """Of the pools of all lanes, null pages included."""
        return self.kv_bytes_per_token * self.scheduler.page_size * self.scheduler.num_pages * self.scheduler.num_lanes

    def in_memory(self, memory: DeviceMemory) -> "ResolvedEngine":
        """The same with as many pages as fit. Raises: ConfigError where none does."""
        return replace(self.with_pages(memory.num_pages), memory=memory)

    def with_pages(self, num_pages: int) -> "ResolvedEngine":
        """The same with another number of pages."""
        return replace(self, scheduler=replace(self.scheduler, num_pages=num_pages))


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """topology: the devices. mesh: how many of them lie along each axis. attention: whose kernels run; why: these, for
    people. dtype: of weights and products. weights: how the matrices of products lie in memory. activations, scheme,
    scheme_lines, family, architecture, stored_types: see ``Ready``. numerics: of device and libraries; ``numerics_of``
    adds the shapes of programs."""

    runner: Runner
    resolved: ResolvedEngine
    model_hash: str
    weights_bytes: int
    topology: Topology
    attention: str
    dtype: str
    mesh: str = "tensor=1"
    weights: str = "native"
    activations: str = "exact"
    why: str = ""
    scheme: Mapping[str, Any] = field(default_factory=dict)
    scheme_lines: tuple[str, ...] = ()
    family: str = ""
    architecture: str = ""
    stored_types: Mapping[str, int] = field(default_factory=dict)
    numerics: Mapping[str, str] = field(default_factory=dict)

    @property
    def measured(self) -> SchedulerConfig:
        """The scheduler's configuration with what warm-up measured."""
        return replace(self.resolved.scheduler, swap_page_s=self.runner.swap_page_seconds or 0.0)


def mesh_shape(options: EngineOptions) -> MeshShape:
    """Raises: ConfigError naming --mesh."""
    try:
        return MeshShape() if options.mesh is None else parse_mesh(options.mesh)
    except MeshError as error:
        raise ConfigError(f"--mesh: {error}") from error


def check(options: EngineOptions, model: ModelConfig) -> None:
    """Refuse what no device would take, before an engine is started. Raises: ConfigError naming option and remedy."""
    mesh, hosts = mesh_shape(options), 1 if options.hosts is None else options.hosts.num_hosts
    if mesh.num_devices % hosts:
        raise ConfigError(
            f"--mesh {mesh}: its {mesh.num_devices} devices cannot be shared out evenly over --hosts {hosts}"
        )
    floats = options.kv_dtype in ("float32", "bfloat16")
    resolve(options, model, KVFormat(dtype=options.kv_dtype if floats else "int8"))


def resolve(options: EngineOptions, model: ModelConfig, kv: KVFormat = KVFormat()) -> ResolvedEngine:
    """Check the options against the model and the device's way to store KV, and fill in the defaults.

    The number of pages is that of a CPU; ``ResolvedEngine.in_memory`` changes it. Raises: ConfigError naming option and
    remedy.
    """
    page_size = kv.page_tokens if options.page_size is None else options.page_size
    _check_values(options, page_size, kv)
    context = model.max_context if options.context is None else options.context
    if context > model.max_context:
        raise ConfigError(f"context {context} is more than the {model.max_context} positions of the model")
    if options.chunk_tokens % page_size:
        near = max(options.chunk_tokens // page_size, 1) * page_size
        raise ConfigError(
            f"chunk_tokens {options.chunk_tokens} must be a multiple of page_size {page_size}; try {near}"
        )
    lanes = mesh_shape(options).data
    slots = -(-options.num_slots // lanes)
    per_token = kv.token_bytes(num_layers=model.num_layers, num_kv_heads=model.num_kv_heads, head_dim=model.head_dim)
    wanted = 1 + slots * -(-context // page_size)
    scheduler = SchedulerConfig(
        num_lanes=lanes,
        num_slots=slots,
        page_size=page_size,
        num_pages=_num_pages(options, wanted, per_token * page_size),
        max_context=context,
        chunk_tokens=options.chunk_tokens,
        **program_shapes(
            page_size=page_size,
            num_slots=slots,
            chunk_tokens=options.chunk_tokens,
            has_objective=options.inter_token_ms is not None,
            is_deterministic=options.deterministic,
        ),
        max_queued_requests=options.max_queued_requests,
        max_queued_prompt_tokens=options.max_queued_prompt_tokens,
        prefix_cache=options.prefix_cache,
        inter_token_s=None if options.inter_token_ms is None else options.inter_token_ms / 1e3,
        num_swap_pages=_num_swap_pages(options, SWAP_POOLS * (wanted - 1), per_token * page_size),
        preemption=PreemptionPolicy(options.preemption),
        aging_s=options.aging_s,
        deterministic=options.deterministic,
    )
    return ResolvedEngine(scheduler=scheduler, kv=kv, kv_bytes_per_token=per_token)


def _check_values(options: EngineOptions, page_size: int, kv: KVFormat) -> None:
    for flag, value, known in (
        ("--device", options.device, DEVICES),
        ("--attention", options.attention, ATTENTIONS),
        ("--activations", options.activations, ACTIVATIONS),
        ("--dtype", options.dtype, DTYPES),
        ("--weights", options.weights, WEIGHTS),
        ("--kv-dtype", options.kv_dtype, KV_DTYPES),
        ("--preemption", options.preemption, tuple(policy.value for policy in PreemptionPolicy)),
    ):
        if value not in known:
            raise ConfigError(f"{flag} {value!r} is not known; it can be {', '.join(known)}")
    for name, value in (
        ("page_size", page_size),
        ("num_slots", options.num_slots),
        ("chunk_tokens", options.chunk_tokens),
    ):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    if page_size % kv.page_multiple:
        near = -(-page_size // kv.page_multiple) * kv.page_multiple
        raise ConfigError(
            f"--page-size {page_size} must be a multiple of {kv.page_multiple}, since {kv.why_multiple}; try {near}"
        )
    fraction = options.memory_fraction
    if fraction is not None and not 0 < fraction <= 1:
        raise ConfigError(f"--memory-fraction {fraction:g} must be above 0 and at most 1")
    given = [name for name in ("pages", "kv_bytes", "memory_fraction") if getattr(options, name) is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} both give the size of the KV pool; set one of them")


class ProgramShapes(TypedDict):
    """Fields of a SchedulerConfig that say which programs there are."""

    block_tokens: int
    decode_rows: tuple[int, ...]
    prefill_tokens: tuple[int, ...]


def program_shapes(
    *, page_size: int, num_slots: int, chunk_tokens: int, has_objective: bool, is_deterministic: bool
) -> ProgramShapes:
    """Of a server, and of one that is simulated. has_objective: for the gap between tokens; finer ladders then."""
    most, step = (FINE_QUERY_BLOCK_TOKENS, FINE_LADDER_STEP) if has_objective else (QUERY_BLOCK_TOKENS, LADDER_STEP)
    block = query_block(page_size, chunk_tokens, most)
    return ProgramShapes(
        block_tokens=block,
        decode_rows=(num_slots,) if is_deterministic else ladder(1, num_slots),
        prefill_tokens=(chunk_tokens,) if is_deterministic else ladder(block, chunk_tokens, step),
    )


def query_block(page_size: int, chunk_tokens: int, most: int = QUERY_BLOCK_TOKENS) -> int:
    """The largest whole number of pages that divides the chunk and is at most so many tokens (at least a page)."""
    pages_in_chunk = chunk_tokens // page_size
    fitting = [n for n in range(1, pages_in_chunk + 1) if pages_in_chunk % n == 0 and n * page_size <= most]
    return page_size * max(fitting, default=1)


def ladder(first: int, last: int, step: int = LADDER_STEP) -> tuple[int, ...]:
    """first, then steps of a factor, ending with last; a step that is not below last falls away."""
    rungs = []
    rung = first
    while rung < last:
        rungs.append(rung)
        rung *= step
    return (*rungs, last)


def _num_swap_pages(options: EngineOptions, most: int, page_bytes: int) -> int:
    """Raises: ConfigError naming option and remedy."""
    given = options.swap_bytes
    if given is None:
        has_none = options.hosts is not None or options.preemption == PreemptionPolicy.RECOMPUTE
        given = 0 if has_none else DEFAULT_SWAP_BYTES
    elif given and options.hosts is not None:
        raise ConfigError("--swap-memory keeps KV in the memory of one host, and --hosts has several; leave it out")
    pages = min(given // page_bytes, most)
    if options.preemption == PreemptionPolicy.SWAP and not pages:
        why = "with --hosts there is none" if options.hosts is not None else f"a page takes {page_bytes} bytes"
        raise ConfigError(f"--preemption swap needs --swap-memory for at least a page; {why}")
    return pages


def _num_pages(options: EngineOptions, wanted: int, page_bytes: int) -> int:
    if options.pages is not None:
        return options.pages
    limit = (DEFAULT_KV_BYTES if options.kv_bytes is None else options.kv_bytes) // page_bytes
    if limit < 2:
        raise ConfigError(f"kv_bytes {options.kv_bytes} holds no page; two pages take {2 * page_bytes} bytes")
    return min(wanted, limit) if options.kv_bytes is None else limit


def engine_launch(options: EngineOptions) -> EngineLaunch:
    """How the edge starts an engine process with these options."""
    command = (sys.executable, "-P", "-m", "headrace.serving.app.engine_process")
    return EngineLaunch(command=command, first_frame=encode_frame(options))


def decode_options(body: bytes) -> EngineOptions:
    """Raises msgspec.MsgspecError."""
    return msgspec.msgpack.decode(body, type=EngineOptions)


def build_engine(options: EngineOptions, progress: Progress, hosts: Hosts | None = None) -> BuiltEngine:
    """Load the model and make its runner; not warmed up. hosts: the others, where there are several.

    Raises: ModelFileError, ConfigError or HostsError.
    """
    if options.fake is not None:
        from headrace.serving.app.fake_engine import build_fake_engine

        return build_fake_engine(options, options.fake, progress, hosts)
    from headrace.model.config_files import read_config

    config = read_config(options.model)
    check(options, config)  # before the seconds that JAX takes to load
    from headrace.serving.app.jax_engine import build_jax_engine

    return build_jax_engine(options, config, progress, hosts)
