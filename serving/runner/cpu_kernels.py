"""Whether the CPU's own kernels can run here, and which operations of a step they do not have."""

import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from headrace.model.config import ModelConfig
from headrace.model.decoder import new_pool
from headrace.pallas_kernels import api
from headrace.pallas_kernels.native.build import BuildError
from headrace.pallas_kernels.native.library import load
from headrace.pallas_kernels.types import AttentionSpec, AttnMeta, Implementation, Kernels, UnsupportedCase

log = logging.getLogger(__name__)

BY_REFERENCE = ("grouped_matmul",)
"""Operations that plain XLA runs beside the CPU's kernels: products with experts."""
KV_DTYPES = ("float32", "bfloat16", "int8")
"""Types of pages that the kernels read and write."""
PAGE_TOKENS = 16
LoadKernels = Callable[[], str]
"""Compiles and loads the library once; gives the name of its instruction set. Raises: BuildError."""


def load_kernels() -> str:
    """``LoadKernels`` without a report of its progress."""
    return load().isa


def try_cpu_kernels(
    mesh: Mesh | None, dtype: np.dtype, kv_dtype: np.dtype, model: ModelConfig | None, load: LoadKernels
) -> tuple[str, str]:
    """(instruction set, "") where the kernels run, else ("", why they do not, with a remedy). The library is loaded
    last: what cannot run is not compiled.

    dtype: of weights and products. model: None = any.
    """
    if mesh is not None:
        return "", "they run on one device, and --mesh has several"
    if dtype != np.float32:
        return (
            "",
            f"they read float32 and --dtype is {dtype.name} (take --dtype float32; --weights bf16 halves weights)",
        )
    if kv_dtype.name not in KV_DTYPES:
        return "", f"they have no --kv-dtype {kv_dtype.name} (they have {', '.join(KV_DTYPES)})"
    try:
        isa = load()
        if model is not None:
            _check_attention(model, kv_dtype)
    except BuildError as error:
        log.warning("the CPU's kernels could not be built or loaded: %s", error)
        return "", f"they could not be built or loaded: {str(error).partition(' It said:')[0]}"
    except UnsupportedCase as error:
        return "", f"they cannot run this model: {error.why}"
    return isa, ""


def _check_attention(model: ModelConfig, kv_dtype: np.dtype) -> None:
    """Trace one row of attention. Raises: UnsupportedCase."""
    kernels = Kernels(implementation=Implementation.CPU)
    heads = model.num_heads + 2 * model.num_kv_heads
    none = jnp.zeros(0, jnp.int32)

    def attend(qkv_TX: jax.Array, turn_TH: jax.Array, sinks_N: jax.Array) -> jax.Array:
        one = jnp.ones(1, jnp.int32)
        meta = AttnMeta(one, one[:, None], one, none, none, none)
        pool = new_pool(model, 2, PAGE_TOKENS, kv_dtype)
        sinks = sinks_N if model.has_sinks else None
        for window in set(model.layer_windows):
            spec = AttentionSpec(scale=1.0, window=window)
            out_TX, _ = api.rotary_attention(
                qkv_TX, turn_TH, turn_TH, pool, 0, meta, spec, sinks_N=sinks, kernels=kernels
            )
        return out_TX

    shapes = ((1, heads * model.head_dim), (1, model.head_dim // 2), (model.num_heads,))
    jax.eval_shape(attend, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
