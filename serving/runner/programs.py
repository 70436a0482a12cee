"""The jitted functions: one step per bucket. Pure; donated arguments are updated in place.

On a mesh a step runs inside ``shard_map``: each device has its lane's slots and pages and its part of the model. The
packed plan is whole on all of them, and so is the result.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from headrace.model.config import ModelConfig
from headrace.model.decoder import StepInputs, best_token, forward_counting, has_best_column, logits
from headrace.model.sampling import Sampled, SamplingState, num_alternatives, sample, sample_or_best
from headrace.model.weights import LayerWeights, Weights
from headrace.pallas_kernels.types import Kernels, KVPool, UnsupportedCase
from headrace.serving.core.errors import ConfigError
from headrace.serving.core.plan import Bucket, ProgramKind, SampledToken, TokenLogprobs
from headrace.serving.runner.backend import Backend
from headrace.serving.runner.expert_counts import count_shapes, counted
from headrace.serving.runner.inputs import Fields, InputLayout
from headrace.serving.runner.warmup import Program
from headrace.sharding.collectives import ONE_DEVICE, Shards

Array = jax.Array
Results = tuple[KVPool, SamplingState, Array | None, Array]
Step = Callable[[Weights[Array], KVPool, SamplingState, Array | None, Array], Results]
"""(weights, pool, state, expert counts, packed inputs) -> (pool, state, expert counts, packed results)."""


def program_name(bucket: Bucket) -> str:
    """Such as decode-16 or mixed-16+256."""
    if bucket.kind is ProgramKind.DECODE:
        return f"decode-{bucket.decode_rows}"
    return f"mixed-{bucket.decode_rows}+{bucket.prefill_tokens}"


def make_step(cfg: ModelConfig, layout: InputLayout, kernels: Kernels, shards: Shards = ONE_DEVICE) -> Step:
    """The function of one bucket, to be jitted with pool, state and counts donated.

    shards: what one device of a mesh has.
    """

    def step(
        weights: Weights[Array], pool: KVPool, state: SamplingState, counts_CLE: Array | None, packed: Array
    ) -> Results:
        fields = layout.unpack(packed[shards.data.index])
        inputs = _step_inputs(layout, fields, state)
        weights = weights.replace(layers=own_layers(weights.layers, shards))
        hidden_TD, pool, load_LE = forward_counting(weights, inputs, pool, cfg, kernels=kernels, shards=shards)
        # Only rows that may sample reach the head: on small models it is a quarter of a decode step.
        sampled_row = jnp.concatenate([jnp.arange(layout.rows), layout.rows + fields.last_Q])
        hidden_RD = shards.stage.of_last(hidden_TD.at[sampled_row].get(mode="promise_in_bounds"))
        rows = (state, fields.slot_Z, fields.kv_len_Z, fields.holds_stops_Z > 0)
        if has_best_column(weights, kernels, shards):
            is_real_R = fields.slot_Z != layout.config.num_slots
            sampled, state = sample_or_best(
                # Of greedy rows too: a second pass over the head for their best columns costs more than their logits.
                lambda: logits(weights, hidden_RD, is_real_R, kernels=kernels),
                lambda: best_token(weights, hidden_RD, is_real_R, kernels=kernels),
                *rows,
                kernels,
            )
        else:
            sampled, state = sample(logits(weights, hidden_RD, kernels=kernels), *rows, shards.vocabulary, kernels)
        return pool, state, counted(counts_CLE, load_LE), shards.data.gather(pack_sampled(sampled), axis=0)

    return step


def step_program(
    cfg: ModelConfig, layout: InputLayout, backend: Backend, weights: Weights[Any], pool: KVPool, state: SamplingState
) -> Program:
    """The program of one bucket. weights, pool, state: shapes, types and places.

    On a mesh every device runs the same function on its parts, and what they exchange is written out in it.
    Tracing it raises ConfigError where the chosen kernels cannot run it: nothing else runs in their place.
    """
    kernels, name = backend.kernels, program_name(layout.bucket)
    packed = jax.ShapeDtypeStruct(layout.shape, jnp.int32, sharding=backend.sharding())
    arguments = (weights, pool, state, count_shapes(cfg, backend), packed)
    step = make_step(cfg, layout, kernels, backend.shards)
    if backend.mesh is not None:
        cuts = jax.tree.map(lambda x: x.sharding.spec, arguments)
        step = jax.shard_map(
            step, mesh=backend.mesh, in_specs=cuts, out_specs=(*cuts[1:4], PartitionSpec()), check_vma=False
        )

    @functools.wraps(step)
    def checked(*arguments: Any) -> Results:
        try:
            return step(*arguments)
        except UnsupportedCase as error:
            raise ConfigError(
                f"--attention {kernels.implementation} cannot run the program {name}: {error.why}; --attention "
                f"reference runs every shape, more slowly"
            ) from error

    return Program(function=checked, donated=(1, 2, 3), arguments=arguments)


def load_program(
    load: Callable[..., SamplingState], backend: Backend, arguments: tuple[SamplingState, *tuple[Any, ...]]
) -> Program:
    """The program of ``load_scalars`` or ``load_with_rows``. arguments: of state and load: shapes, types and places."""
    if backend.mesh is None:
        return Program(function=load, donated=(0,), arguments=arguments)
    cuts = jax.tree.map(lambda x: x.sharding.spec, arguments)
    on_mesh = jax.shard_map(
        functools.partial(load, shards=backend.shards),
        mesh=backend.mesh,
        in_specs=cuts,
        out_specs=cuts[0],
        check_vma=False,
    )
    return Program(function=on_mesh, donated=(0,), arguments=arguments)


def own_layers(
    layers: LayerWeights[Array] | tuple[LayerWeights[Array], ...], shards: Shards
) -> LayerWeights[Array] | tuple[LayerWeights[Array], ...]:
    """Of one stage. Unrolled layers have a first axis of stages, of which a device has one; stacked ones are cut."""
    if shards.stage.size == 1 or isinstance(layers, LayerWeights):
        return layers
    found: tuple[LayerWeights[Array], ...] = jax.tree.map(lambda x: x[0], layers)
    return found


def _step_inputs(layout: InputLayout, fields: Fields, state: SamplingState) -> StepInputs:
    meta = layout.meta(fields)
    last_B = state.last_token_B[fields.slot_Z[: layout.rows]]
    token_B = jnp.where(fields.is_given_B > 0, fields.token_B, last_B)
    block = jnp.arange(layout.config.block_tokens, dtype=jnp.int32)
    position_T = (fields.blk_pos_J[:, None] + block).reshape(-1)
    return StepInputs(
        token_T=jnp.concatenate([token_B, fields.token_T]),
        position_T=jnp.concatenate([meta.position_B, position_T]),
        meta=meta,
    )


def pack_sampled(sampled: Sampled) -> Array:
    """i32 [R, 4 + 2A]: one transfer; floats as their bits."""

    def bits(x: Array) -> Array:
        return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)

    columns = (sampled.token_R, sampled.is_finite_R.astype(jnp.int32), bits(sampled.logprob_R), sampled.rank_R)
    return jnp.concatenate([jnp.stack(columns, axis=1), sampled.top_id_RA, bits(sampled.top_logprob_RA)], axis=1)


def read_sampled(row: np.ndarray, num_logprobs: int | None, vocab_size: int) -> SampledToken:
    """One row of pack_sampled. num_logprobs: as in SamplingParams."""
    token_id, is_finite = int(row[0]), bool(row[1])
    if num_logprobs is None or not is_finite:
        return SampledToken(token_id=token_id, is_finite=is_finite)
    floats = row.view(np.float32)
    width = num_alternatives(vocab_size)
    top = tuple(zip(row[4 : 4 + num_logprobs].tolist(), floats[4 + width :][:num_logprobs].tolist(), strict=False))
    logprobs = TokenLogprobs(chosen=float(floats[2]), rank=int(row[3]), top=top)
    return SampledToken(token_id=token_id, is_finite=True, logprobs=logprobs)
