"""Seconds of kernels, of what they are set against, and of two-layer steps; the chip's own limits come first."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from headrace.model.decoder import StepInputs
from headrace.model.weights import Weights
from headrace.pallas_kernels import api
from headrace.pallas_kernels.batch_case import BatchCase
from headrace.pallas_kernels.grouped_matmul.cases import GroupedCase
from headrace.pallas_kernels.grouped_matmul.cases import make_inputs as make_grouped
from headrace.pallas_kernels.grouped_matmul.cost import cost as grouped_cost
from headrace.pallas_kernels.paged_attention.cases import AttentionCase
from headrace.pallas_kernels.paged_attention.cost import cost as attention_cost
from headrace.pallas_kernels.paged_attention.inputs import AttentionInputs, make_inputs
from headrace.pallas_kernels.quant_matmul.cases import QuantCase
from headrace.pallas_kernels.quant_matmul.cases import make_inputs as make_quantized
from headrace.pallas_kernels.quant_matmul.cost import cost as quantized_cost
from headrace.pallas_kernels.roofline import Cost
from headrace.pallas_kernels.types import AttnMeta, Implementation, Kernels, KVPool, TokenKV
from scripts import device_baselines as baselines
from scripts import device_correctness as correctness
from scripts import device_steps as steps
from scripts.device_timing import copy_bytes_per_s, matmul_per_s, seconds_per_call

Array = jax.Array

MATMUL_ROWS = (1, 16, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    copy_bytes_per_s: float
    matmul_per_s: float

    def seconds(self, cost: Cost) -> float:
        """What a call takes at least."""
        return max(cost.bytes / self.copy_bytes_per_s, cost.flops / self.matmul_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large the workloads are: full on an accelerator, tiny where the script itself is tried."""

    copy_bytes: int
    matmul_size: int
    decode_rows: int
    mean_tokens: int
    prefill_tokens: int
    quant_shape: tuple[int, int]
    experts: dict[str, int]
    grouped_rows: tuple[int, ...]


FULL = Scale(
    copy_bytes=1 << 30,
    matmul_size=8192,
    decode_rows=64,
    mean_tokens=1024,
    prefill_tokens=2048,
    quant_shape=(4096, 14_336),
    experts={"num_experts": 32, "contraction": 2048, "columns": 768},
    grouped_rows=(64, 2048),
)
TINY = Scale(
    copy_bytes=1 << 20,
    matmul_size=64,
    decode_rows=3,
    mean_tokens=40,
    prefill_tokens=64,
    quant_shape=(256, 128),
    experts={"num_experts": 4, "contraction": 64, "columns": 64},
    grouped_rows=(8, 64),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """run: () -> seconds per call. cost: what the call must move and do at least."""

    name: str
    run: Callable[[], float]
    cost: Cost


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
        needed = {"cost": attention_cost(case)}
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
        # The kernels read the keys once for each query block; whole, they are read once.
        needed = {"cost": attention_cost(replace(case, block_tokens=tokens))}
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
    contraction, columns = scale.quant_shape
    shape = {"contraction": contraction, "columns": columns}
    name = f"matmul {{rows}} x {contraction} x {columns}"
    wide = jnp.ones((contraction, columns), jnp.bfloat16)
    for rows in MATMUL_ROWS:
        need = Cost(bytes=wide.nbytes, flops=2 * rows * wide.size)
        x = jax.random.normal(jax.random.key(seed), (rows, contraction), jnp.bfloat16)
        yield Timing(name=f"{name.format(rows=rows)}: bfloat16, XLA", run=_product(x, wide, _dot), cost=need)
    for bits, group in correctness.WEIGHTS:
        case = QuantCase(name=name, rows=1, **shape, bits=bits, group=group)
        weight = jax.tree.map(jnp.asarray, make_quantized(case, seed).weight)
        for rows in MATMUL_ROWS:
            x = jax.random.normal(jax.random.key(seed), (rows, contraction), jnp.bfloat16)
            run = _product(x, weight, functools.partial(api.quant_matmul, kernels=kernels))
            label = f"{name.format(rows=rows)}: int{bits}, group {group or 'K'}"
            yield Timing(name=label, run=run, cost=quantized_cost(replace(case, rows=rows)))
    for tokens in scale.grouped_rows:
        for bits in (None, 8):
            case = GroupedCase(name="grouped", **scale.experts, tokens=tokens, bits=bits)
            inputs = make_grouped(case, seed)
            operands = jax.tree.map(jnp.asarray, (inputs.weight, inputs.group_sizes_G))
            active = int((inputs.group_sizes_G > 0).sum())
            yield Timing(
                name=f"grouped {tokens} rows, {active} of {case.num_experts} experts of {case.contraction} x "
                f"{case.columns}, {'bfloat16' if bits is None else 'int8'}",
                run=_product(jnp.asarray(inputs.x_MK), operands, functools.partial(_grouped, kernels)),
                cost=grouped_cost(case, inputs.group_sizes_G),
            )


def _dot(x: Array, w: Array) -> Array:
    return jnp.dot(x, w, preferred_element_type=jnp.float32)


def _grouped(kernels: Kernels, x: Array, constants: tuple[Array, Array]) -> Array:
    return api.grouped_matmul(x, *constants, kernels=kernels)


def _product(x: Array, constants: object, product: Callable[[Array, object], Array]) -> Callable[[], float]:
    """The largest result goes back into x, so that every repetition has to run whole: of one element of a product, XLA
    would compute no more than that."""

    def step(x: Array, constants: object) -> Array:
        return x + (product(x, constants).max() * 1e-30).astype(x.dtype)

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
            need = Cost(bytes=weight_bytes, flops=case.num_tokens * weight_bytes)  # 2 operations on 2 bytes
            run = functools.partial(_step_seconds, step, kernels, seed)
            yield step, Timing(name=f"2 layers, {name}, {kv_dtype}", run=run, cost=need)


def _step_seconds(step: steps.Step, kernels: Kernels, seed: int) -> float:
    function = step.function(kernels)

    def run(carry: tuple[Array, KVPool], constants: tuple[Weights[Array], StepInputs]) -> tuple[Array, KVPool]:
        (token_T, pool), (weights, inputs) = carry, constants
        out, pool = function(weights, inputs.replace(token_T=token_T), pool)
        return out.argmax(axis=-1).astype(jnp.int32), pool

    return seconds_per_call(run, (jnp.array(step.inputs.token_T), step.pool(seed)), (step.weights, step.inputs))
