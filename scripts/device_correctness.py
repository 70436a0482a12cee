"""Each kernel against its reference, both on the device: fresh random inputs, poison wherever nothing is stored."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from headrace.pallas_kernels import api
from headrace.pallas_kernels.paged_attention.cases import AttentionCase
from headrace.pallas_kernels.paged_attention.inputs import make_inputs, poisoned
from headrace.pallas_kernels.tolerances import relative_error, tolerance
from headrace.pallas_kernels.types import GroupQuant, Kernels

REFERENCE = Kernels()
WIDE = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_tokens": 64}
HEADS = {
    "D64 K3": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "page_tokens": 32},
    "D128 K8": WIDE,
    "D256 K1": {"num_heads": 4, "num_kv_heads": 1, "head_dim": 256, "page_tokens": 32},
}
BATCHES = {
    "decode": {"decode_lens": (1, 31, 32, 33, 0, 64, 65, 700)},
    "mixed": {"decode_lens": (40, 129, 0), "segments": ((0, 70), (64, 64), (128, 1)), "padding_blocks": 1},
}
FEATURES = {"plain": {}, "window, cap, sinks": {"window": 64, "soft_cap": 20.0, "has_sinks": True}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """run: () -> (relative error, bound)."""

    name: str
    run: Callable[[], tuple[float, float]]


def checks(kernels: Kernels, fp8: str | None, seed: int, *, is_tiny: bool) -> Iterator[Check]:
    """Everything that has a kernel, in order of weight: a time limit cuts the tail."""
    pools = [("bfloat16", "bfloat16"), ("bfloat16", "int8"), ("float32", "float32")]
    if fp8:
        pools.insert(2, ("bfloat16", fp8))
    for batch_name, batch in BATCHES.items():
        for feature_name, features in FEATURES.items():
            for q_dtype, kv_dtype in pools:
                for heads_name, heads in HEADS.items():
                    name = f"paged_attention {batch_name}, {heads_name}, {kv_dtype}, {feature_name}"
                    block = {"block_tokens": 64}
                    case = AttentionCase(
                        name=name, q_dtype=q_dtype, kv_dtype=kv_dtype, **heads, **batch, **features, **block
                    )
                    yield Check(name=name, run=functools.partial(attention, case, kernels, seed))
    shape = (256, 128) if is_tiny else (4096, 14_336)
    for dtype in (jnp.bfloat16, jnp.float32):
        for bits, group in ((8, 0), (8, 32), (4, 32), (4, 128)):
            for rows in (1, 16, 300):
                name = f"quant_matmul {jnp.dtype(dtype)}, int{bits}, group {group or 'K'}, {rows} rows"
                yield Check(name=name, run=functools.partial(quantized, rows, bits, group, dtype, kernels, seed, shape))
    for weight in ("bfloat16", "int8"):
        for rows in (8, 300):
            name = f"grouped_matmul {weight}, {rows} rows"
            yield Check(
                name=name,
                run=functools.partial(
                    grouped, rows, weight, kernels, seed, (4, 64, 64) if is_tiny else (16, 2048, 1024)
                ),
            )


def attention(case: AttentionCase, kernels: Kernels, seed: int) -> tuple[float, float]:
    inputs = make_inputs(case, seed)
    inputs = replace(inputs, pool=poisoned(case, inputs))
    outs, pools = [], []
    for choice in (kernels, REFERENCE):
        run = jax.jit(functools.partial(api.paged_attention, kernels=choice), static_argnames="spec")
        out, pool = run(*inputs.arguments(), sinks_N=inputs.sinks_N)
        outs.append(np.asarray(out, np.float32)[[token for token, _, _ in inputs.batch.rows]])
        pools.append(jax.tree.map(np.asarray, pool))
    for _, sequence, position in inputs.batch.rows:
        row = inputs.first_row + inputs.batch.meta.page_table_ZM[sequence, position // case.page_tokens]
        offset = position % case.page_tokens
        stored = [pool.pages_RKWC[row, :, offset].tobytes() for pool in pools]
        if stored[0] != stored[1]:
            return float("inf"), tolerance(case.q_dtype)
    return relative_error(*outs), tolerance(case.q_dtype)


def quantized(
    rows: int, bits: int, group: int, dtype: type, kernels: Kernels, seed: int, shape: tuple[int, int]
) -> tuple[float, float]:
    inputs, outputs = shape
    x, weight = random_quantized(rows, inputs, outputs, bits, group or inputs, dtype, seed)
    outs = [
        np.asarray(jax.jit(functools.partial(api.quant_matmul, kernels=k))(x, weight)) for k in (kernels, REFERENCE)
    ]
    return relative_error(*outs), tolerance(dtype)


def random_quantized(
    rows: int, inputs: int, outputs: int, bits: int, group: int, dtype: type, seed: int
) -> tuple[jax.Array, GroupQuant]:
    keys = jax.random.split(jax.random.key(seed), 3)
    top = 2 ** (bits - 1) - 1
    values = jax.random.randint(keys[0], (inputs, outputs), -top, top + 1, jnp.int8)
    scale = jax.random.uniform(keys[1], (inputs // group, outputs), jnp.float32, 0.5, 1.5) / top
    weight = GroupQuant(values.astype(jnp.int4 if bits == 4 else jnp.int8), scale, group=group)
    return jax.random.normal(keys[2], (rows, inputs), dtype), weight


def grouped(
    rows: int, weight_type: str, kernels: Kernels, seed: int, shape: tuple[int, int, int]
) -> tuple[float, float]:
    x, weight, sizes = random_grouped(rows, weight_type, seed, shape)
    outs = [
        np.asarray(jax.jit(functools.partial(api.grouped_matmul, kernels=k))(x, weight, sizes))
        for k in (kernels, REFERENCE)
    ]
    return relative_error(*outs), tolerance(jnp.bfloat16)


def random_grouped(
    rows: int, weight_type: str, seed: int, shape: tuple[int, int, int]
) -> tuple[jax.Array, jax.Array | GroupQuant, np.ndarray]:
    """Rows go to experts at random; some experts get none."""
    experts, inputs, outputs = shape
    keys = jax.random.split(jax.random.key(seed), 2)
    x = jax.random.normal(keys[0], (rows, inputs), jnp.bfloat16)
    sizes = np.bincount(np.random.default_rng(seed).integers(0, experts, rows), minlength=experts).astype(np.int32)
    if weight_type == "bfloat16":
        return x, jax.random.normal(keys[1], shape, jnp.bfloat16) * inputs**-0.5, sizes
    values = jax.random.randint(keys[1], shape, -127, 128, jnp.int8)
    scale = jnp.full((experts, 1, outputs), inputs**-0.5 / 64, jnp.float32)
    return x, GroupQuant(values, scale, group=inputs), sizes
