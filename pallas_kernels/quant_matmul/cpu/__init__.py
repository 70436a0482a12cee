"""Products with tiled weights on CPU: XLA's custom calls into the native library."""

import jax
import jax.numpy as jnp
import numpy as np

from headrace.pallas_kernels.native import library
from headrace.pallas_kernels.types import Activations, Kernels, Rms, TiledQuant, UnsupportedCase

MAX_WEIGHTS = 8
"""Side by side in one call."""
_MODES = {Activations.EXACT: 0, Activations.INT16: 1, Activations.INT8: 2}


def quant_matmul(x_MK: jax.Array, weight: TiledQuant, kernels: Kernels) -> jax.Array:
    """See ``headrace.pallas_kernels.api.quant_matmul``."""
    if not isinstance(weight, TiledQuant):
        raise UnsupportedCase("on CPU a quantized weight is in tiles (quant_matmul.cpu.tiles.tiled)")
    return fused_matmul(x_MK.astype(jnp.float32), (weight,), None, False, None, None, kernels)


def fused_matmul(
    x_MK: jax.Array,
    weights: tuple[TiledQuant, ...],
    norm: Rms | None,
    is_gated: bool,
    residual_MN: jax.Array | None,
    layer: jax.Array | int | None,
    kernels: Kernels,
    real_M: jax.Array | None = None,
) -> jax.Array:
    """See ``headrace.pallas_kernels.api.fused_matmul``."""
    if not 1 <= len(weights) <= MAX_WEIGHTS:
        raise UnsupportedCase(f"{len(weights)} weights side by side; 1 to {MAX_WEIGHTS}")
    if is_gated and norm is not None:
        raise UnsupportedCase("a norm of a gated input; it is one or the other")
    for weight in weights:
        _check(x_MK, weight, is_gated, lead=0 if layer is None else 1)
        _check_norm(norm, weight, lead=0 if layer is None else 1)
    shape = (x_MK.shape[0], sum(weight.num_columns for weight in weights))
    if residual_MN is not None and (residual_MN.shape != shape or residual_MN.dtype != jnp.float32):
        raise UnsupportedCase(f"a residual of {residual_MN.dtype} {residual_MN.shape} for a result of float32 {shape}")
    none = jnp.zeros((0,), jnp.float32)
    library.load()
    call = jax.ffi.ffi_call("HeadraceFusedMatmul", jax.ShapeDtypeStruct(shape, jnp.float32))
    return call(
        x_MK,
        none if norm is None else norm.scale_D,
        none if residual_MN is None else residual_MN,
        _marks(x_MK, real_M),
        jnp.asarray(0 if layer is None else layer, jnp.int32),
        *(weight.blocks_NGU for weight in weights),
        forms=np.concatenate([_form(weight) for weight in weights]),
        is_stacked=layer is not None,
        is_gated=is_gated,
        eps=np.float32(0 if norm is None else norm.eps),
        mode=np.int64(_MODES[kernels.activations]),
    )


def best_column(
    x_MK: jax.Array, weight: TiledQuant, norm: Rms | None, kernels: Kernels, real_M: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See ``headrace.pallas_kernels.api.best_column``."""
    _check(x_MK, weight, is_gated=False, lead=0)
    _check_norm(norm, weight, lead=0)
    rows = x_MK.shape[:1]
    library.load()
    call = jax.ffi.ffi_call(
        "HeadraceBestColumn",
        tuple(jax.ShapeDtypeStruct(rows, dtype) for dtype in (jnp.int32, jnp.float32, jnp.bool_)),
    )
    return tuple(
        call(
            x_MK,
            jnp.zeros((0,), jnp.float32) if norm is None else norm.scale_D,
            _marks(x_MK, real_M),
            weight.blocks_NGU,
            form=_form(weight),
            eps=np.float32(0 if norm is None else norm.eps),
            mode=np.int64(_MODES[kernels.activations]),
        )
    )


def columns(weight: TiledQuant, index_T: jax.Array, kernels: Kernels) -> jax.Array:
    """See ``headrace.pallas_kernels.api.columns``."""
    del kernels  # the same in every mode
    _check_blocks(weight, lead=0)
    if index_T.dtype != jnp.int32 or index_T.ndim != 1:
        raise UnsupportedCase(f"columns named by {index_T.dtype} of shape {index_T.shape}; int32 of one axis")
    library.load()
    shape = (*index_T.shape, weight.num_rows)
    call = jax.ffi.ffi_call("HeadraceColumns", jax.ShapeDtypeStruct(shape, jnp.float32))
    return call(index_T, weight.blocks_NGU, form=_form(weight))


def _marks(x_MK: jax.Array, real_M: jax.Array | None) -> jax.Array:
    if real_M is None:
        return jnp.zeros((0,), jnp.int32)
    if real_M.shape != x_MK.shape[:1]:
        raise UnsupportedCase(f"marks of shape {real_M.shape} for {x_MK.shape[0]} rows")
    return real_M.astype(jnp.int32)


def _form(weight: TiledQuant) -> np.ndarray:
    is_wide = weight.scale_dtype == "float32"
    return np.array([weight.num_columns, weight.bits, weight.group, weight.zero, weight.is_affine, is_wide], np.int64)


def _check(x_MK: jax.Array, weight: TiledQuant, is_gated: bool, lead: int) -> None:
    if x_MK.dtype != jnp.float32:
        raise UnsupportedCase(f"inputs of {x_MK.dtype}; CPU kernels read float32")
    if x_MK.ndim != 2 or x_MK.shape[1] != weight.num_rows * (1 + is_gated):
        gated = " with gates" if is_gated else ""
        raise UnsupportedCase(f"a weight of shape {weight.shape} does not fit inputs{gated} of shape {x_MK.shape}")
    _check_blocks(weight, lead)


def _check_norm(norm: Rms | None, weight: TiledQuant, lead: int) -> None:
    if norm is None:
        return
    scale = norm.scale_D
    if scale.dtype != jnp.float32 or scale.shape[lead:] != (weight.num_rows,):
        raise UnsupportedCase(
            f"a norm of {scale.dtype} {scale.shape} for inputs of {weight.num_rows} values"
            f"{' of one of the layers' if lead else ''}; float32"
        )


def _check_blocks(weight: TiledQuant, lead: int) -> None:
    if weight.blocks_NGU.ndim != 3 + lead:
        raise UnsupportedCase(
            f"a weight of shape {weight.shape}, where {'one layer' if not lead else 'a stack'} is meant"
        )
