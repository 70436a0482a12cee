"""Grouped matmul in plain jnp: defines the semantics, and serves where no kernel runs.

A loop over tiles of rows and the experts that have rows in them. (XLA's ragged_dot multiplies every row with every
expert on CPU and GPU.) Weights of experts without rows are not touched.
"""

import jax
import jax.numpy as jnp
from jax import lax

from headrace.pallas_kernels.grouped_matmul.visits import experts_in_place, make_visits
from headrace.pallas_kernels.quant_matmul.reference import quant_matmul
from headrace.pallas_kernels.types import GroupQuant, Kernels

TILE_ROWS = 32
"""A tile is multiplied with all of its experts, so that rows of many experts cost more in larger tiles; rows of one
expert cost one pass over its weight for each tile."""


def grouped_matmul(
    x_MK: jax.Array,
    weight: jax.Array | GroupQuant,
    group_sizes_G: jax.Array,
    group_offset: jax.Array | int,
    kernels: Kernels,
    layer: jax.Array | int | None = None,
) -> jax.Array:
    """See ``headrace.pallas_kernels.api.grouped_matmul``."""
    rows = x_MK.shape[0]
    weight, experts, first_index = experts_in_place(weight, layer)
    columns = jax.tree.leaves(weight)[0].shape[2]
    tile = min(TILE_ROWS, rows)
    visits = make_visits(group_sizes_G, group_offset, experts, rows, tile, first_index)
    x_MK = jnp.pad(x_MK, ((0, -rows % tile), (0, 0))).astype(jnp.float32)

    def visit(v: jax.Array, out_MN: jax.Array) -> jax.Array:
        first = visits.tile_V[v] * tile
        x_XK = lax.dynamic_slice_in_dim(x_MK, first, tile)
        of_expert = jax.tree.map(lambda array: lax.dynamic_index_in_dim(array, visits.expert_V[v], 0, False), weight)
        row_X1 = first + jnp.arange(tile)[:, None]
        is_own_X1 = (row_X1 >= visits.first_V[v]) & (row_X1 < visits.last_V[v])
        out_XN = lax.dynamic_slice_in_dim(out_MN, first, tile)
        out_XN = jnp.where(is_own_X1, _multiply(x_XK, of_expert, kernels), out_XN)
        return lax.dynamic_update_slice_in_dim(out_MN, out_XN, first, 0)

    def visit_if_rows(v: jax.Array, out_MN: jax.Array) -> jax.Array:
        return lax.cond(visits.last_V[v] > visits.first_V[v], visit, lambda _, out: out, v, out_MN)

    start_MN = jnp.zeros((x_MK.shape[0], columns))
    return lax.fori_loop(0, visits.count[0], visit_if_rows, start_MN)[:rows]


def _multiply(x_XK: jax.Array, weight: jax.Array | GroupQuant, kernels: Kernels) -> jax.Array:
    if isinstance(weight, GroupQuant):
        return quant_matmul(x_XK, weight, kernels)
    return jnp.dot(x_XK, weight.astype(jnp.float32), precision=lax.Precision.HIGHEST)
