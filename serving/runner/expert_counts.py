"""How many tokens each layer sent to each expert: added up by every step on the device, read by the host now and then.

The device's counters wrap around at 2^32; the host adds differences, so that its totals do not, as long as it reads
before one expert got so many tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from headrace.model.config import ModelConfig
from headrace.serving.engine.ports import ExpertTokens
from headrace.serving.runner.backend import Backend

Array = jax.Array


def count_shapes(cfg: ModelConfig, backend: Backend) -> jax.ShapeDtypeStruct | None:
    """u32 [C, L, E], a first entry for each copy of the model on the mesh; cut over the axes data and stage. None
    without experts."""
    if not cfg.num_experts:
        return None
    sizes = backend.mesh_shape.sizes
    cut = PartitionSpec(*(axis if sizes[axis] > 1 else None for axis in ("data", "stage")), None)
    shape = (sizes["data"], cfg.num_layers, cfg.num_experts)
    return jax.ShapeDtypeStruct(shape, jnp.uint32, sharding=backend.sharding(cut))


def counted(counts_CLE: Array | None, load_LE: Array | None) -> Array | None:
    """Inside a step: the counters of this device's layers with its tokens added. load_LE: i32, see
    model/decoder.forward_counting."""
    if counts_CLE is None or load_LE is None:
        return None
    return counts_CLE + load_LE.astype(jnp.uint32)


class ExpertCounts:
    """Totals on the host."""

    def __init__(self, shapes: jax.ShapeDtypeStruct | None) -> None:
        size = (0, 0, 0) if shapes is None else shapes.shape
        self._last_CLE = np.zeros(size, np.uint32)
        self._total_LE = np.zeros(size[1:], np.uint64)

    def read(self, counts_CLE: Any) -> ExpertTokens | None:
        """Totals by layer and expert since the start; waits for the step that made counts_CLE.

        None without experts, and where parts of the counters lie with other processes.
        """
        if counts_CLE is None or not (counts_CLE.is_fully_addressable or counts_CLE.is_fully_replicated):
            return None
        now_CLE = np.asarray(counts_CLE)
        self._total_LE += (now_CLE - self._last_CLE).sum(axis=0, dtype=np.uint64)
        self._last_CLE = now_CLE
        return tuple(tuple(row) for row in self._total_LE.tolist())
