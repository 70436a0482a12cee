"""The engine on a device: backend, weights, number of pages, runner. Imports JAX."""

import jax

from headrace.model.config import ModelConfig
from headrace.model.load import load_model
from headrace.model.on_mesh import config_on_mesh
from headrace.serving.app.build import (
    DEFAULT_MEMORY_FRACTION,
    BuiltEngine,
    EngineOptions,
    ResolvedEngine,
    mesh_shape,
    resolve,
)
from headrace.serving.core.errors import ConfigError
from headrace.serving.engine.ports import Progress
from headrace.serving.runner.backend import Backend, Wishes, choose_backend, find_device, find_mesh, platform_of
from headrace.serving.runner.compile_cache import use_compile_cache
from headrace.serving.runner.memory import check_pages, free_bytes, limit_of, measure
from headrace.serving.runner.runner import JaxRunner
from headrace.sharding.errors import MeshError
from headrace.sharding.mesh_shape import MeshShape


def build_jax_engine(options: EngineOptions, config: ModelConfig, progress: Progress) -> BuiltEngine:
    """Raises ModelFileError or ConfigError; everything that can be refused before the weights are loaded, is."""
    shape = mesh_shape(options)
    device = find_device(options.device, min_cpus=shape.num_devices)
    mesh = find_mesh(device, shape)
    devices = [device] if mesh is None else list(mesh.devices.flat)
    wishes = Wishes(
        attention=options.attention,
        dtype=options.dtype,
        weights=options.weights,
        kv_dtype=options.kv_dtype,
        interpret=options.interpret,
    )
    backend = choose_backend(device, wishes, mesh)
    resolved = resolve(options, _config_on(config, shape), backend.kv_format)
    use_compile_cache(options.compile_cache)
    if _needs_limit(options, device):
        progress("measuring the largest program", 0, 1)
        resolved = _in_memory(options, config, resolved, backend, limit_of(devices))
    elif platform_of(device) != "cpu" and (free := free_bytes(devices)) is not None:
        check_pages(config, resolved.scheduler, backend, limit_bytes=free)
    model = load_model(
        options.model,
        dtype=backend.dtype,
        scheme=backend.weights,
        progress=lambda done, total: progress("loading weights", done, total),
    )
    kernels = backend.kernels
    return BuiltEngine(
        runner=JaxRunner(model, resolved.scheduler, backend=backend),
        resolved=resolved,
        model_hash=model.model_hash,
        weights_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(model.weights)),
        device=f"{device.platform}:{device.device_kind}",
        mesh=str(shape),
        attention=f"{kernels.implementation}{' interpreted' if kernels.interpret else ''}",
        dtype=backend.dtype.name,
        weights=backend.weights.value,
    )


def _config_on(config: ModelConfig, shape: MeshShape) -> ModelConfig:
    """The configuration on a mesh. Raises: ConfigError naming --mesh and the tensor that does not divide."""
    try:
        return config_on_mesh(config, shape)
    except MeshError as error:
        raise ConfigError(f"--mesh {shape}: {error}") from error


def _needs_limit(options: EngineOptions, device: jax.Device) -> bool:
    is_sized = options.pages is not None or options.kv_bytes is not None
    return not is_sized and (options.memory_fraction is not None or platform_of(device) != "cpu")


def _in_memory(
    options: EngineOptions,
    config: ModelConfig,
    resolved: ResolvedEngine,
    backend: Backend,
    limit_bytes: int,
) -> ResolvedEngine:
    fraction = DEFAULT_MEMORY_FRACTION if options.memory_fraction is None else options.memory_fraction
    memory = measure(config, resolved.scheduler, backend, limit_bytes=limit_bytes, fraction=fraction)
    return resolved.in_memory(memory)
