"""Sampling policy ``headrace-sampling/1``, on the device.

Order: raw logits → logprobs are taken → stop ids held off (min_tokens) → logit_bias and allowed ids → repetition
penalty over prompt and output → presence and frequency over output → temperature → top_k → top_p → min_p → draw.

Everything that differs per request is an array leaf, so one program serves every mix; ``lax.cond`` on what the rows
ask for skips work that none of them wants. What a row gives does not depend on the others.

Choices that belong to the policy's version:
* Cuts are thresholds on values: candidates that tie with the last one kept are kept too. top_p cuts what top_k left,
  renormalized; min_p is relative to the best candidate.
* The draw inverts the cumulative distribution at one uniform number from ``fold_in(key(seed), position)``,
  threefry2x32, position being the index that the new token gets in its sequence. (One number per row: the Gumbel
  method needs one per row and id.) Ids are taken in the order of (id modulo lanes, id), lanes = gcd(V, 128).
* Temperatures up to GREEDY_TEMPERATURE are greedy, and so is top_k = 1; ties go to the lower id.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from headrace.model.draw import invert
from headrace.pallas_kernels import api
from headrace.pallas_kernels.sample.reference import lane_sums
from headrace.pallas_kernels.types import Implementation, Kernels
from headrace.serving.core.request import MAX_LOGPROBS
from headrace.sharding.collectives import ALONE, MeshAxis, VocabularyShard

Array = jax.Array

THRESHOLDS = Kernels()
"""XLA's own code on every chip: see ``headrace.pallas_kernels.api.top_cut`` for why there is no kernel."""
GREEDY_TEMPERATURE = 1e-3
"""Dividing by less turns a gap of 0.1 between two logits into a probability below 1e-43: greedy in all but name."""


@struct.dataclass
class SamplingState:
    """What sampling knows of each slot; row num_slots is the null slot, where padding rows read and write.

    last_token_B: i32, the id sampled last. temperature_B: f32, 0 is greedy. top_k_B: i32, 0 is off. top_p_B, min_p_B,
    repetition_B, presence_B, frequency_B: f32, neutral where unused. seed_B2: u32, high and low half of the seed.
    wants_logprobs_B, is_masked_B: bool; is_masked_B says that the row of bias_BV counts.
    stop_id_BS: i32 ids that min_tokens holds off; V where unused.
    bias_BV: f32, added to the logits; -inf forbids an id. in_prompt_BV: bool. output_count_BV: i32, times that the
    slot sampled each id. Rows of V are stale where the slot's parameters are neutral.
    """

    last_token_B: Array
    temperature_B: Array
    top_k_B: Array
    top_p_B: Array
    min_p_B: Array
    repetition_B: Array
    presence_B: Array
    frequency_B: Array
    seed_B2: Array
    wants_logprobs_B: Array
    is_masked_B: Array
    stop_id_BS: Array
    bias_BV: Array
    in_prompt_BV: Array
    output_count_BV: Array


@struct.dataclass
class Sampled:
    """One row per sampled position; A = num_alternatives(V). Logprob fields are 0 where no row of the step wants them.

    token_R: i32. is_finite_R: bool; False where a raw logit is NaN or infinite, or no id is left to choose from.
    rank_R: i32, 1 is the most likely. top_id_RA, top_logprob_RA: sorted downwards, ties by lower id.
    """

    token_R: Array
    is_finite_R: Array
    logprob_R: Array
    rank_R: Array
    top_id_RA: Array
    top_logprob_RA: Array


def num_alternatives(vocab_size: int) -> int:
    """Width of the top-k output."""
    return min(MAX_LOGPROBS, vocab_size)


def sample(
    logits_RV: Array,
    state: SamplingState,
    slot_R: Array,
    position_R: Array,
    holds_stops_R: Array,
    axis: MeshAxis = ALONE,
    kernels: Kernels = THRESHOLDS,
) -> tuple[Sampled, SamplingState]:
    """Choose one id per row and record it in the rows' slots.

    Args:
      logits_RV: float32, of the model. state: donate it.
      slot_R: i32 in [0, num_slots]; each real slot at most once.
      position_R: i32, the index that the new token gets. holds_stops_R: bool, min_tokens is not reached.
      axis: of the mesh, over which V is cut, of the logits and of the state's rows of V; all results are whole. Sums
        over V are then of partial sums: a cut or a draw can differ from that of one device where they round otherwise.
      kernels: those of the CPU draw natively where V is whole; a cut or a draw can differ in the same way.
    """
    vocabulary = VocabularyShard(axis=axis, size=logits_RV.shape[1] * axis.size)
    choose = _choice(vocabulary, kernels)
    sampled = choose(logits_RV, state, slot_R, position_R, holds_stops_R, vocabulary)
    return sampled, _recorded(state, slot_R, sampled.token_R, vocabulary)


def sample_or_best(
    logits: Callable[[], Array],
    best: Callable[[], tuple[Array, Array]],
    state: SamplingState,
    slot_R: Array,
    position_R: Array,
    holds_stops_R: Array,
    kernels: Kernels = THRESHOLDS,
) -> tuple[Sampled, SamplingState]:
    """As ``sample``, on one device; the logits are made only where a row of the step asks for more than its best id.

    logits: makes float32 [R, V]. best: makes (i32 [R] lowest id of the largest logit, bool [R] all logits are finite).
    """
    vocabulary = VocabularyShard(axis=ALONE, size=state.bias_BV.shape[1])
    asks_R = _has_penalty(state, slot_R) | state.is_masked_B[slot_R] | holds_stops_R
    asks_R |= (state.temperature_B[slot_R] > 0) | state.wants_logprobs_B[slot_R]
    sampled = lax.cond(
        asks_R.any(),
        lambda: _choice(vocabulary, kernels)(logits(), state, slot_R, position_R, holds_stops_R, vocabulary),
        lambda: Sampled(*best(), *_no_logprobs(slot_R.shape[0], vocabulary.size)),
    )
    return sampled, _recorded(state, slot_R, sampled.token_R, vocabulary)


def _choice(vocabulary: VocabularyShard, kernels: Kernels) -> Callable[..., Sampled]:
    is_native = kernels.implementation is Implementation.CPU and vocabulary.axis.size == 1
    return functools.partial(_natively_chosen, kernels=kernels) if is_native else _chosen


def _recorded(state: SamplingState, slot_R: Array, token_R: Array, vocabulary: VocabularyShard) -> SamplingState:
    return state.replace(
        last_token_B=state.last_token_B.at[slot_R].set(token_R, mode="promise_in_bounds"),
        output_count_BV=state.output_count_BV.at[slot_R, vocabulary.index_of(token_R)].add(1, mode="drop"),
    )


def _has_penalty(state: SamplingState, slot_R: Array) -> Array:
    return (state.repetition_B[slot_R] != 1) | (state.presence_B[slot_R] != 0) | (state.frequency_B[slot_R] != 0)


def _chosen(
    logits_RV: Array,
    state: SamplingState,
    slot_R: Array,
    position_R: Array,
    holds_stops_R: Array,
    vocabulary: VocabularyShard,
) -> Sampled:
    axis = vocabulary.axis
    top_R = axis.max(logits_RV.max(axis=-1))
    is_finite_R = _is_finite(logits_RV, vocabulary)
    has_penalty_R = _has_penalty(state, slot_R)
    has_mask_R = state.is_masked_B[slot_R] | holds_stops_R
    draws_R = state.temperature_B[slot_R] > 0

    def choose() -> tuple[Array, Array]:
        edited_RV = _edited(logits_RV, state, slot_R, holds_stops_R, vocabulary)
        best_R = axis.max(edited_RV.max(axis=-1))
        greedy_R = _first_equal(edited_RV, best_R, vocabulary)
        token_R = lax.cond(
            draws_R.any(),
            lambda: jnp.where(draws_R, _draw(edited_RV, best_R, state, slot_R, position_R, vocabulary), greedy_R),
            lambda: greedy_R,
        )
        return token_R, best_R > -jnp.inf

    token_R, has_choice_R = lax.cond(
        (has_mask_R | has_penalty_R | draws_R).any(),
        choose,
        lambda: (_first_equal(logits_RV, top_R, vocabulary), jnp.ones_like(is_finite_R)),
    )
    logprobs = lax.cond(
        state.wants_logprobs_B[slot_R].any(),
        lambda: _logprobs(logits_RV, top_R, token_R, vocabulary),
        lambda: _no_logprobs(logits_RV.shape[0], vocabulary.size),
    )
    return Sampled(token_R, is_finite_R & has_choice_R, *logprobs)


def _natively_chosen(
    logits_RV: Array,
    state: SamplingState,
    slot_R: Array,
    position_R: Array,
    holds_stops_R: Array,
    vocabulary: VocabularyShard,
    kernels: Kernels,
) -> Sampled:
    """As ``_chosen``, with the CPU's own draw; rows of the null slot are not looked at."""
    is_real_R = slot_R != state.temperature_B.shape[0] - 1
    uniform_R = jax.vmap(_uniform)(state.seed_B2[slot_R], position_R)
    temperature_R, top_k_R = state.temperature_B[slot_R], state.top_k_B[slot_R]
    top_p_R, min_p_R = state.top_p_B[slot_R], state.min_p_B[slot_R]

    def draw(x_RV: Array) -> tuple[Array, Array, Array]:
        return api.draw(x_RV, is_real_R, temperature_R, top_k_R, top_p_R, min_p_R, uniform_R, kernels=kernels)

    def edit_and_draw() -> tuple[Array, Array, Array]:
        token_R, _, has_choice_R = draw(_edited(logits_RV, state, slot_R, holds_stops_R, vocabulary))
        return token_R, _is_finite(logits_RV, vocabulary) | ~is_real_R, has_choice_R

    has_edits_R = _has_penalty(state, slot_R) | state.is_masked_B[slot_R] | holds_stops_R
    token_R, is_finite_R, has_choice_R = lax.cond(has_edits_R.any(), edit_and_draw, lambda: draw(logits_RV))
    logprobs = lax.cond(
        state.wants_logprobs_B[slot_R].any(),
        lambda: _logprobs(logits_RV, logits_RV.max(axis=-1), token_R, vocabulary),
        lambda: _no_logprobs(*logits_RV.shape),
    )
    return Sampled(token_R, is_finite_R & has_choice_R, *logprobs)


def _is_finite(x_RV: Array, vocabulary: VocabularyShard) -> Array:
    # A sum keeps NaN and infinities; the maximum does not keep NaN on CPU (jaxlib 0.10.2, from some 1,000 ids on).
    return jnp.isfinite(vocabulary.axis.sum(lane_sums(x_RV).sum(axis=-1)))


def _edited(
    x_RV: Array, state: SamplingState, slot_R: Array, holds_stops_R: Array, vocabulary: VocabularyShard
) -> Array:
    has_mask_R = state.is_masked_B[slot_R] | holds_stops_R
    x_RV = lax.cond(has_mask_R.any(), lambda x: _mask(x, state, slot_R, holds_stops_R, vocabulary), lambda x: x, x_RV)
    has_penalty_R = _has_penalty(state, slot_R)
    return lax.cond(has_penalty_R.any(), lambda x: _penalize(x, state, slot_R), lambda x: x, x_RV)


def _first_equal(x_RV: Array, value_R: Array, vocabulary: VocabularyShard) -> Array:
    """Lowest id whose value equals value_R; a valid id also where none does (NaN). Two plain reductions vectorize on
    CPU, where an argmax is a scalar loop."""
    found_R = jnp.where(x_RV == value_R[:, None], vocabulary.ids(), vocabulary.size).min(axis=-1)
    return jnp.minimum(vocabulary.axis.min(found_R), vocabulary.size - 1)


def _mask(x_RV: Array, state: SamplingState, slot_R: Array, holds_stops_R: Array, vocabulary: VocabularyShard) -> Array:
    held_RS = vocabulary.index_of(jnp.where(holds_stops_R[:, None], state.stop_id_BS[slot_R], vocabulary.size))
    rows = jnp.arange(x_RV.shape[0])[:, None]
    x_RV = x_RV.at[rows, held_RS].set(-jnp.inf, mode="drop")
    return x_RV + jnp.where(state.is_masked_B[slot_R, None], state.bias_BV[slot_R], 0)


def _penalize(x_RV: Array, state: SamplingState, slot_R: Array) -> Array:
    count_RV = state.output_count_BV[slot_R]
    repetition_R1 = state.repetition_B[slot_R, None]
    scaled_RV = jnp.where(x_RV > 0, x_RV / repetition_R1, x_RV * repetition_R1)
    x_RV = jnp.where((count_RV > 0) | state.in_prompt_BV[slot_R], scaled_RV, x_RV)
    x_RV -= state.frequency_B[slot_R, None] * count_RV
    return x_RV - jnp.where(count_RV > 0, state.presence_B[slot_R, None], 0)


def _draw(
    x_RV: Array, best_R: Array, state: SamplingState, slot_R: Array, position_R: Array, vocabulary: VocabularyShard
) -> Array:
    temperature_R = state.temperature_B[slot_R]
    scale_R = jnp.where(temperature_R > 0, temperature_R, 1)
    # Relative to the best, so the best is exactly 0 and nothing overflows upwards.
    z_RV = (x_RV - best_R[:, None]) / scale_R[:, None]
    weight_RV = jnp.exp(z_RV)
    top_k_R, top_p_R = state.top_k_B[slot_R], state.top_p_B[slot_R]
    cut_R = lax.cond(
        ((top_k_R > 0) | (top_p_R < 1)).any(),
        lambda: api.top_cut(z_RV, weight_RV, top_k_R, top_p_R, across=vocabulary.axis, kernels=THRESHOLDS),
        lambda: jnp.full_like(best_R, -jnp.inf),
    )
    cut_R = jnp.maximum(cut_R, jnp.log(state.min_p_B[slot_R]))
    uniform_R = jax.vmap(_uniform)(state.seed_B2[slot_R], position_R)
    return invert(jnp.where(z_RV >= cut_R[:, None], weight_RV, 0), uniform_R, vocabulary)


def _uniform(seed_2: Array, position: Array) -> Array:
    key = jax.random.fold_in(jax.random.wrap_key_data(seed_2, impl="threefry2x32"), position)
    return jax.random.uniform(key)


def _no_logprobs(rows: int, vocab_size: int) -> tuple[Array, Array, Array, Array]:
    of_each = (rows, num_alternatives(vocab_size))
    return jnp.zeros(rows), jnp.zeros(rows, jnp.int32), jnp.zeros(of_each, jnp.int32), jnp.zeros(of_each)


def _logprobs(
    logits_RV: Array, top_R: Array, token_R: Array, vocabulary: VocabularyShard
) -> tuple[Array, Array, Array, Array]:
    """Of the model's own distribution: (chosen, rank, top ids, top logprobs)."""
    axis = vocabulary.axis
    chosen_R = vocabulary.take(logits_RV, token_R)
    total_R = jnp.log(axis.sum(lane_sums(jnp.exp(logits_RV - top_R[:, None])).sum(axis=-1))) + top_R
    is_lower_RV = (logits_RV == chosen_R[:, None]) & (vocabulary.ids() < token_R[:, None])
    ahead_RV = (logits_RV > chosen_R[:, None]) | is_lower_RV
    rank_R = 1 + axis.sum(ahead_RV.sum(axis=-1, dtype=jnp.int32))
    top_RA, top_id_RA = vocabulary.top_k(logits_RV, num_alternatives(vocabulary.size))
    return chosen_R - total_R, rank_R, top_id_RA, top_RA - total_R[:, None]
