"""Device state of the sampling slots, and the two programs that load a slot's new tenant."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from headrace.model.sampling import GREEDY_TEMPERATURE, SamplingState
from headrace.serving.core.errors import InvariantError
from headrace.serving.core.plan import SlotLoad
from headrace.serving.core.request import MAX_STOP_IDS, SamplingParams
from headrace.sharding.collectives import ONE_DEVICE, Shards, VocabularyShard

Array = jax.Array
_FLOATS = ("temperature_B", "top_p_B", "min_p_B", "repetition_B", "presence_B", "frequency_B")
_NUM_INTS = 6
SCALARS = _NUM_INTS + len(_FLOATS) + MAX_STOP_IDS
"""Size of a packed load: slot, last token, top_k, seed high and low, flags; the floats' bits; stop ids."""
_MASKED, _LOGPROBS = 1, 2
ROWS_OF_V = ("bias_BV", "in_prompt_BV", "output_count_BV")
"""Fields with a value for each id of the vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLoad:
    """scalars: i32 [SCALARS]. rows: (bias_V, in_prompt_V, output_count_V), None where the tenant needs none of them."""

    scalars: np.ndarray
    rows: tuple[np.ndarray, np.ndarray, np.ndarray] | None


def initial_state(num_slots: int, vocab_size: int, num_lanes: int = 1) -> SamplingState:
    """Every slot greedy and neutral; in each lane one more row for the null slot."""
    rows = num_lanes * (num_slots + 1)
    return SamplingState(
        last_token_B=jnp.zeros(rows, jnp.int32),
        temperature_B=jnp.zeros(rows),
        top_k_B=jnp.zeros(rows, jnp.int32),
        top_p_B=jnp.ones(rows),
        min_p_B=jnp.zeros(rows),
        repetition_B=jnp.ones(rows),
        presence_B=jnp.zeros(rows),
        frequency_B=jnp.zeros(rows),
        seed_B2=jnp.zeros((rows, 2), jnp.uint32),
        wants_logprobs_B=jnp.zeros(rows, bool),
        is_masked_B=jnp.zeros(rows, bool),
        stop_id_BS=jnp.full((rows, MAX_STOP_IDS), vocab_size, jnp.int32),
        bias_BV=jnp.zeros((rows, vocab_size)),
        in_prompt_BV=jnp.zeros((rows, vocab_size), bool),
        output_count_BV=jnp.zeros((rows, vocab_size), jnp.int32),
    )


def load_scalars(state: SamplingState, scalars: Array, *, shards: Shards = ONE_DEVICE) -> SamplingState:
    """Program: a tenant that reads no row of V. shards: what one device of a mesh has of the state."""
    slot, flags = scalars[0], scalars[5]
    floats = lax.bitcast_convert_type(scalars[_NUM_INTS : _NUM_INTS + len(_FLOATS)], jnp.float32)
    updates: dict[str, Array] = dict(zip(_FLOATS, floats, strict=True))
    updates |= {
        "last_token_B": scalars[1],
        "top_k_B": scalars[2],
        "seed_B2": lax.bitcast_convert_type(scalars[3:5], jnp.uint32),
        "is_masked_B": (flags & _MASKED) > 0,
        "wants_logprobs_B": (flags & _LOGPROBS) > 0,
        "stop_id_BS": scalars[_NUM_INTS + len(_FLOATS) :],
    }
    return _set_rows(state, slot, updates, shards)


def load_with_rows(
    state: SamplingState,
    scalars: Array,
    bias_V: Array,
    in_prompt_V: Array,
    output_count_V: Array,
    *,
    shards: Shards = ONE_DEVICE,
) -> SamplingState:
    """Program: a tenant with penalties, bias or a list of allowed ids. Rows are of the whole vocabulary."""
    vocabulary = VocabularyShard(axis=shards.vocabulary, size=bias_V.shape[0])
    rows = dict(zip(ROWS_OF_V, map(vocabulary.part_of, (bias_V, in_prompt_V, output_count_V)), strict=True))
    return _set_rows(load_scalars(state, scalars, shards=shards), scalars[0], rows, shards)


def _set_rows(state: SamplingState, slot: Array, updates: dict[str, Array], shards: Shards) -> SamplingState:
    if shards.data.size == 1:
        return state.replace(
            **{name: getattr(state, name).at[slot].set(row, mode="promise_in_bounds") for name, row in updates.items()}
        )
    rows = state.last_token_B.shape[0]
    here = slot - shards.data.index * rows
    here = jnp.where((here >= 0) & (here < rows), here, rows)  # to be dropped: another lane's
    return state.replace(**{name: getattr(state, name).at[here].set(row, mode="drop") for name, row in updates.items()})


def pack_load(load: SlotLoad, num_slots: int, vocab_size: int, num_lanes: int = 1) -> PackedLoad:
    """num_slots: of each lane. Raises: InvariantError where an id or the slot is out of range."""
    params, stops, output = load.request.sampling, load.request.stop.stop_token_ids, load.output_ids
    if not 0 <= load.slot.slot < num_lanes * num_slots or len(stops) > MAX_STOP_IDS:
        raise InvariantError(
            f"load of {load.slot}: {num_lanes} x {num_slots} slots, {len(stops)} of {MAX_STOP_IDS} stop ids"
        )
    biased = [token for token, _ in params.logit_bias]
    for ids in (stops, biased, params.allowed_token_ids or (), load.request.prompt_ids, output):
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            raise InvariantError(f"load of {load.slot}: an id is not in the vocabulary of {vocab_size}")
    # One candidate, or one in all but name: greedy rows skip the sampler.
    is_greedy = params.temperature <= GREEDY_TEMPERATURE or params.top_k == 1
    scalars = np.full(SCALARS, vocab_size, np.int32)
    flags = _MASKED * params.has_mask + _LOGPROBS * (params.num_logprobs is not None)
    top_k = 0 if params.top_k >= vocab_size else params.top_k
    lane, slot = divmod(load.slot.slot, num_slots)
    scalars[:3] = lane * (num_slots + 1) + slot, output[-1] if output else 0, top_k
    scalars[3:5].view(np.uint32)[:] = params.seed >> 32, params.seed & 0xFFFFFFFF
    scalars[5] = flags
    scalars[_NUM_INTS : _NUM_INTS + len(_FLOATS)].view(np.float32)[:] = (
        0.0 if is_greedy else params.temperature,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )
    scalars[_NUM_INTS + len(_FLOATS) :][: len(stops)] = stops
    if not (params.has_mask or params.has_penalties):
        return PackedLoad(scalars=scalars, rows=None)
    rows = (
        _bias_row(params, vocab_size),
        _count_row(load.request.prompt_ids, vocab_size) > 0,
        _count_row(output, vocab_size),
    )
    return PackedLoad(scalars=scalars, rows=rows)


def neutral_load(num_slots: int, vocab_size: int) -> PackedLoad:
    """For warm-up: the first lane's null slot as initial_state made it."""
    scalars = np.full(SCALARS, vocab_size, np.int32)
    scalars[:_NUM_INTS] = num_slots, 0, 0, 0, 0, 0
    scalars[_NUM_INTS : _NUM_INTS + len(_FLOATS)].view(np.float32)[:] = 0, 1, 0, 1, 0, 0
    rows = (np.zeros(vocab_size, np.float32), np.zeros(vocab_size, bool), np.zeros(vocab_size, np.int32))
    return PackedLoad(scalars=scalars, rows=rows)


def _count_row(ids: tuple[int, ...], vocab_size: int) -> np.ndarray:
    return np.bincount(np.array(ids, np.int64), minlength=vocab_size).astype(np.int32)


def _bias_row(params: SamplingParams, vocab_size: int) -> np.ndarray:
    bias_V = np.zeros(vocab_size, np.float32)
    if params.allowed_token_ids is not None:
        bias_V[:] = -np.inf
        bias_V[list(params.allowed_token_ids)] = 0
    for token, bias in params.logit_bias:
        bias_V[token] += bias
    return bias_V
