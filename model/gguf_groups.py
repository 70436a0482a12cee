"""Blocks of GGUF's quantized types as small integers, scales and offsets, exactly.

scale * value + offset, each operation rounded to float32, is what the ``gguf`` package dequantizes to, bit for bit.
Source: the layouts of ggml-quants.h and dequantize_row_* in ggml-org/llama.cpp, and gguf-py's quants.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType

from headrace.model.quant_form import GGUF_FORMS

Blocks = np.ndarray
"""uint8 [blocks, bytes of a block]."""
_NIBBLES = np.array([0, 4], np.uint8)
_PAIRS = np.array([0, 2, 4, 6], np.uint8)
_BITS = np.arange(8, dtype=np.uint8)
_KVALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Of MXFP4, doubled."""
_SAFE_SCALE = np.float32(1e30)
"""Below it no product with 8 bits leaves float32."""


@dataclass(frozen=True, slots=True)
class Groups:
    """values: int8 [groups, values of a group], of 4 bits too. scale, offset: [groups], in the type of the form."""

    values: np.ndarray
    scale: np.ndarray
    offset: np.ndarray | None = None

    def num_not_finite(self) -> int:
        """Values that are NaN or infinite once they are dequantized."""
        # Scales are float16 or products of one with an integer; only MXFP4's can be so large that a product overflows.
        with np.errstate(invalid="ignore", over="ignore"):
            is_bad = ~(np.abs(self.scale.astype(np.float32)) < _SAFE_SCALE)
            if self.offset is not None:
                is_bad |= ~np.isfinite(self.offset)
            if not is_bad.any():
                return 0
            products = self.values[is_bad] * self.scale[is_bad, None].astype(np.float32)
            if self.offset is not None:
                products = products + self.offset[is_bad, None]
        return products.size - int(np.count_nonzero(np.isfinite(products)))


def groups_of(raw: np.ndarray, ggml_type: str) -> Groups:
    """The stored bytes of whole blocks, uint8, as groups in the order of their values.

    ggml_type: a key of ``GGUF_FORMS``.
    """
    _, block_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[ggml_type]]
    # NaN and infinite scales are legal bits here: num_not_finite counts what they make.
    with np.errstate(invalid="ignore"):
        values, scale, offset = _DECODERS[ggml_type](raw.reshape(-1, block_bytes))
    group = GGUF_FORMS[ggml_type].group
    assert group is not None
    return Groups(
        values.reshape(-1, group).view(np.int8),
        scale.reshape(-1),
        None if offset is None else offset.reshape(-1),
    )


_Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def _float16(blocks: Blocks, first: int) -> np.ndarray:
    """[blocks, 1]"""
    return blocks[:, first : first + 2].view(np.float16)


def _low_bits(blocks: Blocks) -> np.ndarray:
    """16 bytes: the low halves are 16 values, the high halves the next 16."""
    return np.concatenate([blocks & 15, blocks >> 4], axis=1)


def _high_bit(blocks: Blocks) -> np.ndarray:
    """4 bytes: the fifth bit of 32 values, in its place."""
    return np.unpackbits(blocks, axis=1, bitorder="little") << 4


def _q8_0(blocks: Blocks) -> _Parts:
    return np.ascontiguousarray(blocks[:, 2:]), _float16(blocks, 0), None


def _q4_0(blocks: Blocks) -> _Parts:
    return _low_bits(blocks[:, 2:]) - np.uint8(8), _float16(blocks, 0), None


def _q4_1(blocks: Blocks) -> _Parts:
    return _low_bits(blocks[:, 4:]), _float16(blocks, 0), _float16(blocks, 2)


def _q5_0(blocks: Blocks) -> _Parts:
    values = _low_bits(blocks[:, 6:]) | _high_bit(blocks[:, 2:6])
    return values - np.uint8(16), _float16(blocks, 0), None


def _q5_1(blocks: Blocks) -> _Parts:
    values = _low_bits(blocks[:, 8:]) | _high_bit(blocks[:, 4:8])
    return values, _float16(blocks, 0), _float16(blocks, 2)


def _mxfp4(blocks: Blocks) -> _Parts:
    exponent = blocks[:, :1]
    # Half of 2 ** (exponent - 127), since the values are doubled; the two smallest are subnormal in float32.
    subnormal = np.uint32(0x00200000) << np.minimum(exponent, 1).astype(np.uint32)
    normal = (exponent.astype(np.uint32) - (exponent > 0)).astype(np.uint32) << np.uint32(23)
    scale = np.where(exponent < 2, subnormal, normal).astype(np.uint32).view(np.float32)
    return _KVALUES[_low_bits(blocks[:, 1:])], scale, None


def _q2_k(blocks: Blocks) -> _Parts:
    scales, packed = blocks[:, :16], blocks[:, 16:80].reshape(-1, 2, 1, 32)
    values = (packed >> _PAIRS[:, None]) & 3
    scale = _float16(blocks, 80).astype(np.float32) * (scales & 15)
    return values, scale, -(_float16(blocks, 82).astype(np.float32) * (scales >> 4))


def _q3_k(blocks: Blocks) -> _Parts:
    mask, packed = blocks[:, :32].reshape(-1, 1, 32), blocks[:, 32:96].reshape(-1, 2, 1, 32)
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    scales = np.concatenate([low & 15, low >> 4], axis=1)
    scales |= ((high[:, None, :] >> _PAIRS[:, None]) & 3).reshape(-1, 16) << 4
    values = ((packed >> _PAIRS[:, None]) & 3).reshape(-1, 256)
    # A bit that is 0 subtracts 4.
    values -= (((mask >> _BITS[:, None]) & 1) ^ 1).reshape(-1, 256) << 2
    scale = _float16(blocks, 108).astype(np.float32) * (scales.view(np.int8) - np.int8(32))
    return values, scale, None


def _scales_and_offsets(blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """Of Q4_K and Q5_K: 8 scales and 8 minima of 6 bits in 12 bytes."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 2) & 48)], axis=1)
    # A minimum is subtracted: its negative is added.
    return _float16(blocks, 0).astype(np.float32) * scales, -(_float16(blocks, 2).astype(np.float32) * minima)


def _q4_k(blocks: Blocks) -> _Parts:
    values = (blocks[:, 16:].reshape(-1, 4, 1, 32) >> _NIBBLES[:, None]) & 15
    return values, *_scales_and_offsets(blocks)


def _q5_k(blocks: Blocks) -> _Parts:
    values = ((blocks[:, 48:].reshape(-1, 4, 1, 32) >> _NIBBLES[:, None]) & 15).reshape(-1, 8, 32)
    values |= ((blocks[:, 16:48].reshape(-1, 1, 32) >> _BITS[:, None]) & 1) << 4
    return values, *_scales_and_offsets(blocks)


def _q6_k(blocks: Blocks) -> _Parts:
    values = ((blocks[:, :128].reshape(-1, 2, 1, 64) >> _NIBBLES[:, None]) & 15).reshape(-1, 2, 4, 32)
    values |= ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> _PAIRS[:, None]) & 3) << 4
    scale = _float16(blocks, 208).astype(np.float32) * blocks[:, 192:208].view(np.int8)
    return values - np.uint8(32), scale, None


_DECODERS: Mapping[str, Callable[[Blocks], _Parts]] = MappingProxyType(
    {
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q8_0": _q8_0,
        "Q2_K": _q2_k,
        "Q3_K": _q3_k,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
        "MXFP4": _mxfp4,
    }
)
