"""Inputs of rotary attention made from an attention case: projections and angles, and what must come out."""

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from headrace.pallas_kernels import api
from headrace.pallas_kernels.kv_quantization import to_pool
from headrace.pallas_kernels.paged_attention.cases import AttentionCase
from headrace.pallas_kernels.paged_attention.inputs import AttentionInputs, expected, make_inputs
from headrace.pallas_kernels.types import AttnMeta, Implementation, Kernels, KVPool

CPU = Kernels(implementation=Implementation.CPU)


class Rotary:
    """One case: `inputs` are those of paged attention, with queries and keys as they are after the rotation."""

    def __init__(self, case: AttentionCase, seed: int = 3) -> None:
        self.case = case
        inputs = make_inputs(case, seed)
        rng = np.random.default_rng(seed + 2)
        heads, kv_heads, width = case.num_heads, case.num_kv_heads, case.head_dim
        self.qkv_TX = rng.standard_normal((case.num_tokens, (heads + 2 * kv_heads) * width), np.float32)
        position_T = np.zeros(case.num_tokens)
        for token, _, position in inputs.batch.rows:
            position_T[token] = position
        angle_TH = position_T[:, None] * 10_000.0 ** (-np.arange(width // 2) / (width // 2))
        self.cos_TH, self.sin_TH = np.cos(angle_TH).astype(np.float32), np.sin(angle_TH).astype(np.float32)
        x_TNH = self.qkv_TX.reshape(case.num_tokens, heads + 2 * kv_heads, width)
        turned = self._turned(x_TNH[:, : heads + kv_heads]).astype(np.float32)
        k, v = turned[:, heads:], x_TNH[:, heads + kv_heads :]
        new = jax.tree.map(np.asarray, to_pool(jnp.asarray(k), jnp.asarray(v), jnp.dtype(case.kv_dtype)))
        self.inputs: AttentionInputs = replace(inputs, q_TNH=turned[:, :heads], new=new)

    def _turned(self, x_TNH: np.ndarray) -> np.ndarray:
        low, high = np.split(x_TNH.astype(np.float64), 2, axis=-1)
        cos, sin = self.cos_TH[:, None].astype(np.float64), self.sin_TH[:, None].astype(np.float64)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    @property
    def meta(self) -> AttnMeta:
        return self.inputs.batch.meta

    def run(self, pool: KVPool | None = None, meta: AttnMeta | None = None) -> tuple[np.ndarray, KVPool]:
        """(float32 [T, N, H], pool) of the CPU implementation; the pool given is left as it is."""
        pool = jax.tree.map(jnp.array, self.inputs.pool if pool is None else pool)
        out, pool = attention()(
            self.qkv_TX, self.cos_TH, self.sin_TH, pool, self.inputs.first_row, self.meta if meta is None else meta,
            spec=self.inputs.spec, sinks_N=self.inputs.sinks_N,
        )  # fmt: skip
        return np.asarray(out).reshape(self.inputs.q_TNH.shape), pool

    def real(self, out_TNH: np.ndarray) -> np.ndarray:
        return out_TNH[[token for token, _, _ in self.inputs.batch.rows]]

    def expected(self) -> np.ndarray:
        """float64 of the real tokens."""
        return expected(self.case, self.inputs)


@functools.cache
def attention() -> Callable[..., tuple[jax.Array, KVPool]]:
    run = functools.partial(api.rotary_attention, kernels=CPU)
    return jax.jit(run, static_argnames="spec", donate_argnames="pool")
