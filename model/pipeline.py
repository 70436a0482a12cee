"""Layers over the stages of a mesh: a step's rows and query blocks follow each other through them as micro-batches.

In tick t stage s works on micro-batch t - s (GPipe, arXiv:1811.06965), so a step of M micro-batches over S stages takes
M + S - 1 ticks, of which each stage works in M. A stage without a micro-batch runs on padding: a branch around its
layers would copy the pool. Blocks of one prompt stay in order on each stage: later ones find the keys of earlier ones.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from headrace.model.rope import Rotation
from headrace.pallas_kernels.types import AttnMeta, KVPool
from headrace.sharding.collectives import MeshAxis

Array = jax.Array


@struct.dataclass
class Batch:
    """What layers get of a step or a micro-batch: x_TD float32 [T, D], the tokens' angles, and where they belong."""

    x_TD: Array
    turn: Rotation
    meta: AttnMeta


RunLayers = Callable[[Batch, KVPool], tuple[Array, KVPool, Array | None]]
"""All layers that a device has, over a batch: (float32 [T, D], pool, load [layers, E] or None)."""


def num_micro_batches(num_rows: int, num_blocks: int, num_stages: int) -> int:
    """As many as stages, where rows and blocks can be shared out evenly among so many; else the most that can."""
    both = math.gcd(num_rows, num_blocks)
    return max(count for count in range(1, num_stages + 1) if both % count == 0)


def run_stages(run: RunLayers, batch: Batch, pool: KVPool, stage: MeshAxis) -> tuple[Array, KVPool, Array | None]:
    """Inside ``shard_map``, batch the same on every stage. Returns as run; x_TD is that of the last stage there alone.

    The pool is the stage's own, and so is the load.
    """
    count = num_micro_batches(batch.meta.num_decode_rows, batch.meta.num_blocks, stage.size)
    parts = _split(batch, count)
    load_shape = jax.eval_shape(run, _part(parts, 0), pool)[2]

    def tick(carry: tuple[Array, KVPool, Array, Array | None], now: Array) -> tuple[tuple, None]:
        arrived_TD, pool, done_MTD, load = carry
        number = now - stage.index
        is_here = (number >= 0) & (number < count)
        number = jnp.clip(number, 0, count - 1)
        part = _part(parts, number)
        x_TD = jnp.where(stage.index == 0, part.x_TD, arrived_TD)
        y_TD, pool, added = run(part.replace(x_TD=x_TD, meta=_only_if(is_here, part.meta)), pool)
        done_MTD = done_MTD.at[number].set(jnp.where(is_here, y_TD, done_MTD[number]))
        load = None if load is None else load + added
        return (stage.to_next(y_TD), pool, done_MTD, load), None

    start = (
        jnp.zeros_like(parts.x_TD[0]),
        pool,
        jnp.zeros_like(parts.x_TD),
        None if load_shape is None else jnp.zeros(load_shape.shape, load_shape.dtype),
    )
    ticks = jnp.arange(count + stage.size - 1, dtype=jnp.int32)
    (_, pool, done_MTD, load), _ = lax.scan(tick, start, ticks)
    return _joined(done_MTD, batch.meta.num_decode_rows // count), pool, load


def _only_if(is_here: Array, meta: AttnMeta) -> AttnMeta:
    """meta, or padding: rows at position 0 of the null page, blocks without tokens."""
    return meta.replace(
        position_B=jnp.where(is_here, meta.position_B, 0),
        page_table_ZM=jnp.where(is_here, meta.page_table_ZM, 0),
        kv_len_Z=jnp.where(is_here, meta.kv_len_Z, 0),
        blk_len_J=jnp.where(is_here, meta.blk_len_J, 0),
    )


def _part(parts: Batch, number: Array | int) -> Batch:
    part: Batch = jax.tree.map(lambda x: x[number], parts)
    return part


def _split(batch: Batch, count: int) -> Batch:
    """Micro-batches on a new first axis: each has its rows, its blocks, and all prefill segments."""
    meta = batch.meta
    rows, each = meta.num_decode_rows, meta.num_decode_rows // count

    def tokens(x_TX: Array) -> Array:
        parts = [x.reshape(count, -1, *x.shape[1:]) for x in (x_TX[:rows], x_TX[rows:])]
        return jnp.concatenate(parts, axis=1)

    def sequences(x_ZX: Array) -> Array:
        segments = jnp.broadcast_to(x_ZX[rows:], (count, *x_ZX[rows:].shape))
        return jnp.concatenate([x_ZX[:rows].reshape(count, each, *x_ZX.shape[1:]), segments], axis=1)

    def blocks(x_J: Array) -> Array:
        return x_J.reshape(count, -1)

    return Batch(
        x_TD=tokens(batch.x_TD),
        turn=jax.tree.map(tokens, batch.turn),
        meta=AttnMeta(
            position_B=meta.position_B.reshape(count, each),
            page_table_ZM=sequences(meta.page_table_ZM),
            kv_len_Z=sequences(meta.kv_len_Z),
            # A segment's row lies behind the rows of the micro-batch.
            blk_seq_J=blocks(meta.blk_seq_J - rows + each),
            blk_pos_J=blocks(meta.blk_pos_J),
            blk_len_J=blocks(meta.blk_len_J),
        ),
    )


def _joined(x_MTD: Array, rows_each: int) -> Array:
    """[T, D] in the order of the step: all rows, then all blocks."""
    width = x_MTD.shape[-1]
    return jnp.concatenate([x_MTD[:, :rows_each].reshape(-1, width), x_MTD[:, rows_each:].reshape(-1, width)])
