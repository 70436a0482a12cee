"""Seconds of kernels, of what they are set against, and of two-layer steps; the chip's own limits come first."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from headrace.model.decoder import StepInputs
from headrace.model.weights import Weights
from headrace.pallas_kernels import api
from headrace.pallas_kernels.batch_case import BatchCase
from headrace.pallas_kernels.paged_attention.cases import AttentionCase
from headrace.pallas_kernels.paged_attention.inputs import AttentionInputs, make_inputs
from headrace.pallas_kernels.types import AttnMeta, Implementation, Kernels, KVPool, TokenKV
from scripts import device_baselines as baselines
from scripts import device_correctness as correctness
from scripts import device_steps as steps
from scripts.device_timing import copy_bytes_per_s, matmul_per_s, seconds_per_call

Array = jax.Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    copy_bytes_per_s: float
    matmul_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large the workloads are: full on an accelerator, tiny where the script itself is tried."""

    copy_bytes: int
    matmul_size: int
    decode_rows: int
    mean_tokens: int
    prefill_tokens: int
    quant_shape: tuple[int, int]
    grouped_shape: tuple[int, int, int]


FULL = Scale(
    copy_bytes=1 << 30,
    matmul_size=8192,
    decode_rows=64,
    mean_tokens=1024,
    prefill_tokens=2048,
    quant_shape=(4096, 14_336),
    grouped_shape=(64, 2048, 1536),
)
TINY = Scale(
    copy_bytes=1 << 20,
    matmul_size=64,
    decode_rows=3,
    mean_tokens=40,
    prefill_tokens=64,
    quant_shape=(256, 128),
    grouped_shape=(4, 64, 64),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """run: () -> seconds per call. bytes, operations: what the call must move and do at least."""

    name: str
    run: Callable[[], float]
    bytes: int
    operations: int


def measure_limits(scale: Scale) -> Limits:
    return Limits(copy_bytes_per_s=copy_bytes_per_s(scale.copy_bytes), matmul_per_s=matmul_per_s(scale.matmul_size))


def timings(kernels: Kernels, fp8: str | None, scale: Scale, seed: int) -> Iterator[Timing]:
    yield from decode_timings(kernels, fp8, scale, seed)
    yield from prefill_timings(kernels, scale, seed)
    yield from matmul_timings(kernels, scale, seed)


def decode_timings(kernels: Kernels, fp8: str | None, scale: Scale, seed: int) -> Iterator[Timing]:
    lengths = np.random.default_rng(seed).integers(
        scale.mean_tokens // 2, scale.mean_tokens * 3 // 2, scale.decode_rows
    )
    lengths = tuple(sorted((int(x) for x in lengths), reverse=True))
    for kv_dtype in ("bfloat16", "int8", *([fp8] if fp8 else [])):
        case = AttentionCase(
            name="decode", **correctness.WIDE, decode_lens=lengths, q_dtype="bfloat16", kv_dtype=kv_dtype
        )
        made = make_inputs(case, seed)
        inputs = jax.tree.map(jnp.asarray, made.arguments()[:3])
        item = np.dtype(jnp.dtype(kv_dtype)).itemsize
        per_token = 2 * case.num_kv_heads * (case.head_dim * item + (4 if item == 1 else 0))
        needed = {"bytes": sum(lengths) * per_token, "operations": 4 * sum(lengths) * case.num_heads * case.head_dim}
        name = f"decode {scale.decode_rows} x ~{scale.mean_tokens}, 32/8 heads of 128, {kv_dtype}"
        choices = {str(kernels.implementation): kernels, "reference": Kernels()}
        for label, choice in choices.items():
            run = functools.partial(attention_seconds, inputs, made, choice)
            yield Timing(name=f"{name}: {label}", run=run, **needed)
        run = functools.partial(gather_seconds, inputs, made)
        yield Timing(name=f"{name}: XLA gather and dot", run=run, **needed)
        if kernels.implementation is Implementation.GPU and kv_dtype == "bfloat16":
            yield Timing(name=f"{name}: JAX paged_attention", run=functools.partial(jax_paged_seconds, made), **needed)
            run = functools.partial(cudnn_decode_seconds, made, max(lengths))
            yield Timing(name=f"{name}: cuDNN, contiguous", run=run, **needed)


def attention_seconds(inputs: tuple[Array, TokenKV, KVPool], made: AttentionInputs, kernels: Kernels) -> float:
    spec, first_row = made.spec, made.first_row

    def step(carry: tuple[Array, KVPool], constants: tuple[TokenKV, AttnMeta]) -> tuple[Array, KVPool]:
        (q, pool), (new, meta) = carry, constants
        return api.paged_attention(q, new, pool, first_row, meta, spec, kernels=kernels)

    constants = (inputs[1], jax.tree.map(jnp.asarray, made.batch.meta))
    return seconds_per_call(step, jax.tree.map(jnp.array, (inputs[0], inputs[2])), constants)


def gather_seconds(inputs: tuple[Array, TokenKV, KVPool], made: AttentionInputs) -> float:
    def step(q: Array, constants: tuple[KVPool, AttnMeta]) -> Array:
        return baselines.gather_and_dot(q, constants[0], made.first_row, constants[1], made.spec.scale)

    return seconds_per_call(step, jnp.array(inputs[0]), (inputs[2], jax.tree.map(jnp.asarray, made.batch.meta)))


def jax_paged_seconds(made: AttentionInputs) -> float:
    width = made.q_TNH.shape[-1]
    kv_KRWC = jnp.asarray(made.pool.pages_RKWC.swapaxes(0, 1))
    table = made.first_row + jnp.asarray(made.batch.meta.page_table_ZM)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % 16)))
    pages, lengths = (kv_KRWC[..., :width], kv_KRWC[..., width:]), jnp.asarray(made.batch.meta.kv_len_Z)
    return seconds_per_call(
        lambda q, rest: baselines.jax_paged_attention(q, *rest).astype(q.dtype),
        jnp.asarray(made.q_TNH),
        (pages, lengths, table),
    )


def cudnn_decode_seconds(made: AttentionInputs, longest: int) -> float:
    rows, _, width = made.q_TNH.shape
    kv = jnp.zeros((rows, longest, made.pool.num_kv_heads, 2 * width), jnp.bfloat16)
    lengths = jnp.asarray(made.batch.meta.kv_len_Z)
    return seconds_per_call(lambda q, rest: baselines.cudnn_decode(q, *rest), jnp.asarray(made.q_TNH), (kv, lengths))


def prefill_timings(kernels: Kernels, scale: Scale, seed: int) -> Iterator[Timing]:
    tokens = scale.prefill_tokens
    for kv_dtype in ("bfloat16", "int8"):
        case = AttentionCase(
            name="prefill",
            **correctness.WIDE,
            segments=((0, tokens),),
            block_tokens=64,
            q_dtype="bfloat16",
            kv_dtype=kv_dtype,
        )
        made = make_inputs(case, seed)
        inputs = jax.tree.map(jnp.asarray, made.arguments()[:3])
        needed = {"bytes": 0, "operations": 2 * tokens * tokens * case.num_heads * case.head_dim}
        name = f"prefill {tokens} tokens, 32/8 heads of 128, {kv_dtype}"
        for label, choice in {str(kernels.implementation): kernels, "reference": Kernels()}.items():
            run = functools.partial(attention_seconds, inputs, made, choice)
            yield Timing(name=f"{name}: {label}", run=run, **needed)
        if kernels.implementation is Implementation.GPU and kv_dtype == "bfloat16":
            yield Timing(
                name=f"{name}: cuDNN, contiguous", run=functools.partial(cudnn_prefill_seconds, made), **needed
            )


def cudnn_prefill_seconds(made: AttentionInputs) -> float:
    q = jnp.asarray(made.q_TNH)[None]
    k = jnp.ones((1, q.shape[1], made.pool.num_kv_heads, q.shape[3]), q.dtype)
    return seconds_per_call(lambda q, k: baselines.cudnn_prefill(q, k, k), q, k)


def matmul_timings(kernels: Kernels, scale: Scale, seed: int) -> Iterator[Timing]:
    inputs, outputs = scale.quant_shape
    for rows in (1, 16, 128):
        x = jax.random.normal(jax.random.key(seed), (rows, inputs), jnp.bfloat16)
        wide = jnp.ones((inputs, outputs), jnp.bfloat16)
        need = functools.partial(dict, operations=2 * rows * inputs * outputs)
        name = f"matmul {rows} x {inputs} x {outputs}"
        yield Timing(name=f"{name}: bfloat16, XLA", run=_product(x, wide, _dot), **need(bytes=2 * wide.size))
        for bits, group in ((8, inputs), (8, 32), (4, 32), (4, 128)):
            _, weight = correctness.random_quantized(rows, inputs, outputs, bits, group, jnp.bfloat16, seed)
            run = _product(x, weight, functools.partial(api.quant_matmul, kernels=kernels))
            size = wide.size * bits // 8 + weight.scale_GN.size * 4
            yield Timing(name=f"{name}: int{bits}, group {group}", run=run, **need(bytes=size))
    experts, inputs, outputs = scale.grouped_shape
    for rows in (64, 2048):
        for kind in ("bfloat16", "int8"):
            x, weight, sizes = correctness.random_grouped(rows, kind, seed, scale.grouped_shape)
            active = int((sizes > 0).sum())
            run = _product(x, (weight, jnp.asarray(sizes)), functools.partial(_grouped, kernels))
            yield Timing(
                name=f"grouped {rows} rows, {active} of {experts} experts of {inputs} x {outputs}, {kind}",
                run=run,
                bytes=active * inputs * outputs * (2 if kind == "bfloat16" else 1),
                operations=2 * rows * inputs * outputs,
            )


def _dot(x: Array, w: Array) -> Array:
    return jnp.dot(x, w, preferred_element_type=jnp.float32)


def _grouped(kernels: Kernels, x: Array, constants: tuple[Array, Array]) -> Array:
    return api.grouped_matmul(x, *constants, kernels=kernels)


def _product(x: Array, constants: object, product: Callable[[Array, object], Array]) -> Callable[[], float]:
    """One element of the result goes back into x, so that every repetition has to run."""

    def step(x: Array, constants: object) -> Array:
        return x + (product(x, constants)[:1, :1] * 1e-30).astype(x.dtype)

    return lambda: seconds_per_call(step, jnp.array(x), constants)


def step_timings(kernels: Kernels, is_tiny: bool, seed: int) -> Iterator[tuple[steps.Step, Timing]]:
    """Two-layer steps: 64 decode rows, and 16 rows beside a prefill of 512."""
    cfg = steps.TINY if is_tiny else steps.LLAMA_8B_2_LAYERS
    heads = {"num_heads": cfg.num_heads, "num_kv_heads": cfg.num_kv_heads, "head_dim": cfg.head_dim}
    batches = {
        "decode 64 rows": {"decode_lens": (500,) * 64},
        "mixed 16 rows + 512": {"decode_lens": (500,) * 16, "segments": ((0, 512),), "block_tokens": 64},
    }
    if is_tiny:
        batches = {"decode 2 rows": {"decode_lens": (20, 3)}, "mixed": {"decode_lens": (20,), "segments": ((0, 40),)}}
    weights = steps.random_weights(cfg, seed)
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights)) - weights.embed_VD.nbytes
    for kv_dtype in ("bfloat16", "int8"):
        for name, batch in batches.items():
            case = BatchCase(name=name, **heads, page_tokens=64, **({"block_tokens": 64} | batch))
            step = steps.make_step(cfg, case, weights, kv_dtype, seed)
            operations = 2 * case.num_tokens * weight_bytes // 2
            run = functools.partial(_step_seconds, step, kernels, seed)
            yield step, Timing(name=f"2 layers, {name}, {kv_dtype}", run=run, bytes=weight_bytes, operations=operations)


def _step_seconds(step: steps.Step, kernels: Kernels, seed: int) -> float:
    function = step.function(kernels)

    def run(carry: tuple[Array, KVPool], constants: tuple[Weights[Array], StepInputs]) -> tuple[Array, KVPool]:
        (token_T, pool), (weights, inputs) = carry, constants
        out, pool = function(weights, inputs.replace(token_T=token_T), pool)
        return out.argmax(axis=-1).astype(jnp.int32), pool

    return seconds_per_call(run, (jnp.array(step.inputs.token_T), step.pool(seed)), (step.weights, step.inputs))
