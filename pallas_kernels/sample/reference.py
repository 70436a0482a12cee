"""Cutting off unlikely candidates and drawing from the rest, without sorting the vocabulary.

z is a logit relative to its row's best, divided by the temperature: the best is 0, all others are below. weight is
exp(z). X stands for an axis of candidates: the vocabulary or a part of it.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from headrace.pallas_kernels.types import Kernels

Array = jax.Array

LANES = 128
_BLOCK_IDS = 64
_BEST_BLOCKS = 64


def lane_sums(x_RX: Array) -> Array:
    """[R, lanes]: sums over ids that are equal modulo lanes = gcd(X, LANES)."""
    return x_RX.reshape(x_RX.shape[0], -1, math.gcd(x_RX.shape[1], LANES)).sum(axis=1)


def top_cut(z_RV: Array, weight_RV: Array, top_k_R: Array, top_p_R: Array, kernels: Kernels) -> Array:
    """See ``headrace.pallas_kernels.api.top_cut``.

    Most cuts lie among the best few thousand candidates, so those are searched first: the 64 blocks of 64 ids with the
    highest maxima hold every candidate above the lowest of these maxima. Rows whose cut lies deeper are searched whole
    (some 30 passes of 0.6 ms for 16 rows of 49,152 ids on CPU). Which of the two counts depends on the row alone.
    """
    total_R = lane_sums(weight_RV).sum(axis=-1)
    block = math.gcd(z_RV.shape[1], _BLOCK_IDS)
    if z_RV.shape[1] // block <= _BEST_BLOCKS:
        return _cut_among(z_RV, weight_RV, total_R, jnp.full_like(total_R, -jnp.inf), top_k_R, top_p_R)[0]
    z_RbX = z_RV.reshape(z_RV.shape[0], -1, block)
    best_Rb, index_Rb = lax.top_k(z_RbX.max(axis=-1), _BEST_BLOCKS)
    near_RX = jnp.take_along_axis(z_RbX, index_Rb[:, :, None], axis=1).reshape(z_RV.shape[0], -1)
    near_R, is_exact_R = _cut_among(near_RX, jnp.exp(near_RX), total_R, best_Rb[:, -1], top_k_R, top_p_R)

    def search_all() -> Array:
        whole_R, _ = _cut_among(z_RV, weight_RV, total_R, jnp.full_like(total_R, -jnp.inf), top_k_R, top_p_R)
        return jnp.where(is_exact_R, near_R, whole_R)

    return lax.cond(is_exact_R.all(), lambda: near_R, search_all)


def _cut_among(
    z_RX: Array, weight_RX: Array, total_R: Array, floor_R: Array, top_k_R: Array, top_p_R: Array
) -> tuple[Array, Array]:
    """(cut, whether it is the cut of all candidates). z_RX holds at least every candidate above floor_R; total_R is the
    weight of all candidates."""
    has_k_R, has_p_R = top_k_R > 0, top_p_R < 1
    cut_k_R = _largest_cut(lambda cut_R: (z_RX >= cut_R[:, None]).sum(axis=-1, dtype=jnp.int32) - top_k_R, has_k_R)
    kept_RX = jnp.where(z_RX >= cut_k_R[:, None], weight_RX, 0)
    # top_p is a share of what top_k left.
    wanted_R = top_p_R * jnp.where(has_k_R, lane_sums(kept_RX).sum(axis=-1), total_R)

    def surplus(cut_R: Array) -> Array:
        # Never exactly 0: a sum that equals the wanted one is no reason to stop early.
        mass_R = lane_sums(jnp.where(z_RX >= cut_R[:, None], kept_RX, 0)).sum(axis=-1)
        return jnp.where(mass_R >= wanted_R, 1, -1)

    cut_p_R = _largest_cut(surplus, has_p_R)
    above_RX = z_RX > floor_R[:, None]
    enough_k_R = above_RX.sum(axis=-1, dtype=jnp.int32) >= top_k_R
    enough_p_R = lane_sums(jnp.where(above_RX, kept_RX, 0)).sum(axis=-1) >= wanted_R
    is_exact_R = (enough_k_R | ~has_k_R) & (enough_p_R | ~has_p_R)
    return jnp.maximum(cut_k_R, cut_p_R), is_exact_R


def _largest_cut(surplus: Callable[[Array], Array], is_wanted_R: Array) -> Array:
    """Bisect for the largest cut with surplus(cut) >= 0; -inf in rows that want none.

    surplus falls as the cut rises. A row whose surplus is exactly 0 is done: what a cut keeps is the result, not the
    cut itself, and more steps would not change it. At most 32 steps, over bit patterns: for values <= 0 the negated
    pattern of the negated value is an integer of the same order.
    """
    lowest = jnp.int32(-0x7F800000)

    def cut_at(key_R: Array) -> Array:
        return -lax.bitcast_convert_type(-key_R, jnp.float32)

    def unfinished(bounds: tuple[Array, Array]) -> Array:
        return (bounds[1] - bounds[0] > 1).any()

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low_R, high_R = bounds
        middle_R = low_R + (high_R - low_R) // 2
        surplus_R = surplus(cut_at(middle_R))
        is_open_R = high_R - low_R > 1
        low_R = jnp.where(is_open_R & (surplus_R >= 0), middle_R, low_R)
        high_R = jnp.where(is_open_R & (surplus_R < 0), middle_R, high_R)
        return low_R, jnp.where(is_open_R & (surplus_R == 0), low_R + 1, high_R)

    # The upper bound is one past 0; an empty range is finished.
    start = (jnp.full(is_wanted_R.shape, lowest), jnp.where(is_wanted_R, 1, lowest + 1))
    return cut_at(lax.while_loop(unfinished, halve, start)[0])


def invert(weight_RV: Array, uniform_R: Array) -> Array:
    """The id at uniform_R (in [0, 1)) of the cumulative weights, in the order of (id modulo lanes, id); only ids of
    positive weight. Two levels: which lane, then where in the lane."""
    rows, vocab = weight_RV.shape
    lanes = math.gcd(vocab, LANES)
    lane_RX = lane_sums(weight_RV)
    lane_R, left_R = _pick(lane_RX, uniform_R * jnp.cumsum(lane_RX, axis=-1)[:, -1])
    in_lane_RX = jnp.take_along_axis(weight_RV.reshape(rows, -1, lanes), lane_R[:, None, None], axis=2)[..., 0]
    index_R, _ = _pick(in_lane_RX, left_R)
    return index_R * lanes + lane_R


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
