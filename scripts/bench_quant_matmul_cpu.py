"""Products with tiled weights on this CPU: GFLOP/s of each activation mode, beside XLA's float32 and a pure read.

Shapes are SmolLM2-135M's over layers that are not in the cache (a product reads each of `--layers` weights once), its
head, and the two rates of the machine in the same rounds: one after the other, best of `--rounds`, so that whatever
else runs hits all alike. With `--check`, fails where a ratio to XLA's product is below its floor: a compiler that
spills accumulators halves the rates.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from headrace.pallas_kernels import api
from headrace.pallas_kernels.native import library
from headrace.pallas_kernels.native.probes import stream
from headrace.pallas_kernels.quant_matmul.cpu.tiles import tiled
from headrace.pallas_kernels.types import Activations, GroupQuant, Implementation, Kernels, TiledQuant

SHAPES = {"qkv": (576, 960), "gate and up": (576, 3072), "down": (1536, 576)}
HEAD = (576, 49152)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
FLOOR = {
    (Activations.EXACT, 4): 0.6, (Activations.INT16, 4): 1.2, (Activations.INT8, 4): 2.0,
    (Activations.EXACT, 8): 0.6, (Activations.INT16, 8): 1.2, (Activations.INT8, 8): 2.0,
}  # fmt: skip
"""Least share of XLA's float32 rate at 512 rows, by activations and bits, of products with 64 rows and more."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--isa", help="avx2, avx512 or neon; by default the best of this machine")
    parser.add_argument("--check", action="store_true", help="fail below the floors")
    parser.add_argument("--out", type=Path, help="JSON of all rates")
    args = parser.parse_args()
    isa = library.load(isa=args.isa).isa
    rng = np.random.default_rng(0)
    cases = _layer_cases(rng, args.layers, args.rows) | _head_cases(rng, args.rows)
    seconds = {name: float("inf") for name in cases}
    for name, (run, _) in cases.items():
        jax.block_until_ready(run())
        print(f"\rcompiled {name:<60}", end="", file=sys.stderr, flush=True)
    for index in range(args.rounds):
        for name, (run, _) in cases.items():
            seconds[name] = min(seconds[name], _seconds(run))
        print(f"\rround {index + 1} of {args.rounds:<60}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    rates = {name: amount / seconds[name] / 1e9 for name, (_, amount) in cases.items()}
    report = {"isa": isa, "layers": args.layers, "rounds": args.rounds, "rates": rates}
    for name, rate in rates.items():
        print(f"{name:<60} {rate:8.1f} {'GB/s' if name.startswith('read') else 'GFLOP/s'}")
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return _check(rates) if args.check else 0


def _seconds(run: Callable[[], jax.Array]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def _kernels(mode: Activations) -> Kernels:
    return Kernels(implementation=Implementation.CPU, activations=mode)


def _random(rng: np.random.Generator, shape: tuple[int, ...], bits: int) -> TiledQuant:
    *lead, k, n = shape
    low = 0 if bits == 4 else -127
    values = rng.integers(low, 16 if bits == 4 else 128, shape).astype(np.int8)
    scale = rng.uniform(0.01, 0.02, (*lead, k // 32, n)).astype(np.float16).astype(np.float32)
    weight = GroupQuant(values, scale, -scale if bits == 4 else None)
    return jax.tree.map(jnp.asarray, tiled(weight, bits=bits))


def _layer_cases(rng: np.random.Generator, layers: int, all_rows: tuple[int, ...]) -> dict[str, tuple[Callable, float]]:
    """Name -> (one pass over all layers, its multiplications and additions, or bytes)."""
    cases: dict[str, tuple[Callable, float]] = {}
    for shape_name, (k, n) in SHAPES.items():
        weight = {bits: _random(rng, (layers, k, n), bits) for bits in (4, 8)}
        floats = [jnp.asarray(rng.standard_normal((k, n), np.float32)) for _ in range(layers)]
        for rows in all_rows:
            x = jnp.asarray(rng.standard_normal((rows, k), np.float32))
            work = 2.0 * rows * k * n * layers
            for bits in (4, 8) if shape_name == "gate and up" else (4,):
                for mode in Activations:
                    run = functools.partial(_passes, layers, _kernels(mode))
                    cases[f"{shape_name}, int{bits}, {mode}, {rows} rows"] = (_bound(run, x, weight[bits]), work)
            cases[f"{shape_name}, XLA float32, {rows} rows"] = (
                _bound(_dots, x, floats),
                work,
            )
        blocks = weight[4].blocks_NGU
        cases[f"read of {shape_name}, int4"] = (functools.partial(jax.jit(stream), blocks), float(blocks.nbytes))
    return cases


def _head_cases(rng: np.random.Generator, all_rows: tuple[int, ...]) -> dict[str, tuple[Callable, float]]:
    cases: dict[str, tuple[Callable, float]] = {}
    weight = _random(rng, HEAD, 8)
    for rows in (rows for rows in all_rows if rows <= 128):
        x = jnp.asarray(rng.standard_normal((rows, HEAD[0]), np.float32))
        for mode in Activations:
            run = jax.jit(functools.partial(api.best_column, kernels=_kernels(mode)))
            cases[f"head, int8, {mode}, {rows} rows"] = (
                functools.partial(run, x, weight),
                2.0 * rows * HEAD[0] * HEAD[1],
            )
    cases["read of head, int8"] = (
        functools.partial(jax.jit(stream), weight.blocks_NGU), float(weight.blocks_NGU.nbytes)
    )  # fmt: skip
    return cases


def _bound(run: Callable, x: jax.Array, weight: object) -> Callable[[], jax.Array]:
    return functools.partial(jax.jit(run), x, weight)


def _passes(layers: int, kernels: Kernels, x: jax.Array, weight: TiledQuant) -> jax.Array:
    """Each layer's input depends on the result before, so that they run one after the other."""

    def one(layer: jax.Array, x: jax.Array) -> jax.Array:
        y = api.fused_matmul(x, (weight,), layer=layer, kernels=kernels)
        return x + 0 * y[:, :1]

    return jax.lax.fori_loop(0, layers, one, x)


def _dots(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
    """One array for each layer: to slice a stack would copy it."""
    for w in weights:
        x = x + 0 * jnp.dot(x, w, precision=jax.lax.Precision.HIGHEST)[:, :1]
    return x


def _check(rates: dict[str, float]) -> int:
    largest = max(int(name.split()[-2]) for name in rates if "XLA" in name)
    best = rates[f"gate and up, XLA float32, {largest} rows"]
    failed = 0
    for (mode, bits), floor in FLOOR.items():
        share = rates[f"gate and up, int{bits}, {mode}, {largest} rows"] / best
        failed += share < floor
        print(f"int{bits}, {mode}: {share:.2f} of XLA's float32 ({best:.0f} GFLOP/s), floor {floor}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
