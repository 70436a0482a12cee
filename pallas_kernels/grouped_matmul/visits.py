"""Which pairs of a tile of rows and an expert a grouped matmul visits, in the order of the rows.

Every tile is visited by every expert that has rows in it, and an expert without rows is never visited. Rows in front of
the shard's experts and behind them count as two more groups, whose visits only give zeros: so every tile of the result
is visited at least once. For those visits the expert named is that of a neighbouring visit, whose weight is loaded
anyway.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax


@struct.dataclass
class Visits:
    """i32 [V] each, but count: i32 [1], how many are real; those behind repeat the last one and have no rows.

    tile_V: tile of rows. expert_V: index in the weight. first_V, last_V: rows first .. last - 1 of the flat batch are
    of this expert (equal: none, the visit only gives zeros). is_new_V: 1 at a tile's first visit.
    """

    count: jax.Array
    tile_V: jax.Array
    expert_V: jax.Array
    first_V: jax.Array
    last_V: jax.Array
    is_new_V: jax.Array


def experts_in_place(weight: Any, layer: jax.Array | int | None) -> tuple[Any, int, jax.Array | int]:
    """(weight [E', K, N], experts of the shard, index of its first one): of one layer, or of all layers end to end.

    weight: as ``api.grouped_matmul`` has it.
    """
    experts = jax.tree.leaves(weight)[0].shape[-3]
    if layer is None:
        return weight, experts, 0
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), weight), experts, layer * experts


def max_visits(num_rows: int, num_experts: int, tile_rows: int) -> int:
    """Every tile once, and once more for each border between groups (of which two are not the shard's) inside one."""
    tiles = -(-num_rows // tile_rows)
    return tiles + min(num_experts + 1, num_rows - 1)


def make_visits(
    group_sizes_G: jax.Array,
    group_offset: jax.Array | int,
    num_experts: int,
    num_rows: int,
    tile_rows: int,
    first_index: jax.Array | int = 0,
) -> Visits:
    """Args: as grouped_matmul. num_experts: of the shard. tile_rows: rows of a tile; the last tile may be partial.
    first_index: of the shard's experts in the weight."""
    end_G = jnp.cumsum(group_sizes_G, dtype=jnp.int32)
    end_E = lax.dynamic_slice_in_dim(end_G, group_offset, num_experts)
    size_E = lax.dynamic_slice_in_dim(group_sizes_G.astype(jnp.int32), group_offset, num_experts)
    first = end_E[0] - size_E[0]
    # Groups: rows in front, the experts of the shard, rows behind.
    end_X = jnp.concatenate([first[None], end_E, jnp.full(1, num_rows, jnp.int32)])
    start_X = jnp.concatenate([jnp.zeros(1, jnp.int32), first[None], end_E])
    first_tile_X = start_X // tile_rows
    visits_X = jnp.where(end_X > start_X, (end_X + tile_rows - 1) // tile_rows - first_tile_X, 0)
    before_X = jnp.cumsum(visits_X, dtype=jnp.int32)
    count = before_X[-1]
    visit_V = jnp.minimum(jnp.arange(max_visits(num_rows, num_experts, tile_rows), dtype=jnp.int32), count - 1)
    group_V = jnp.searchsorted(before_X, visit_V, side="right").astype(jnp.int32)
    tile_V = first_tile_X[group_V] + visit_V - (before_X - visits_X)[group_V]
    is_local_V = (group_V > 0) & (group_V <= num_experts)
    is_real_V = is_local_V & (jnp.arange(visit_V.size) < count)
    # In front of the first visited expert its weight is named, behind the last one that one's.
    busy_E = visits_X[1:-1] > 0
    index_E = jnp.arange(num_experts, dtype=jnp.int32)
    lowest = jnp.where(busy_E, index_E, num_experts - 1).min()
    highest = jnp.where(busy_E, index_E, 0).max()
    return Visits(
        count=count[None],
        tile_V=tile_V,
        expert_V=first_index + jnp.clip(group_V - 1, lowest, jnp.maximum(lowest, highest)),
        first_V=jnp.where(is_real_V, start_X[group_V], 0),
        last_V=jnp.where(is_real_V, end_X[group_V], 0),
        is_new_V=jnp.concatenate([jnp.ones(1, jnp.int32), (tile_V[1:] != tile_V[:-1]).astype(jnp.int32)]),
    )
