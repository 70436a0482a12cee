"""Quantized matrices in tiles for CPU kernels: which have them, of what shapes, and made from a ``GroupQuant``."""

from dataclasses import replace
from types import MappingProxyType

import jax
import numpy as np

from headrace.model.quant_form import QuantForm
from headrace.model.specs import ParamSpec
from headrace.pallas_kernels.quant_matmul.cpu import tiles
from headrace.pallas_kernels.quant_matmul.cpu.tiles import GROUPS, TILE
from headrace.pallas_kernels.types import GroupQuant, Implementation, Kernels, TiledQuant, UnsupportedCase

ZEROS = MappingProxyType({"int4": 8, "uint4": 0, "int8": 128})
"""What is added to values of each type, so that they are stored unsigned."""


def is_tiled(spec: ParamSpec, kernels: Kernels) -> bool:
    """Experts have no tiles."""
    return kernels.implementation is Implementation.CPU and spec.form is not None and spec.num_experts is None


def tile_form(form: QuantForm) -> QuantForm:
    """Of the very same weight in tiles, where one scale per output channel is repeated for each block."""
    return replace(form, group=GROUPS[0]) if form.group is None else form


def tiled_shape(spec: ParamSpec) -> TiledQuant:
    """Shapes and static fields of what ``tiled`` makes.

    Raises: UnsupportedCase naming the weight.
    """
    assert spec.form is not None
    form, (contraction, columns) = tile_form(spec.form), spec.matrix_shape
    if form.group is None or form.group not in GROUPS:
        raise UnsupportedCase(f"{spec.name}: groups of {form.group}; tiles have groups of 16 or 32")
    factor_bytes = TILE * form.scale_dtype.itemsize * (1 + form.is_affine)
    block_bytes = form.group * TILE * form.bits // 8 + factor_bytes
    return TiledQuant(
        jax.ShapeDtypeStruct((-(-columns // TILE), -(-contraction // form.group), block_bytes), np.dtype(np.uint8)),
        num_rows=contraction,
        num_columns=columns,
        bits=form.bits,
        group=form.group,
        tile=TILE,
        zero=ZEROS[form.values],
        is_affine=form.is_affine,
        scale_dtype=form.scale,
        stands_for=spec.dtype.name,
    )


def tiled(weight: GroupQuant, spec: ParamSpec) -> TiledQuant:
    """weight: of spec.form."""
    assert spec.form is not None
    return tiles.tiled(weight, bits=spec.form.bits, scale_dtype=spec.form.scale)
