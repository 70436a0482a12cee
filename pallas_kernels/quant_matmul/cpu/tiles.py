"""Group-quantized weights to the blocks that CPU kernels read, on the host, and back; exact or refused.

A tile is 16 columns: one stream of blocks, one block for each group of 16 or 32 values along K (``micro_kernels.h``
says where each byte lies). Values are stored unsigned, as value + zero. Columns and rows of padding have scale 0.
"""

import jax
import numpy as np

from headrace.pallas_kernels.types import GroupQuant, TiledQuant, UnsupportedCase

TILE = 16
"""Columns of a tile: a vector of AVX-512, two of AVX2, four of NEON."""
GROUPS = (32, 16)
"""Values along K of a block; longer groups repeat their scale."""


def tiled(weight: GroupQuant, *, bits: int | None = None, scale_dtype: str | None = None) -> TiledQuant:
    """The same weight [K, N] or [L, K, N] in tiles.

    4 bits hold int4 and uint4 values, and int8 values that are all in -8..7, or in 0..15 where there are offsets; 8
    bits hold all.

    Args:
      bits: 4 or 8; None is the fewest that hold the values. scale_dtype: of factors, float16 or float32; None is
        float16 where that is exact for all of them, else float32.
    Raises: UnsupportedCase: groups that are neither multiples of 16 nor whole columns, factors that are not finite or
      not exact in their type, or values that do not fit the bits.
    """
    values = np.asarray(weight.values_KN)
    if values.ndim not in (2, 3) or not values.size:
        raise UnsupportedCase(f"a weight of shape {values.shape}; tiles hold [K, N] or [L, K, N] with K and N above 0")
    group = _block_group(values.shape[-2], weight.scale_GN.shape[-2])
    bits, zero = _level(values, weight.offset_GN is not None, bits)
    factors = [_factors(name, f, values.shape[-2], group) for name, f in _named_factors(weight)]
    fits_float16 = scale_dtype != "float32" and all(map(_fits_float16, factors))
    if scale_dtype == "float16" and not fits_float16:
        raise UnsupportedCase("factors that float16 does not hold exactly")
    scale_dtype = "float16" if fits_float16 else "float32"
    layers = values.reshape(-1, *values.shape[-2:])
    stacked = [factor.reshape(len(layers), -1, factor.shape[-1]) for factor in factors]
    first = _blocks(layers[0], [f[0] for f in stacked], bits, zero, group, scale_dtype)
    blocks = np.empty((len(layers), *first.shape), np.uint8)
    blocks[0] = first
    for i in range(1, len(layers)):
        blocks[i] = _blocks(layers[i], [f[i] for f in stacked], bits, zero, group, scale_dtype)
    return TiledQuant(
        blocks.reshape(*values.shape[:-2], *first.shape),
        num_rows=values.shape[-2],
        num_columns=values.shape[-1],
        bits=bits,
        group=group,
        tile=TILE,
        zero=zero,
        is_affine=weight.offset_GN is not None,
        scale_dtype=scale_dtype,
        stands_for=weight.stands_for,
    )


def untiled(weight: TiledQuant) -> GroupQuant:
    """The weight back, as int8 values and float32 factors; a scale for each ``group`` values, where K is a multiple of
    them, else for each column."""
    blocks = np.asarray(weight.blocks_NGU)
    lead, (tiles, groups, _) = blocks.shape[:-3], blocks.shape[-3:]
    value_bytes = weight.group * TILE * weight.bits // 8
    packed = blocks[..., :value_bytes].reshape(*lead, tiles, groups, -1, TILE, 4)
    packed = np.moveaxis(packed, (-5, -2), (-2, -1)).reshape(*lead, groups, -1, tiles * TILE)
    if weight.bits == 4:
        packed = np.concatenate((packed & 15, packed >> 4), axis=-2)
    values = (packed.astype(np.int16) - weight.zero).astype(np.int8).reshape(*lead, -1, tiles * TILE)
    factors = blocks[..., value_bytes:].copy().view(weight.scale_dtype).astype(np.float32)
    factors = factors.reshape(*lead, tiles, groups, -1, TILE)
    factors = np.moveaxis(factors, (-2, -4), (0, -2)).reshape(-1, *lead, groups, tiles * TILE)
    factors = factors[..., : weight.num_columns]
    if weight.num_rows % weight.group:
        factors = factors[..., :1, :]
    return GroupQuant(
        values[..., : weight.num_rows, : weight.num_columns],
        factors[0],
        factors[1] if weight.is_affine else None,
        stands_for=weight.stands_for,
    )


def _named_factors(weight: GroupQuant) -> list[tuple[str, np.ndarray]]:
    named = [("scale", weight.scale_GN)] + [("offset", weight.offset_GN)] * (weight.offset_GN is not None)
    return [(name, np.asarray(factor).astype(np.float32)) for name, factor in named]


def _block_group(num_rows: int, num_scales: int) -> int:
    if num_scales == 1:
        return GROUPS[0]
    group = num_rows // num_scales if num_scales and num_rows % num_scales == 0 else 0
    for size in GROUPS:
        if group and group % size == 0:
            return size
    raise UnsupportedCase(
        f"{num_scales} scales for {num_rows} rows; tiles hold groups of a multiple of 16 rows, or whole columns"
    )


def _level(values: np.ndarray, is_affine: bool, bits: int | None) -> tuple[int, int]:
    """(bits, the stored level that stands for 0)."""
    if bits not in (None, 4, 8):
        raise UnsupportedCase(f"tiles of {bits} bits; they can be of 4 or 8")
    if bits == 8:
        return 8, 128
    if values.dtype == np.dtype(jax.numpy.int4):
        return 4, 8
    if values.dtype == np.dtype(jax.numpy.uint4):
        return 4, 0
    if values.dtype != np.int8:
        raise UnsupportedCase(f"values of {values.dtype}; tiles hold int4, uint4 and int8")
    low, high = int(values.min()), int(values.max())
    if is_affine and low >= 0 and high <= 15:
        return 4, 0
    if low >= -8 and high <= 7:
        return 4, 8
    if bits == 4:
        raise UnsupportedCase(f"values from {low} to {high} do not fit 4 bits")
    return 8, 128


def _factors(name: str, factor: np.ndarray, num_rows: int, group: int) -> np.ndarray:
    """One for each block: [..., ceil(K / group), N]."""
    if not np.isfinite(factor).all():
        raise UnsupportedCase(f"a {name} that is not finite")
    blocks = -(-num_rows // group)
    return np.repeat(factor, blocks // factor.shape[-2], axis=-2)


def _fits_float16(factor: np.ndarray) -> bool:
    with np.errstate(over="ignore"):
        narrow = factor.astype(np.float16).astype(np.float32)
    return np.array_equal(narrow.view(np.uint32), np.ascontiguousarray(factor).view(np.uint32))


def _blocks(
    values_KN: np.ndarray, factors: list[np.ndarray], bits: int, zero: int, group: int, scale_dtype: str
) -> np.ndarray:
    """uint8 [tiles, groups, bytes] of one layer."""
    rows, columns = values_KN.shape
    groups, tiles = -(-rows // group), -(-columns // TILE)
    stored = values_KN.astype(np.int8).view(np.uint8) + np.uint8(zero)
    if (groups * group, tiles * TILE) != stored.shape:
        stored = np.pad(stored, ((0, groups * group - rows), (0, tiles * TILE - columns)))
    stored = stored.reshape(groups, group, tiles * TILE)
    if bits == 4:
        stored = stored[:, : group // 2] | stored[:, group // 2 :] << 4
    value_bytes = group * TILE * bits // 8
    factor_bytes = TILE * np.dtype(scale_dtype).itemsize
    blocks = np.empty((tiles, groups, value_bytes + factor_bytes * len(factors)), np.uint8)
    packed = stored.reshape(groups, -1, 4, tiles, TILE).transpose(3, 0, 1, 4, 2)
    blocks[..., :value_bytes] = packed.reshape(tiles, groups, value_bytes)
    for i, factor in enumerate(factors):
        wide = np.zeros((groups, tiles * TILE), scale_dtype)
        wide[:, :columns] = factor
        by_tile = np.ascontiguousarray(wide.reshape(groups, tiles, TILE).transpose(1, 0, 2))
        first = value_bytes + i * factor_bytes
        blocks[..., first : first + factor_bytes] = by_tile.view(np.uint8)
    return blocks
