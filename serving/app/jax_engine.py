"""The engine on a device: backend, weights, number of pages, runner. Imports JAX."""

from functools import partial

import jax

from headrace.model.config import ModelConfig
from headrace.model.on_mesh import config_on_mesh
from headrace.model.specs import WeightScheme
from headrace.model.weight_files import config_hash
from headrace.pallas_kernels.native.library import load
from headrace.pallas_kernels.types import Activations
from headrace.serving.app.build import (
    DEFAULT_MEMORY_FRACTION,
    BuiltEngine,
    EngineOptions,
    ResolvedEngine,
    mesh_shape,
    resolve,
)
from headrace.serving.core.errors import ConfigError
from headrace.serving.engine.host_messages import Loaded
from headrace.serving.engine.ports import Hosts, Progress
from headrace.serving.runner.backend import (
    Backend,
    Wishes,
    choose_backend,
    describe_device,
    find_device,
    find_mesh,
    platform_of,
)
from headrace.serving.runner.compile_cache import use_compile_cache
from headrace.serving.runner.distributed import connect, devices_of_hosts, is_here
from headrace.serving.runner.forms import with_forms
from headrace.serving.runner.load import PlacedModel, load_placed
from headrace.serving.runner.memory import check_pages, free_bytes, limit_of, measure
from headrace.serving.runner.numerics import numerics_of
from headrace.serving.runner.runner import JaxRunner
from headrace.serving.runner.topology import topology_of
from headrace.sharding.errors import MeshError
from headrace.sharding.mesh_shape import MeshShape


def build_jax_engine(
    options: EngineOptions, config: ModelConfig, progress: Progress, hosts: Hosts | None = None
) -> BuiltEngine:
    """Raises ModelFileError, ConfigError or HostsError; everything that can be refused before the weights are loaded,
    is. hosts: the others, where there are several; all of them come here."""
    shape = mesh_shape(options)
    num_hosts = 1 if hosts is None else hosts.num_hosts
    if hosts is not None:
        progress("connecting the devices of all hosts", 0, 1)
        connect(hosts.service, hosts.num_hosts, hosts.rank)
    device = find_device(options.device, min_cpus=shape.num_devices // num_hosts)
    mesh = find_mesh(device, shape, devices_of_hosts(device, shape.num_devices, num_hosts))
    devices = [device] if mesh is None else list(mesh.devices.flat)
    own = [x for x in devices if is_here(x)]
    wishes = Wishes(
        attention=options.attention,
        activations=options.activations,
        dtype=options.dtype,
        weights=options.weights,
        kv_dtype=options.kv_dtype,
        interpret=options.interpret,
    )
    backend = choose_backend(device, wishes, mesh, model=config, load=partial(_load_kernels, progress))
    resolved = resolve(options, _config_on(config, shape), backend.kv_format)
    backend = _checked(with_forms(backend, options.model), options)
    use_compile_cache(options.compile_cache)
    if _needs_limit(options, device):
        progress("measuring the largest program", 0, 1)
        resolved = _in_memory(options, config, resolved, backend, limit_of(own))
    elif platform_of(device) != "cpu" and (free := free_bytes(own)) is not None:
        check_pages(config, resolved.scheduler, backend, limit_bytes=free)
    model = load_placed(options.model, backend, lambda done, total: progress("loading weights", done, total))
    kernels = backend.kernels
    if hosts is not None:
        resolved = _agreed(hosts, resolved, backend, model, progress)
    meet = None if hosts is None else partial(hosts.meet, "compile", progress)
    return BuiltEngine(
        runner=JaxRunner(model, resolved.scheduler, backend=backend, before_first_run=meet),
        resolved=resolved,
        model_hash=model.model_hash,
        weights_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(model.weights)),
        topology=topology_of(devices),
        mesh=str(shape),
        attention=f"{kernels.implementation}{' interpreted' if kernels.interpret else ''}",
        activations=kernels.activations.value if has_quantized(backend) else Activations.EXACT.value,
        why=backend.why,
        scheme={} if model.scheme is None else model.scheme.as_json(),
        scheme_lines=() if model.scheme is None else model.scheme.lines(),
        dtype=backend.dtype.name,
        weights=backend.weights.value,
        family=model.config.family,
        architecture=config_hash(model.config),
        stored_types=model.stored_types,
        numerics=numerics_of(device) | ({"kernels": f"cpu:{backend.isa}"} if backend.isa else {}),
    )


def has_quantized(backend: Backend) -> bool:
    """Whether products read quantized weights."""
    return bool(backend.forms) or backend.weights in (WeightScheme.INT8, WeightScheme.INT4)


def _checked(backend: Backend, options: EngineOptions) -> Backend:
    """Raises: ConfigError for --activations without a weight that it is about."""
    if options.activations not in ("auto", Activations.EXACT.value) and not has_quantized(backend):
        raise ConfigError(
            f"--activations {options.activations} is about products with quantized weights, and this model's are not; "
            "take --activations auto or exact, or --weights int8 or int4"
        )
    return backend


def _load_kernels(progress: Progress) -> str:
    """Of the CPU; compiled at the first start. Raises: BuildError."""
    return load(progress=lambda done, total, name: progress(f"compiling kernels: {name}", done, total)).isa


def _agreed(
    hosts: Hosts, resolved: ResolvedEngine, backend: Backend, model: PlacedModel, progress: Progress
) -> ResolvedEngine:
    """With as many pages as the host with least memory holds. Raises: HostsError where hosts differ."""
    facts = {
        "the device": "" if backend.device is None else describe_device(backend.device),
        "the kernels": str(backend.kernels),
        "the type of weights": backend.dtype.name,
        "the type of pages": backend.kv_dtype.name,
    }
    if backend.device is not None:
        # One contract stands for all ranks, so what fixes bits must be the same on all.
        facts |= {f"numerics, {name}": value for name, value in numerics_of(backend.device).items()}
    mine = Loaded(
        facts=facts,
        model_hash=model.model_hash,
        digests=dict(model.digests),
        num_pages=resolved.scheduler.num_pages,
    )
    return resolved.with_pages(hosts.agree(mine, progress))


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
