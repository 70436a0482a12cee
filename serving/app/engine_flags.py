"""Options of the engine that ``headrace serve`` and ``headrace generate`` share."""

from collections.abc import Callable
from typing import Any

import click

from headrace.model.pull import ResolvedModel, default_cache_dir
from headrace.serving.app.build import (
    ACTIVATIONS,
    ATTENTIONS,
    DEFAULT_MEMORY_FRACTION,
    DEFAULT_SWAP_BYTES,
    DEVICES,
    DTYPES,
    KV_DTYPES,
    WEIGHTS,
    EngineOptions,
)
from headrace.serving.app.help_sections import A_FOLDER, ByteSize, section
from headrace.serving.app.logs import LogFormat
from headrace.serving.app.observe_flags import journal_options
from headrace.serving.app.options import default_compile_cache
from headrace.serving.core.config import PreemptionPolicy
from headrace.serving.engine.host_messages import HostPlace

compute = section("Compute")
memory = section("Memory and steps")
scheduling = section("Scheduling")
running = section("Running")


def _compute_options() -> tuple[Callable[..., Any], ...]:
    return (
        compute(
            "--device", type=click.Choice(DEVICES), default="auto", help="Where the model runs; auto: as JAX has it."
        ),
        compute(
            "--mesh",
            help="Devices along each axis, such as data=2,tensor=4, or a .toml file with a table [mesh]: tensor cuts "
            "heads, widths and vocabulary, expert experts, stage layers; data copies the model.  [default: one device]",
        ),
        compute(
            "--attention",
            type=click.Choice(ATTENTIONS),
            default="auto",
            help="Whose kernels run; auto: the device's, on CPU where they can be compiled and run this model, else "
            "reference (plain XLA), with the reason. Nothing falls back later.",
        ),
        compute(
            "--activations",
            type=click.Choice(ACTIVATIONS),
            default="auto",
            help="How the CPU's kernels read inputs of products with quantized weights: exact (float32), int16 (auto: "
            "the same greedy tokens in all our checks) or int8 (faster; some tokens differ).",
        ),
        compute(
            "--dtype",
            type=click.Choice(DTYPES),
            default="auto",
            help="Type of weights and products; auto: bfloat16 on GPU and TPU, float32 on CPU.",
        ),
        compute(
            "--weights",
            type=click.Choice(WEIGHTS),
            default="native",
            help="int8: matrices of products as 8-bit integers with a factor for each output channel; native: in the "
            "type of --dtype.",
        ),
        compute(
            "--kv-dtype",
            type=click.Choice(KV_DTYPES),
            default="auto",
            help="Type of stored keys and values; auto: that of --dtype, fp8: the chip's own 8-bit float.",
        ),
    )


def _scheduling_options() -> tuple[Callable[..., Any], ...]:
    return (
        scheduling(
            "--inter-token-ms",
            type=click.FloatRange(0, min_open=True),
            help="Longest gap wanted between two tokens of a stream: prompts are read in smaller chunks meanwhile, by "
            "measured times of steps.  [default: chunks of --chunk-tokens]",
        ),
        scheduling(
            "--preemption",
            type=click.Choice([policy.value for policy in PreemptionPolicy]),
            default=PreemptionPolicy.AUTO.value,
            help="What becomes of the KV of a request that has to make way: copied to host memory, computed again, or "
            "whichever costs less by measured times.",
        ),
        scheduling(
            "--swap-memory",
            type=ByteSize(),
            help="Bytes of host memory of each copy of the model for such KV; 0: none.  "
            f"[default: {DEFAULT_SWAP_BYTES >> 20}MiB; 0 with --hosts]",
        ),
        scheduling(
            "--aging-seconds",
            type=click.FloatRange(0, min_open=True),
            default=10.0,
            help="A priority class that was not served for so long counts one class higher.",
        ),
        scheduling(
            "--deterministic",
            is_flag=True,
            help="The same request gives the same bits at any load: streams and prompts never share a step, and KV is "
            "never computed twice. Slower.",
        ),
    )


def engine_options(max_streams: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options that ``serve`` and ``generate`` share, listed in this order. max_streams: its default."""
    options = (
        *_compute_options(),
        memory("--context", type=int, help="Most tokens of a request, prompt and reply.  [default: the model's]"),
        memory(
            "--max-streams",
            type=int,
            default=max_streams,
            help="Requests that generate at the same time, shared out among copies of the model.",
        ),
        memory(
            "--page-size",
            type=int,
            help="Tokens in a page of KV memory.  [default: 16 on CPU; 64 on GPU; 64 on TPU, 128 with 8-bit KV]",
        ),
        memory(
            "--pages",
            type=int,
            help="Pages of KV memory, of each copy of the model.  [default: what --kv-memory or the device holds]",
        ),
        memory(
            "--kv-memory",
            type=ByteSize(),
            help="Bytes of KV memory of each copy, such as 2GiB.  [default on CPU: its streams' contexts, up to 1GiB]",
        ),
        memory(
            "--memory-fraction",
            type=click.FloatRange(0, 1, min_open=True),
            help="Share of the device's memory to use: what weights and programs leave of it becomes KV pages; on CPU, "
            f"of what is free at the start.  [default: {DEFAULT_MEMORY_FRACTION} on GPU and TPU]",
        ),
        memory("--chunk-tokens", type=int, default=256, help="Most prompt tokens of one step."),
        memory("--prefix-cache/--no-prefix-cache", default=True, help="Reuse the KV of prompts seen before."),
        *_scheduling_options(),
        running(
            "--compile-cache",
            type=A_FOLDER,
            default=default_compile_cache(),
            help="Where compiled programs are kept.",
        ),
        running("--no-compile-cache", is_flag=True, help="Compile anew at each start."),
        running("--cache-dir", type=A_FOLDER, help=f"Where models are kept.  [default: {default_cache_dir()}]"),
    )

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def resolved_options(found: ResolvedModel, flags: dict[str, Any], place: HostPlace | None = None) -> EngineOptions:
    return EngineOptions(
        model=str(found.path),
        device=flags["device"],
        mesh=flags["mesh"],
        attention=flags["attention"],
        activations=flags["activations"],
        dtype=flags["dtype"],
        weights=flags["weights"],
        kv_dtype=flags["kv_dtype"],
        page_size=flags["page_size"],
        pages=flags["pages"],
        kv_bytes=flags["kv_memory"],
        memory_fraction=flags["memory_fraction"],
        num_slots=flags["max_streams"],
        context=flags["context"],
        chunk_tokens=flags["chunk_tokens"],
        prefix_cache=flags["prefix_cache"],
        max_queued_requests=flags.get("max_queued", 512),
        max_queued_prompt_tokens=flags.get("max_queued_tokens", 524_288),
        compile_cache=None if flags["no_compile_cache"] else str(flags["compile_cache"]),
        hosts=place,
        swap_bytes=flags["swap_memory"],
        preemption=flags["preemption"],
        inter_token_ms=flags["inter_token_ms"],
        aging_s=flags["aging_seconds"],
        deterministic=flags["deterministic"],
        journal=journal_options(flags, place),
        log_format=LogFormat(flags.get("log_format", LogFormat.TEXT)),
    )
