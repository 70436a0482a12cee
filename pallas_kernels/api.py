"""One public function per operation. The implementation is an explicit choice; none falls back to another.

Each operation is a folder whose ``reference.py``, ``tpu.py`` and ``gpu.py`` hold one function of the operation's
name and signature. They are imported when first asked for: a deleted ``gpu.py`` costs the GPU kernel and nothing else.
"""

import importlib
from collections.abc import Callable
from typing import Any

import jax

from headrace.pallas_kernels.kv_quantization import is_quantized
from headrace.pallas_kernels.types import (
    ALONE,
    Across,
    AttentionSpec,
    AttnMeta,
    GroupQuant,
    Implementation,
    Kernels,
    KVPool,
    Rms,
    TiledQuant,
    TokenKV,
    UnsupportedCase,
)


def paged_attention(
    q_TNH: jax.Array,
    new: TokenKV,
    pool: KVPool,
    first_row: jax.Array | int,
    meta: AttnMeta,
    spec: AttentionSpec,
    *,
    sinks_N: jax.Array | None = None,
    kernels: Kernels,
) -> tuple[jax.Array, KVPool]:
    """Store this step's keys and values, and attend from this step's queries to all that is stored up to them.

    With a donated pool the write happens in place.

    Args:
      q_TNH: queries, rotated. N is a multiple of K; query head n reads key head n // (N / K).
      new: this step's keys and values, as the pool stores them.
      pool: pages of all layers of one kind.
      first_row: row of page 0 of this layer (layer index times pages per layer).
      meta: see AttnMeta. Every index must be in range: the host validates plans, nothing is checked here.
      spec: scale, window, soft cap.
      sinks_N: float32, a logit per query head that joins the softmax and carries no value.
      kernels: which kernel runs.

    Returns:
      (output [T, N, H] in the type of q, pool). Rows of padding are finite where the pages of the sequence are; a
      decode row with kv_len 0 gives 0. What a row gives does not depend on the other rows, bit for bit, nor do
      unwritten or stale parts of pages change it, NaN included; blocks of pages behind the window are not read.

    Raises:
      UnsupportedCase: the implementation cannot run these shapes.
    """
    if q_TNH.shape[1] % pool.num_kv_heads:
        raise UnsupportedCase(f"{q_TNH.shape[1]} query heads are not a multiple of {pool.num_kv_heads} key heads")
    if pool.head_dim != q_TNH.shape[2]:
        raise UnsupportedCase(f"pool rows of {2 * pool.head_dim} values do not hold two heads of {q_TNH.shape[2]}")
    _check_types(new, pool, kernels)
    return _kernel("paged_attention", kernels)(q_TNH, new, pool, first_row, meta, spec, sinks_N, kernels)


def write_pages(new: TokenKV, pool: KVPool, first_row: jax.Array | int, meta: AttnMeta, *, kernels: Kernels) -> KVPool:
    """Store keys and values of a mixed batch; with a donated pool this happens in place.

    A decode row writes one token. A query block writes whole pages, also behind its last real token (the tail of a
    page is overwritten later, and is masked until then); pages without a real token go to the null page, as do padding
    rows.

    Args and errors: as paged_attention.
    """
    _check_types(new, pool, kernels)
    return _kernel("write_pages", kernels)(new, pool, first_row, meta, kernels)


def rotary_attention(
    qkv_TX: jax.Array,
    cos_TH: jax.Array,
    sin_TH: jax.Array,
    pool: KVPool,
    first_row: jax.Array | int,
    meta: AttnMeta,
    spec: AttentionSpec,
    *,
    sinks_N: jax.Array | None = None,
    kernels: Kernels,
) -> tuple[jax.Array, KVPool]:
    """As paged_attention, from the projections on: queries and keys are turned by their positions, keys and values are
    stored, and queries attend, in one pass over the step. CPU only.

    Args:
      qkv_TX: float32 [T, (N + 2K) * H]: queries, keys and values of each token side by side, not rotated.
      cos_TH, sin_TH: float32 [T, H/2]; value i turns with value i + H/2.
      others: as paged_attention.
    Returns: (float32 [T, N * H], pool).
    Raises: UnsupportedCase: any other implementation, or shapes that it cannot run.
    """
    return _kernel("paged_attention", kernels, "rotary_attention")(
        qkv_TX, cos_TH, sin_TH, pool, first_row, meta, spec, sinks_N, kernels
    )


def fused_matmul(
    x_MK: jax.Array,
    weights: tuple[TiledQuant, ...],
    *,
    norm: Rms | None = None,
    is_gated: bool = False,
    residual_MN: jax.Array | None = None,
    layer: jax.Array | int | None = None,
    real_M: jax.Array | None = None,
    kernels: Kernels,
) -> jax.Array:
    """What lies between two attentions, in few passes: one input times weights side by side. CPU only.

    Args:
      x_MK: float32 [M, K]; where is_gated, [M, 2K]: a gate and a value side by side, the input silu(gate) * value.
      weights: [K, N] each, of any forms; their results come side by side in this order.
      norm: of the input, before the product; not together with is_gated.
      residual_MN: added to the result.
      layer: weights and norm are stacked over layers ([L, ...]), and this is the one that is meant.
      real_M: integers, 0 marks a row of padding, which costs nothing and gives 0 whatever is in it; None = no padding.
    Returns: float32 [M, sum of N]. What a row gives does not depend on M or on the other rows, bit for bit.
    Raises: UnsupportedCase: any other implementation, or shapes that it cannot run.
    """
    return _kernel("quant_matmul", kernels, "fused_matmul")(
        x_MK, weights, norm, is_gated, residual_MN, layer, kernels, real_M
    )


def best_column(
    x_MK: jax.Array,
    weight: TiledQuant,
    *,
    norm: Rms | None = None,
    real_M: jax.Array | None = None,
    kernels: Kernels,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The largest value of each row of fused_matmul(x, (weight,), norm=norm), and where it is; the product itself is
    never in memory. CPU only.

    Returns: (i32 [M] lowest column with the largest value, any one in range where there is NaN; float32 [M] its value;
      bool [M] whether all values are finite); (0, 0, True) of padding, see fused_matmul.
    """
    return _kernel("quant_matmul", kernels, "best_column")(x_MK, weight, norm, kernels, real_M)


def columns(weight: TiledQuant, index_T: jax.Array, *, kernels: Kernels) -> jax.Array:
    """float32 [T, K]: some columns of a weight, dequantized; a tied head's are the embedding. CPU only.

    index_T: i32, in range: the program fails where one is not.
    """
    return _kernel("quant_matmul", kernels, "columns")(weight, index_T, kernels)


def quant_matmul(x_MK: jax.Array, weight: GroupQuant | TiledQuant, *, kernels: Kernels) -> jax.Array:
    """x @ (scale * values + offset), accumulated in float32, without a dequantized weight in memory.

    Args:
      x_MK: float32 or bfloat16. weight: [K, N]; TiledQuant on CPU, and there only.
    Returns: float32 [M, N].
    Raises: UnsupportedCase: shapes that do not agree, or that the implementation cannot run.
    """
    _check_weight(x_MK, weight, 2, kernels)
    return _kernel("quant_matmul", kernels)(x_MK, weight, kernels)


def grouped_matmul(
    x_MK: jax.Array,
    weight: jax.Array | GroupQuant,
    group_sizes_G: jax.Array,
    *,
    group_offset: jax.Array | int = 0,
    layer: jax.Array | int | None = None,
    kernels: Kernels,
) -> jax.Array:
    """Each row times the weight of its expert; rows are sorted by expert.

    Args:
      x_MK: float32 or bfloat16, rows of expert 0 first.
      weight: [E, K, N], or GroupQuant of such values; experts group_offset .. group_offset + E of all G.
      group_sizes_G: i32, rows of every expert of the model, in order; their sum is at most M.
      group_offset: first expert of this shard.
      layer: the weight is [L, E, K, N], and this is the layer whose experts are meant. They are read where they are: to
        slice a layer out for a kernel copies all of its experts.
    Returns: float32 [M, N]; zeros in rows of experts elsewhere, and behind the last group.
    Raises: UnsupportedCase: shapes that do not agree, or that the implementation cannot run.
    """
    _check_weight(x_MK, weight, 3 if layer is None else 4, kernels)
    return _kernel("grouped_matmul", kernels)(x_MK, weight, group_sizes_G, group_offset, kernels, layer)


def top_cut(
    z_RV: jax.Array,
    weight_RV: jax.Array,
    top_k_R: jax.Array,
    top_p_R: jax.Array,
    *,
    across: Across = ALONE,
    kernels: Kernels,
) -> jax.Array:
    """The value at or above which candidates are kept when sampling; no vocabulary is sorted.

    XLA's own code runs on every chip; there is no kernel (decision 30), and ``draw`` takes its place on CPU. On v6e a
    pass over 64 rows of 128,256 ids takes 20 us at full bandwidth (40 us for the mass above a cut). A cut among the
    best 4,096 candidates needs two of them; one that lies deeper at most 64, which is 1.9 ms beside the 9.8 ms that a
    step of Llama-3.1-8B reads weights.

    Args:
      z_RV: float32, a logit relative to its row's best over the temperature: the best is 0, all others are below.
      weight_RV: exp(z_RV). top_k_R: i32, 0 keeps all. top_p_R: float32 share of what top_k left, 1 keeps all.
      across: devices that hold the other candidates of the same rows.
    Returns: float32 [R]; -inf in rows with top_k 0 and top_p 1. What a row gives does not depend on the others.
    Raises: UnsupportedCase: any implementation but the reference.
    """
    return _kernel("sample", kernels, "top_cut")(z_RV, weight_RV, top_k_R, top_p_R, across, kernels)


def draw(
    logits_RV: jax.Array,
    real_R: jax.Array,
    temperature_R: jax.Array,
    top_k_R: jax.Array,
    top_p_R: jax.Array,
    min_p_R: jax.Array,
    uniform_R: jax.Array,
    *,
    kernels: Kernels,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One id of each row by policy ``headrace-sampling/1`` (model/sampling.py), from temperature on. CPU only.

    Args:
      logits_RV: float32, masked and with penalties; -inf forbids an id.
      real_R: 0 marks a row that nobody reads: it costs nothing and gives (0, True, True).
      temperature_R: float32; rows of 0 give their best id, ties by lower id, and read nothing of what follows.
      top_k_R: i32, 0 keeps all. top_p_R, min_p_R: float32; 1 and 0 keep all.
      uniform_R: float32 in [0, 1), where the cumulative distribution is inverted.
    Returns: (i32 [R] id, in range also in broken rows; bool [R] all logits of the row are finite; bool [R] one at
      least is above -inf). What a row gives does not depend on the others, bit for bit.
    Raises: UnsupportedCase: any other implementation, or shapes that it cannot run.
    """
    return _kernel("sample", kernels, "draw")(
        logits_RV, real_R, temperature_R, top_k_R, top_p_R, min_p_R, uniform_R, kernels
    )


def _kernel(operation: str, kernels: Kernels, function: str | None = None) -> Callable[..., Any]:
    implementation = Implementation.REFERENCE if operation in kernels.by_reference else kernels.implementation
    module = f"headrace.pallas_kernels.{operation}.{implementation}"
    name = function or operation
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise UnsupportedCase(f"{operation} has no {implementation} implementation") from error
    if found is None:
        raise UnsupportedCase(f"{operation} has no {implementation} implementation of {name}")
    kernel: Callable[..., Any] = found
    return kernel


def _check_types(new: TokenKV, pool: KVPool, kernels: Kernels) -> None:
    dtype = pool.dtype
    if pool.bits_of is not None and kernels.implementation is not Implementation.REFERENCE:
        raise UnsupportedCase(f"a pool that holds {dtype} as integers; that is for the reference")
    if new.kv_TKC.dtype != dtype:
        raise UnsupportedCase(f"tokens of {new.kv_TKC.dtype} do not go into a pool of {dtype}")
    for name, scale in (("a pool", pool.scale_RK2W), ("tokens", new.scale_TK2)):
        if is_quantized(dtype) != (scale is not None):
            raise UnsupportedCase(f"{name} of {dtype} {'without scales' if scale is None else 'with scales'}")


def _check_weight(x_MK: jax.Array, weight: jax.Array | GroupQuant | TiledQuant, rank: int, kernels: Kernels) -> None:
    if isinstance(weight, TiledQuant) and kernels.implementation is not Implementation.CPU:
        raise UnsupportedCase(f"tiles are for CPU kernels; {kernels.implementation} reads a GroupQuant")
    values = weight.values_KN if isinstance(weight, GroupQuant) else weight
    if len(values.shape) != rank or values.shape[-2] != x_MK.shape[1]:
        raise UnsupportedCase(f"a weight of shape {values.shape} does not fit inputs of shape {x_MK.shape}")
    if isinstance(weight, GroupQuant):
        shape, scales = values.shape, weight.scale_GN.shape
        if scales != (*shape[:-2], scales[-2], shape[-1]) or not scales[-2] or shape[-2] % scales[-2]:
            raise UnsupportedCase(f"scales of shape {scales} do not fit values of shape {shape}")
