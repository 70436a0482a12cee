"""Steps of the served decoder over a small pool of pages, put together by hand."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from headrace.model import decoder
from headrace.model.config import ModelConfig
from headrace.model.decoder import StepInputs, forward, pool_shape
from headrace.model.weights import Weights
from headrace.pallas_kernels.types import AttnMeta, KVPool

PAGE, BLOCK, PAGES, MAX_PAGES = 4, 8, 64, 16


@dataclass(frozen=True)
class Segment:
    """count tokens of ids from start on, in pages."""

    ids: tuple[int, ...]
    start: int
    count: int
    pages: tuple[int, ...]


@functools.cache
def step(cfg: ModelConfig):  # type: ignore[no-untyped-def]
    def run(weights: Weights[jax.Array], inputs: StepInputs, pool: KVPool) -> tuple[jax.Array, KVPool]:
        hidden, pool = forward(weights, inputs, pool, cfg)
        return decoder.logits(weights, hidden), pool

    return jax.jit(run)


def batch(decode: list[Segment | None], prefill: list[Segment], blocks: int) -> tuple[StepInputs, list[int]]:
    """Inputs, and the flat index of each sequence's last token."""
    sequences = [*decode, *prefill]
    table = np.zeros((len(sequences), MAX_PAGES), np.int32)
    for row, segment in enumerate(sequences):
        if segment is not None:
            table[row, : len(segment.pages)] = segment.pages
    token = np.zeros(len(decode) + blocks * BLOCK, np.int32)
    position = np.zeros_like(token)
    block_rows = np.zeros((blocks, 3), np.int32)
    block_rows[:, 0] = len(decode)
    last = []
    for row, segment in enumerate(decode):
        if segment is not None:
            assert segment.count == 1
            token[row], position[row] = segment.ids[segment.start], segment.start
        last.append(row)
    first = 0
    for index, segment in enumerate(prefill):
        flat = len(decode) + first * BLOCK
        token[flat : flat + segment.count] = segment.ids[segment.start : segment.start + segment.count]
        for offset in range(0, segment.count, BLOCK):
            block_rows[first] = len(decode) + index, segment.start + offset, min(BLOCK, segment.count - offset)
            first += 1
        last.append(flat + segment.count - 1)
    in_block = np.arange(BLOCK)
    position[len(decode) :] = (block_rows[:, 1:2] + in_block).reshape(-1)
    meta = AttnMeta(
        position_B=position[: len(decode)],
        page_table_ZM=table,
        kv_len_Z=np.array([0 if s is None else s.start + s.count for s in sequences], np.int32),
        blk_seq_J=block_rows[:, 0].copy(),
        blk_pos_J=block_rows[:, 1].copy(),
        blk_len_J=block_rows[:, 2].copy(),
    )
    return StepInputs(token_T=token, position_T=position, meta=meta), last


def run(
    cfg: ModelConfig,
    weights: Weights[jax.Array],
    pool: KVPool,
    decode: list[Segment | None],
    prefill: list[Segment],
    blocks: int,
) -> tuple[np.ndarray, KVPool]:
    """Logits after each sequence's last token."""
    inputs, last = batch(decode, prefill, blocks)
    out, pool = step(cfg)(weights, inputs, pool)
    return np.asarray(out)[last], pool


def new_pool(cfg: ModelConfig, fill: float = 0.0) -> KVPool:
    """The null page is zeros; others hold fill."""
    pool = np.full(pool_shape(cfg, PAGES, PAGE), fill, np.float32)
    pool[::PAGES] = 0
    return KVPool(jnp.asarray(pool))


def pages(seed: int, count: int = 12) -> tuple[int, ...]:
    return tuple(int(p) for p in np.random.default_rng(seed).permutation(np.arange(1, PAGES))[:count])
