"""The device arrays beside the weights: pages and sampling state, as shapes and as zeros, on one device or a mesh."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from headrace.model.config import ModelConfig
from headrace.model.decoder import new_pool
from headrace.model.sampling import SamplingState
from headrace.pallas_kernels.types import KVPool
from headrace.serving.core.config import SchedulerConfig
from headrace.serving.runner.backend import Backend
from headrace.serving.runner.expert_counts import count_shapes
from headrace.serving.runner.sampling_state import ROWS_OF_V, initial_state
from headrace.serving.runner.warmup import on_device
from headrace.sharding.rules import entry

TreeT = TypeVar("TreeT")


def pool_shapes(cfg: ModelConfig, config: SchedulerConfig, backend: Backend) -> KVPool:
    """cfg: on the backend's mesh. Rows are those of each lane's stages, layers and pages; key heads are cut over the
    tensor axis."""
    shapes: KVPool = jax.eval_shape(_make_pool(cfg, config, backend))
    sharding = backend.sharding(_cut(backend, ("data", "stage"), ("tensor",)))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)


def state_shapes(cfg: ModelConfig, config: SchedulerConfig, backend: Backend) -> SamplingState:
    """Slots are cut over lanes, and rows of V like the vocabulary."""
    shapes: SamplingState = jax.eval_shape(_make_state(cfg, config))
    of_slots = backend.sharding(_cut(backend, ("data",)))
    of_rows = backend.sharding(_cut(backend, ("data",), ("stage", "tensor")))
    return shapes.replace(
        **{
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=of_rows if name in ROWS_OF_V else of_slots)
            for name, x in vars(shapes).items()
        }
    )


def make_pool(cfg: ModelConfig, config: SchedulerConfig, backend: Backend) -> KVPool:
    """Zeros in the places of ``pool_shapes``."""
    return _made(_make_pool(cfg, config, backend), pool_shapes(cfg, config, backend), backend)


def make_state(cfg: ModelConfig, config: SchedulerConfig, backend: Backend) -> SamplingState:
    """``initial_state`` in the places of ``state_shapes``."""
    shapes = state_shapes(cfg, config, backend)
    return _made(_make_state(cfg, config), shapes, backend)


def make_counts(cfg: ModelConfig, backend: Backend) -> jax.Array | None:
    """Zeros in the place of ``count_shapes``."""
    shapes = count_shapes(cfg, backend)
    return None if shapes is None else _made(lambda: jnp.zeros(shapes.shape, shapes.dtype), shapes, backend)


def _make_pool(cfg: ModelConfig, config: SchedulerConfig, backend: Backend) -> Callable[[], KVPool]:
    num_pages = config.num_lanes * config.num_pages
    return lambda: new_pool(cfg, num_pages, config.page_size, backend.kv_dtype, as_bits=backend.kv_as_bits)


def _make_state(cfg: ModelConfig, config: SchedulerConfig) -> Callable[[], SamplingState]:
    return lambda: initial_state(config.num_slots, cfg.vocab_size, config.num_lanes)


def _made(make: Callable[[], TreeT], shapes: TreeT, backend: Backend) -> TreeT:
    if backend.mesh is None:
        with on_device(backend.device):
            return make()
    places: Any = jax.tree.map(lambda x: x.sharding, shapes)
    return jax.jit(make, out_shardings=places)()


def _cut(backend: Backend, *axes: tuple[str, ...]) -> PartitionSpec:
    """Without axes of one device, so that one placement has one name."""
    sizes = backend.mesh_shape.sizes
    return PartitionSpec(*(entry(tuple(name for name in names if sizes[name] > 1)) for names in axes))
