"""Each kernel against its reference, both on the device: fresh random inputs, poison wherever nothing is stored."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import jax
import numpy as np

from headrace.pallas_kernels import api
from headrace.pallas_kernels.grouped_matmul.cases import GroupedCase
from headrace.pallas_kernels.grouped_matmul.cases import make_inputs as make_grouped
from headrace.pallas_kernels.paged_attention.cases import GEMMA_3_270M, LLAMA_8B, SMOLLM2, AttentionCase
from headrace.pallas_kernels.paged_attention.inputs import make_inputs, poisoned, row_of
from headrace.pallas_kernels.quant_matmul.cases import QuantCase
from headrace.pallas_kernels.quant_matmul.cases import make_inputs as make_quantized
from headrace.pallas_kernels.tolerances import relative_error, tolerance
from headrace.pallas_kernels.types import Kernels

REFERENCE = Kernels()
WIDE = LLAMA_8B | {"page_tokens": 64}
HEADS = {
    "D64 K3": SMOLLM2 | {"page_tokens": 32},
    "D128 K8": WIDE,
    "D256 K1": GEMMA_3_270M | {"page_tokens": 32},
}
BATCHES = {
    "decode": {"decode_lens": (1, 31, 32, 33, 0, 64, 65, 700)},
    "mixed": {"decode_lens": (40, 129, 0), "segments": ((0, 70), (64, 64), (128, 1)), "padding_blocks": 1},
}
WEIGHTS = ((8, None), (8, 32), (4, 32), (4, 128))
"""Bits and group; None is one scale per column."""
EXPERTS = {"num_experts": 16, "contraction": 2048, "columns": 768}
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
    contraction, columns = (256, 128) if is_tiny else (4096, 1024)
    for dtype in ("bfloat16", "float32"):
        for bits, group in WEIGHTS:
            for rows in (1, 16, 300):
                name = f"quant_matmul {dtype}, int{bits}, group {group or 'K'}, {rows} rows"
                case = QuantCase(
                    name=name,
                    rows=rows,
                    contraction=contraction,
                    columns=columns,
                    bits=bits,
                    group=group,
                    x_dtype=dtype,
                    scale_dtype=dtype,
                )
                yield Check(name=name, run=functools.partial(quantized, case, kernels, seed))
    experts = {"num_experts": 4, "contraction": 64, "columns": 64} if is_tiny else EXPERTS
    for bits in (None, 8):
        for tokens in (8, 300):
            name = f"grouped_matmul {'bfloat16' if bits is None else 'int8'}, {tokens} rows"
            case = GroupedCase(name=name, **experts, tokens=tokens, bits=bits)
            yield Check(name=name, run=functools.partial(grouped, case, kernels, seed))


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
        row, offset = row_of(case, inputs, sequence, position), position % case.page_tokens
        stored = [pool.pages_RKWC[row, :, offset].tobytes() for pool in pools]
        if stored[0] != stored[1]:
            return float("inf"), tolerance(case.q_dtype)
    return relative_error(*outs), tolerance(case.q_dtype)


def quantized(case: QuantCase, kernels: Kernels, seed: int) -> tuple[float, float]:
    inputs = make_quantized(case, seed)
    return _compared(api.quant_matmul, kernels, inputs.x_MK, inputs.weight), tolerance(case.x_dtype)


def grouped(case: GroupedCase, kernels: Kernels, seed: int) -> tuple[float, float]:
    inputs = make_grouped(case, seed)
    error = _compared(api.grouped_matmul, kernels, inputs.x_MK, inputs.weight, inputs.group_sizes_G)
    return error, tolerance(case.x_dtype)


def _compared(operation: Callable[..., jax.Array], kernels: Kernels, *arguments: object) -> float:
    outs = [np.asarray(jax.jit(functools.partial(operation, kernels=k))(*arguments)) for k in (kernels, REFERENCE)]
    return relative_error(*outs)
