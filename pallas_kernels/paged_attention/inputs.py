"""Random inputs of an attention case, and what must come out, computed apart from every implementation."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from headrace.pallas_kernels.batch_case import Batch, make_batch
from headrace.pallas_kernels.kv_quantization import to_pool
from headrace.pallas_kernels.paged_attention.cases import AttentionCase
from headrace.pallas_kernels.types import AttentionSpec, KVPool, TokenKV

LAYERS, LAYER = 2, 1
"""The pool holds two layers, and the second one is attended to, so that a forgotten first_row shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionInputs:
    """Arguments of ``api.paged_attention`` for one case; first_row is a Python int. Arrays are NumPy's."""

    batch: Batch
    q_TNH: np.ndarray
    new: TokenKV
    pool: KVPool
    first_row: int
    spec: AttentionSpec
    sinks_N: np.ndarray | None

    def arguments(self) -> tuple[object, ...]:
        return self.q_TNH, self.new, self.pool, self.first_row, self.batch.meta, self.spec


def make_inputs(case: AttentionCase, seed: int) -> AttentionInputs:
    """Everything random, pages that nobody owns included."""
    batch = make_batch(case, seed)
    rng = np.random.default_rng(seed + 1)
    rows, heads, width = LAYERS * batch.num_pages, case.num_kv_heads, case.head_dim
    stored = _quantized(rng, rows * case.page_tokens, heads, width, case.kv_dtype)
    pages = stored.kv_TKC.reshape(rows, case.page_tokens, heads, 2 * width).swapaxes(1, 2)
    scale = stored.scale_TK2
    if scale is not None:
        scale = np.ascontiguousarray(scale.reshape(rows, case.page_tokens, heads, 2).transpose(0, 2, 3, 1))
    q = rng.standard_normal((case.num_tokens, case.num_heads, width), np.float32)
    return AttentionInputs(
        batch=batch,
        q_TNH=np.asarray(jnp.asarray(q, case.q_dtype)),
        new=_quantized(rng, case.num_tokens, heads, width, case.kv_dtype),
        pool=KVPool(np.ascontiguousarray(pages), scale),
        first_row=LAYER * batch.num_pages,
        spec=AttentionSpec(scale=width**-0.5, window=case.window, soft_cap=case.soft_cap),
        sinks_N=rng.standard_normal(case.num_heads, np.float32) if case.has_sinks else None,
    )


def _quantized(rng: np.random.Generator, tokens: int, heads: int, width: int, dtype: str) -> TokenKV:
    k, v = rng.standard_normal((2, tokens, heads, width), np.float32)
    return jax.tree.map(np.asarray, to_pool(jnp.asarray(k), jnp.asarray(v), jnp.dtype(dtype)))


def poisoned(case: AttentionCase, inputs: AttentionInputs) -> KVPool:
    """The pool with NaN (the largest integer, in integer pages) wherever no earlier step stored a token."""
    pages, scale = np.array(inputs.pool.pages_RKWC), inputs.pool.scale_RK2W
    is_used = np.zeros((pages.shape[0], case.page_tokens), bool)
    for sequence, length in enumerate(case.old_lens):
        first = 0 if case.window is None else max(length + 1 - case.window, 0)
        for position in range(first, length):
            is_used[row_of(case, inputs, sequence, position), position % case.page_tokens] = True
    poison = np.iinfo(pages.dtype).max if np.issubdtype(pages.dtype, np.integer) else np.nan
    pages.swapaxes(1, 2)[~is_used] = poison
    if scale is not None:
        scale = np.array(scale)
        scale.transpose(0, 3, 1, 2)[~is_used] = np.nan
    return KVPool(pages, scale)


def row_of(case: AttentionCase, inputs: AttentionInputs, sequence: int, position: int) -> int:
    """Row of the pool that holds this token."""
    return inputs.first_row + int(inputs.batch.meta.page_table_ZM[sequence, position // case.page_tokens])


def stored_after(case: AttentionCase, inputs: AttentionInputs) -> KVPool:
    """The pool with this step's real tokens in it, written one by one."""
    pages = np.array(inputs.pool.pages_RKWC)
    scale = None if inputs.pool.scale_RK2W is None else np.array(inputs.pool.scale_RK2W)
    for token, sequence, position in inputs.batch.rows:
        row, offset = row_of(case, inputs, sequence, position), position % case.page_tokens
        pages[row, :, offset] = inputs.new.kv_TKC[token]
        if scale is not None:
            scale[row, :, :, offset] = inputs.new.scale_TK2[token]
    return KVPool(pages, scale)


def expected(case: AttentionCase, inputs: AttentionInputs) -> np.ndarray:
    """float64 [real tokens, N, H], in the order of batch.rows: one dense softmax for each token and head."""
    after = stored_after(case, inputs)
    kv = after.pages_RKWC.astype(np.float64)
    if after.scale_RK2W is not None:
        kv = kv * np.repeat(after.scale_RK2W.swapaxes(2, 3), case.head_dim, axis=3)
    q = inputs.q_TNH.astype(np.float64) * inputs.spec.scale
    out = np.empty((len(inputs.batch.rows), case.num_heads, case.head_dim))
    for index, (token, sequence, position) in enumerate(inputs.batch.rows):
        first = 0 if case.window is None else max(position + 1 - case.window, 0)
        pages = inputs.first_row + inputs.batch.meta.page_table_ZM[sequence]
        keys = kv[pages].swapaxes(1, 2).reshape(-1, case.num_kv_heads, 2 * case.head_dim)[first : position + 1]
        for head in range(case.num_heads):
            of_head = keys[:, head // (case.num_heads // case.num_kv_heads)]
            out[index, head] = _softmax_average(case, inputs, q[token, head], of_head, head)
    return out


def _softmax_average(
    case: AttentionCase, inputs: AttentionInputs, q_H: np.ndarray, kv_YC: np.ndarray, head: int
) -> np.ndarray:
    score = kv_YC[:, : case.head_dim] @ q_H
    if case.soft_cap is not None:
        score = case.soft_cap * np.tanh(score / case.soft_cap)
    sink = -np.inf if inputs.sinks_N is None else float(inputs.sinks_N[head])
    top = max(score.max(), sink)
    weight = np.exp(score - top)
    return weight @ kv_YC[:, case.head_dim :] / (weight.sum() + np.exp(sink - top))
