"""Cutting off unlikely candidates without sorting the vocabulary.

z is a logit relative to its row's best, divided by the temperature: the best is 0, all others are below. weight is
exp(z). X stands for an axis of candidates: the vocabulary or a part of it.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from headrace.pallas_kernels.types import Across, Kernels

Array = jax.Array

LANES = 128
_BLOCK_IDS = 64
_BEST_BLOCKS = 64


def lane_sums(x_RX: Array) -> Array:
    """[R, lanes]: sums over ids that are equal modulo lanes = gcd(X, LANES)."""
    return x_RX.reshape(x_RX.shape[0], -1, math.gcd(x_RX.shape[1], LANES)).sum(axis=1)


def top_cut(z_RV: Array, weight_RV: Array, top_k_R: Array, top_p_R: Array, across: Across, kernels: Kernels) -> Array:
    """See ``headrace.pallas_kernels.api.top_cut``.

    Most cuts lie among the best few thousand candidates, so those are searched first: the 64 blocks of 64 ids with the
    highest maxima hold every candidate above the lowest of these maxima. Rows whose cut lies deeper are searched whole
    (some 30 passes of 0.6 ms for 16 rows of 49,152 ids on CPU). Which of the two counts depends on the row alone.
    """
    total_R = across.sum(lane_sums(weight_RV).sum(axis=-1))
    block = math.gcd(z_RV.shape[1], _BLOCK_IDS)
    if z_RV.shape[1] // block <= _BEST_BLOCKS:
        return _cut_among(z_RV, weight_RV, total_R, jnp.full_like(total_R, -jnp.inf), top_k_R, top_p_R, across)[0]
    z_RbX = z_RV.reshape(z_RV.shape[0], -1, block)
    best_Rb, index_Rb = lax.top_k(z_RbX.max(axis=-1), _BEST_BLOCKS)
    near_RX = jnp.take_along_axis(z_RbX, index_Rb[:, :, None], axis=1).reshape(z_RV.shape[0], -1)
    floor_R = across.max(best_Rb[:, -1])
    near_R, is_exact_R = _cut_among(near_RX, jnp.exp(near_RX), total_R, floor_R, top_k_R, top_p_R, across)

    def search_all() -> Array:
        nowhere_R = jnp.full_like(total_R, -jnp.inf)
        whole_R, _ = _cut_among(z_RV, weight_RV, total_R, nowhere_R, top_k_R, top_p_R, across)
        return jnp.where(is_exact_R, near_R, whole_R)

    return lax.cond(is_exact_R.all(), lambda: near_R, search_all)


def _cut_among(
    z_RX: Array,
    weight_RX: Array,
    total_R: Array,
    floor_R: Array,
    top_k_R: Array,
    top_p_R: Array,
    across: Across,
) -> tuple[Array, Array]:
    """(cut, whether it is the cut of all candidates). z_RX holds at least every candidate above floor_R; total_R is the
    weight of all candidates."""
    has_k_R, has_p_R = top_k_R > 0, top_p_R < 1

    def count(is_counted_RX: Array) -> Array:
        return across.sum(is_counted_RX.sum(axis=-1, dtype=jnp.int32))

    def mass(weight_RX: Array) -> Array:
        return across.sum(lane_sums(weight_RX).sum(axis=-1))

    cut_k_R = _largest_cut(lambda cut_R: count(z_RX >= cut_R[:, None]) - top_k_R, has_k_R)
    kept_RX = jnp.where(z_RX >= cut_k_R[:, None], weight_RX, 0)
    # top_p is a share of what top_k left.
    wanted_R = top_p_R * jnp.where(has_k_R, mass(kept_RX), total_R)

    def surplus(cut_R: Array) -> Array:
        # Never exactly 0: a sum that equals the wanted one is no reason to stop early.
        mass_R = mass(jnp.where(z_RX >= cut_R[:, None], kept_RX, 0))
        return jnp.where(mass_R >= wanted_R, 1, -1)

    cut_p_R = _largest_cut(surplus, has_p_R)
    above_RX = z_RX > floor_R[:, None]
    enough_k_R = count(above_RX) >= top_k_R
    enough_p_R = mass(jnp.where(above_RX, kept_RX, 0)) >= wanted_R
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
