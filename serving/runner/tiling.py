"""Quantized matrices in tiles for CPU kernels: which have them, of what shapes, and made from a ``GroupQuant``."""

from dataclasses import replace

import jax
import numpy as np

from headrace.model.group_quant import widened
from headrace.model.quant_form import QuantForm
from headrace.model.specs import ParamSpec
from headrace.pallas_kernels.types import GroupQuant, Implementation, Kernels, TiledQuant, UnsupportedCase

TILE = 16
"""Columns of a tile."""
GROUPS = (32, 16)
"""Values along the contraction that a block can have."""


def is_tiled(spec: ParamSpec, kernels: Kernels) -> bool:
    """Experts have no tiles."""
    return kernels.implementation is Implementation.CPU and spec.form is not None and spec.num_experts is None


def tile_form(form: QuantForm, contraction: int) -> QuantForm:
    """Of the very same weight with groups that blocks can have: one scale per output channel is repeated.

    Raises: UnsupportedCase.
    """
    group = next((size for size in GROUPS if contraction % size == 0), None) if form.group is None else form.group
    if group not in GROUPS:
        raise UnsupportedCase(
            f"groups of {group or contraction} of {contraction} inputs; tiles have groups of 16 or 32 that divide them"
        )
    return replace(form, group=group)


def tiled_shape(spec: ParamSpec) -> TiledQuant:
    """Shapes and static fields of what ``tiled`` makes, in uint8.

    Raises: UnsupportedCase naming the weight.
    """
    assert spec.form is not None
    contraction, columns = spec.matrix_shape
    try:
        form = tile_form(spec.form, contraction)
    except UnsupportedCase as error:
        raise UnsupportedCase(f"{spec.name}: {error.why}") from error
    assert form.group is not None
    factor_bytes = TILE * form.scale_dtype.itemsize * (1 + form.is_affine)
    block_bytes = form.group * TILE * form.bits // 8 + factor_bytes
    shape = (-(-columns // TILE), contraction // form.group, block_bytes)
    return TiledQuant(
        jax.ShapeDtypeStruct(shape, np.dtype(np.uint8)),
        num_rows=contraction,
        num_columns=columns,
        bits=form.bits,
        group=form.group,
        tile=TILE,
        is_affine=form.is_affine,
        scale_dtype=form.scale,
        stands_for=spec.dtype.name,
    )


def tiled(weight: GroupQuant, spec: ParamSpec) -> TiledQuant:
    """weight: of spec.form."""
    from headrace.pallas_kernels.quant_matmul.cpu import tiles

    assert spec.form is not None
    form = tile_form(spec.form, spec.matrix_shape[-2])
    wide = widened(weight, form)
    made = tiles.tiled(wide.replace(values_KN=np.asarray(wide.values_KN).astype(np.int8)), bits=form.bits)
    return made
