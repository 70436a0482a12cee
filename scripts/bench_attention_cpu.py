"""Rotary attention on CPU: decode and prefill of SmolLM2-135M's heads, beside the reference and a streaming read.

One call runs all layers, as in a step; before each the caches are flushed by reading 96 MB, as weights do. The least of
the repeats is shown: on a shared machine it is the number least disturbed.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from headrace.model.rope import Rotation, rotate
from headrace.pallas_kernels import api
from headrace.pallas_kernels.kv_quantization import to_pool
from headrace.pallas_kernels.types import AttentionSpec, AttnMeta, Implementation, Kernels, KVPool

HEADS, KV_HEADS, WIDTH, LAYERS, PAGE = 9, 3, 64, 30, 16
MAX_POOL_BYTES = 1 << 30
"""Long contexts of many rows run fewer layers, and the time is scaled to all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """decode: rows of `context` tokens each. chunk: tokens of one query block that starts at `context`; 0 = none."""

    decode: int = 0
    chunk: int = 0
    context: int

    @property
    def keys(self) -> int:
        """(query, key) pairs of one head."""
        return self.decode * self.context + self.chunk * self.context + self.chunk * (self.chunk + 1) // 2

    @property
    def tokens_read(self) -> int:
        return self.decode * self.context + (self.context + self.chunk if self.chunk else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    shape: Shape
    kv: str
    implementation: str
    layers_run: int
    ms: float
    median_ms: float
    gb_per_s: float
    gflop_per_s: float


def arguments(shape: Shape, kv: str) -> tuple[tuple[jax.Array, ...], KVPool, AttnMeta, int]:
    """((qkv, cos, sin), pool, meta, pages of one layer)."""
    rng = np.random.default_rng(1)
    sequences = shape.decode + (shape.chunk > 0)
    each = -(-(shape.context + shape.chunk) // PAGE)
    pages = 1 + sequences * each
    page_bytes = KV_HEADS * PAGE * 2 * WIDTH * jnp.dtype(kv).itemsize
    layers = max(1, min(LAYERS, MAX_POOL_BYTES // (pages * page_bytes)))
    table = 1 + rng.permutation(sequences * each).reshape(sequences, each).astype(np.int32)
    lens = [shape.context] * shape.decode + [shape.context + shape.chunk] * (shape.chunk > 0)
    block = [[shape.decode], [shape.context], [shape.chunk]] if shape.chunk else [[], [], []]
    meta = AttnMeta(
        jnp.full(shape.decode, shape.context - 1, jnp.int32), jnp.asarray(table), jnp.array(lens, jnp.int32),
        *(jnp.array(x, jnp.int32) for x in block),
    )  # fmt: skip
    tokens = shape.decode + shape.chunk
    angle = rng.uniform(0, 6, (tokens, WIDTH // 2))
    inputs = rng.standard_normal((tokens, (HEADS + 2 * KV_HEADS) * WIDTH)), np.cos(angle), np.sin(angle)
    pool = jnp.full((layers * pages, KV_HEADS, PAGE, 2 * WIDTH), 1, kv)
    scale = jnp.full((layers * pages, KV_HEADS, 2, PAGE), 0.01) if kv == "int8" else None
    return tuple(jnp.asarray(x, jnp.float32) for x in inputs), KVPool(pool, scale), meta, pages


def by_reference(
    qkv: jax.Array, cos: jax.Array, sin: jax.Array, pool: KVPool, row: jax.Array, meta: AttnMeta, spec: AttentionSpec
) -> tuple[jax.Array, KVPool]:
    x = qkv.reshape(qkv.shape[0], -1, WIDTH)
    turned = rotate(x[:, : HEADS + KV_HEADS], Rotation(cos, sin))
    new = to_pool(turned[:, HEADS:], x[:, HEADS + KV_HEADS :], pool.dtype)
    out, pool = api.paged_attention(turned[:, :HEADS], new, pool, row, meta, spec, kernels=Kernels())
    return out.reshape(qkv.shape[0], -1), pool


def layers_of(name: str, pages: int, count: int) -> Callable[..., tuple[jax.Array, KVPool]]:
    spec = AttentionSpec(scale=WIDTH**-0.5)
    cpu = functools.partial(api.rotary_attention, kernels=Kernels(implementation=Implementation.CPU))
    attend = by_reference if name == "reference" else cpu

    def step(inputs: tuple[jax.Array, ...], pool: KVPool, meta: AttnMeta) -> tuple[jax.Array, KVPool]:
        def layer(index: jax.Array, state: tuple[jax.Array, KVPool]) -> tuple[jax.Array, KVPool]:
            out, pool = attend(*inputs, state[1], index * pages, meta, spec)
            return state[0] + out, pool

        start = jnp.zeros((inputs[0].shape[0], HEADS * WIDTH))
        return jax.lax.fori_loop(0, count, layer, (start, pool))

    return jax.jit(step, donate_argnums=1)


def read_all(workers: ThreadPoolExecutor, parts: list[np.ndarray]) -> float:
    start = time.perf_counter()
    list(workers.map(np.bitwise_xor.reduce, parts))
    return time.perf_counter() - start


def timed(shape: Shape, kv: str, name: str, repeats: int, flush: Callable[[], float]) -> Row:
    inputs, pool, meta, pages = arguments(shape, kv)
    layers = pool.pages_RKWC.shape[0] // pages
    run = layers_of(name, pages, layers)
    times = []
    for _ in range(repeats + 1):
        flush()
        start = time.perf_counter()
        out, pool = run(inputs, pool, meta)
        jax.block_until_ready((out, pool))
        times.append((time.perf_counter() - start) / layers * LAYERS)
    best, scale = min(times[1:]), 2 * jnp.dtype(kv).itemsize + (8 / WIDTH if kv == "int8" else 0)
    return Row(
        shape=shape, kv=kv, implementation=name, layers_run=layers, ms=best * 1e3,
        median_ms=statistics.median(times[1:]) * 1e3,
        gb_per_s=shape.tokens_read * KV_HEADS * WIDTH * scale * LAYERS / best / 1e9,
        gflop_per_s=4 * shape.keys * HEADS * WIDTH * LAYERS / best / 1e9,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kv", nargs="+", default=["float32"], choices=["float32", "bfloat16", "int8"])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 4, 8, 16, 32])
    parser.add_argument("--contexts", nargs="+", type=int, default=[200, 1000, 4000])
    parser.add_argument("--chunks", nargs="*", type=int, default=[16, 64, 256])
    parser.add_argument("--starts", nargs="+", type=int, default=[0, 1008, 4000], help="whole pages")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--reference", action="store_true", help="also time the reference")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    workers, parts = ThreadPoolExecutor(2), np.split(np.ones(12 << 20, np.int64), 2)
    flush = functools.partial(read_all, workers, parts)
    stream = max(2 * parts[0].nbytes / flush() / 1e9 for _ in range(20))
    print(f"streaming read, two threads: {stream:.1f} GB/s")
    shapes = [Shape(decode=rows, context=context) for rows in given.rows for context in given.contexts]
    shapes += [Shape(chunk=chunk, context=start) for chunk in given.chunks for start in given.starts]
    rows = []
    for kv in given.kv:
        for shape in shapes:
            for name in ("cpu", "reference") if given.reference else ("cpu",):
                row = timed(shape, kv, name, given.repeats, flush)
                rows.append(asdict(row))
                print(
                    f"{kv:8} {name:9} rows {shape.decode:2} block {shape.chunk:3} at {shape.context:4}:"
                    f" {row.ms:7.2f} ms, median {row.median_ms:7.2f}, {row.gb_per_s:5.1f} GB/s,"
                    f" {row.gflop_per_s:6.1f} GFLOP/s",
                    flush=True,
                )
    if given.out:
        given.out.write_text(json.dumps({"stream_gb_per_s": stream, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
