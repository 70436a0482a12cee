"""From resolved options to a scheduler configuration, a runner and a launch order. Only build_engine imports JAX.

``resolve`` is arithmetic: the server prints it before anything is loaded.
"""

import sys
from dataclasses import dataclass

import msgspec

from headrace.model.config import ModelConfig
from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.errors import ConfigError
from headrace.serving.edge.engine_connection import EngineLaunch
from headrace.serving.engine.link import encode_frame
from headrace.serving.engine.ports import Progress, Runner

KV_ITEM_BYTES = 4
"""KV is float32."""
QUERY_BLOCK_TOKENS = 64
"""A prefill segment is padded to this many tokens where the chunk allows: a block of queries reads the KV once."""
DEFAULT_KV_BYTES = 1 << 30
LADDER_STEP = 4
"""Between programs of a ladder; a row or token of padding costs less than one more program to compile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeOptions:
    """Tests only: a runner without a model. No command-line option leads here.

    step_ms: each step takes so long. fault: None, or "hang:N", "raise:N", "raise_always:N", "exit:N" (what happens
    in step N), or "fail_start".
    """

    vocab_size: int = 256
    step_ms: float = 0.0
    fault: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Everything that the engine process needs to know; no secrets.

    model: path of a .gguf file or a model directory. pages or kv_bytes: size of the KV pool, one at most; None = enough
    for num_slots full contexts, at most DEFAULT_KV_BYTES. context: None = the model's own. chunk_tokens: most prompt
    tokens of a step, a multiple of page_size. compile_cache: directory of compiled programs; None = none.
    """

    model: str
    page_size: int = 16
    pages: int | None = None
    kv_bytes: int | None = None
    num_slots: int = 16
    context: int | None = None
    chunk_tokens: int = 256
    prefix_cache: bool = True
    max_queued_requests: int = 512
    max_queued_prompt_tokens: int = 524_288
    compile_cache: str | None = None
    fake: FakeOptions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedEngine:
    """scheduler: what runs. kv_bytes_per_token: of all layers. kv_bytes: of the pool, null page included."""

    scheduler: SchedulerConfig
    kv_bytes_per_token: int
    kv_bytes: int

    @property
    def full_contexts(self) -> float:
        """How many sequences of max_context tokens the pool holds."""
        config = self.scheduler
        return (config.num_pages - 1) / config.max_pages_per_sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    runner: Runner
    resolved: ResolvedEngine
    model_hash: str
    weights_bytes: int
    device: str


def resolve(options: EngineOptions, model: ModelConfig) -> ResolvedEngine:
    """Check the options against the model and fill in the defaults. Raises ConfigError naming option and remedy."""
    for name in ("page_size", "num_slots", "chunk_tokens"):
        if getattr(options, name) < 1:
            raise ConfigError(f"{name} is {getattr(options, name)}; it must be at least 1")
    context = model.max_context if options.context is None else options.context
    if context > model.max_context:
        raise ConfigError(f"context {context} is more than the {model.max_context} positions of the model")
    if options.chunk_tokens % options.page_size:
        near = max(options.chunk_tokens // options.page_size, 1) * options.page_size
        raise ConfigError(
            f"chunk_tokens {options.chunk_tokens} must be a multiple of page_size {options.page_size}; try {near}"
        )
    block = query_block(options.page_size, options.chunk_tokens)
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * KV_ITEM_BYTES
    page_bytes = per_token * options.page_size
    scheduler = SchedulerConfig(
        num_slots=options.num_slots,
        page_size=options.page_size,
        num_pages=_num_pages(options, context, page_bytes),
        max_context=context,
        chunk_tokens=options.chunk_tokens,
        block_tokens=block,
        decode_rows=ladder(1, options.num_slots),
        prefill_tokens=ladder(block, options.chunk_tokens),
        max_queued_requests=options.max_queued_requests,
        max_queued_prompt_tokens=options.max_queued_prompt_tokens,
        prefix_cache=options.prefix_cache,
    )
    return ResolvedEngine(scheduler=scheduler, kv_bytes_per_token=per_token, kv_bytes=page_bytes * scheduler.num_pages)


def query_block(page_size: int, chunk_tokens: int) -> int:
    """The largest whole number of pages that divides the chunk and is at most QUERY_BLOCK_TOKENS (at least a page)."""
    pages_in_chunk = chunk_tokens // page_size
    fitting = [
        n for n in range(1, pages_in_chunk + 1) if pages_in_chunk % n == 0 and n * page_size <= QUERY_BLOCK_TOKENS
    ]
    return page_size * max(fitting, default=1)


def ladder(first: int, last: int) -> tuple[int, ...]:
    """first, then steps of LADDER_STEP, ending with last; a step that is not below last falls away."""
    rungs = []
    rung = first
    while rung < last:
        rungs.append(rung)
        rung *= LADDER_STEP
    return (*rungs, last)


def _num_pages(options: EngineOptions, context: int, page_bytes: int) -> int:
    if options.pages is not None and options.kv_bytes is not None:
        raise ConfigError("pages and kv_bytes both give the size of the KV pool; set one of them")
    if options.pages is not None:
        return options.pages
    wanted = 1 + options.num_slots * -(-context // options.page_size)
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


def build_engine(options: EngineOptions, progress: Progress) -> BuiltEngine:
    """Load the model and make its runner; not warmed up. Raises ModelFileError or ConfigError."""
    if options.fake is not None:
        from headrace.serving.app.fake_engine import build_fake_engine

        return build_fake_engine(options, options.fake)
    from headrace.model.config_files import read_config

    resolved = resolve(options, read_config(options.model))  # before the seconds that JAX takes to load
    import jax

    from headrace.model.load import load_model
    from headrace.serving.runner.compile_cache import use_compile_cache
    from headrace.serving.runner.runner import JaxRunner

    use_compile_cache(options.compile_cache)
    model = load_model(options.model, progress=lambda done, total: progress("loading weights", done, total))
    weights_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(model.weights))
    device = jax.devices()[0]
    return BuiltEngine(
        runner=JaxRunner(model, resolved.scheduler),
        resolved=resolved,
        model_hash=model.model_hash,
        weights_bytes=weights_bytes,
        device=f"{device.platform}:{device.device_kind}",
    )
