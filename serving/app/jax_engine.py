"""The engine on a device: backend, weights, number of pages, runner. Imports JAX."""

from typing import Any

import jax

from headrace.model.config import ModelConfig
from headrace.model.load import load_model
from headrace.model.weights import Weights
from headrace.serving.app.build import DEFAULT_MEMORY_FRACTION, BuiltEngine, EngineOptions, ResolvedEngine, resolve
from headrace.serving.engine.ports import Progress
from headrace.serving.runner.backend import Backend, Wishes, choose_backend, find_device, platform_of
from headrace.serving.runner.compile_cache import use_compile_cache
from headrace.serving.runner.memory import check_pages, free_bytes, limit_of, measure
from headrace.serving.runner.runner import JaxRunner


def build_jax_engine(options: EngineOptions, config: ModelConfig, progress: Progress) -> BuiltEngine:
    """Raises ModelFileError or ConfigError; everything that can be refused before the weights are loaded, is."""
    device = find_device(options.device)
    wishes = Wishes(
        attention=options.attention, dtype=options.dtype, kv_dtype=options.kv_dtype, interpret=options.interpret
    )
    backend = choose_backend(device, wishes)
    resolved = resolve(options, config, backend.kv_format)
    use_compile_cache(options.compile_cache)
    limit_bytes = limit_of(device) if _needs_limit(options, device) else None
    model = load_model(
        options.model, dtype=backend.dtype, progress=lambda done, total: progress("loading weights", done, total)
    )
    if limit_bytes is not None:
        progress("measuring the largest program", 0, 1)
        resolved = _in_memory(options, config, model.weights, resolved, backend, limit_bytes)
    elif platform_of(device) != "cpu" and (free := free_bytes(device)) is not None:
        check_pages(config, model.weights, resolved.scheduler, backend, limit_bytes=free)
    kernels = backend.kernels
    return BuiltEngine(
        runner=JaxRunner(model, resolved.scheduler, backend=backend),
        resolved=resolved,
        model_hash=model.model_hash,
        weights_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(model.weights)),
        device=f"{device.platform}:{device.device_kind}",
        attention=f"{kernels.implementation}{' interpreted' if kernels.interpret else ''}",
        dtype=backend.dtype.name,
    )


def _needs_limit(options: EngineOptions, device: jax.Device) -> bool:
    is_sized = options.pages is not None or options.kv_bytes is not None
    return not is_sized and (options.memory_fraction is not None or platform_of(device) != "cpu")


def _in_memory(
    options: EngineOptions,
    config: ModelConfig,
    weights: Weights[Any],
    resolved: ResolvedEngine,
    backend: Backend,
    limit_bytes: int,
) -> ResolvedEngine:
    fraction = DEFAULT_MEMORY_FRACTION if options.memory_fraction is None else options.memory_fraction
    memory = measure(config, weights, resolved.scheduler, backend, limit_bytes=limit_bytes, fraction=fraction)
    return resolved.in_memory(memory)
