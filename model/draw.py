"""Drawing one candidate by inverting the cumulative weights at a uniform number."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from headrace.pallas_kernels.sample.reference import LANES
from headrace.sharding.collectives import VocabularyShard

Array = jax.Array


def invert(weight_RV: Array, uniform_R: Array, vocabulary: VocabularyShard) -> Array:
    """The id at uniform_R (in [0, 1)) of the cumulative weights, in the order of (id modulo lanes, id), lanes =
    gcd(ids of the vocabulary, 128); only ids of positive weight. Two levels: which lane, then where in the lane."""
    lanes = math.gcd(vocabulary.size, LANES)
    grid_RXx = _by_lane(weight_RV, vocabulary, lanes)
    lane_RX = vocabulary.axis.sum(grid_RXx.sum(axis=1))
    lane_R, left_R = _pick(lane_RX, uniform_R * jnp.cumsum(lane_RX, axis=-1)[:, -1])
    in_lane_RX = jnp.take_along_axis(grid_RXx, lane_R[:, None, None], axis=2)[..., 0]
    index_R, _ = _pick(_whole_lane(in_lane_RX, vocabulary, lanes), left_R)
    return index_R * lanes + lane_R


def _by_lane(weight_RV: Array, vocabulary: VocabularyShard, lanes: int) -> Array:
    """[R, X, lanes]: an id's place on the last axis is id modulo lanes. A part that does not begin with lane 0 gets
    zeros before and after it."""
    rows, part = weight_RV.shape
    if part % lanes == 0:
        return weight_RV.reshape(rows, -1, lanes)
    padded = jnp.zeros((rows, -(-(part + lanes - 1) // lanes) * lanes), weight_RV.dtype)
    padded = lax.dynamic_update_slice(padded, weight_RV, (0, vocabulary.first_id % lanes))
    return padded.reshape(rows, -1, lanes)


def _whole_lane(part_RX: Array, vocabulary: VocabularyShard, lanes: int) -> Array:
    """[R, all ids / lanes]: one lane of each row, from all devices; two may share an entry."""
    if vocabulary.axis.size == 1:
        return part_RX
    rows, length = part_RX.shape
    whole = jnp.zeros((rows, vocabulary.size // lanes + length), part_RX.dtype)
    whole = lax.dynamic_update_slice(whole, part_RX, (0, vocabulary.first_id // lanes))
    return vocabulary.axis.sum(whole)[:, : vocabulary.size // lanes]


def _pick(weight_RX: Array, target_R: Array) -> tuple[Array, Array]:
    """(first index of positive weight whose cumulative weight is above the target, what is left of the target there).

    Rounding may put the target behind the last one: then the last index of positive weight."""
    total_RX = jnp.cumsum(weight_RX, axis=-1)
    index = jnp.arange(weight_RX.shape[1], dtype=jnp.int32)
    positive_RX = weight_RX > 0
    first_R = jnp.where(positive_RX & (total_RX > target_R[:, None]), index, index.size).min(axis=-1)
    index_R = jnp.minimum(first_R, jnp.where(positive_RX, index, 0).max(axis=-1))
    before_RX = jnp.pad(total_RX[:, :-1], ((0, 0), (1, 0)))
    before_R = jnp.take_along_axis(before_RX, index_R[:, None], axis=-1)[:, 0]
    return index_R, jnp.maximum(target_R - before_R, 0)
