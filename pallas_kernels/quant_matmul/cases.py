"""Weight shapes of real models, tiny ones for interpreters, random inputs of a case, and what must come out."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from headrace.pallas_kernels.quant_matmul.quantize import quantize_groups
from headrace.pallas_kernels.types import GroupQuant


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantCase:
    """x [rows, contraction] times a weight [contraction, columns] of ``bits``. group: None is one per column."""

    name: str
    rows: int
    contraction: int
    columns: int
    bits: int
    group: int | None = None
    affine: bool = False
    x_dtype: str = "bfloat16"
    scale_dtype: str = "bfloat16"

    @property
    def group_rows(self) -> int:
        return self.contraction if self.group is None else self.group


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantInputs:
    """Arrays are NumPy's."""

    x_MK: np.ndarray
    weight: GroupQuant


LLAMA_8B_UP = {"contraction": 4096, "columns": 14336}
LLAMA_8B_DOWN = {"contraction": 14336, "columns": 4096}
LLAMA_8B_KEYS = {"contraction": 4096, "columns": 1024}
LLAMA_8B_LOGITS = {"contraction": 4096, "columns": 128256}
SMOLLM2_UP = {"contraction": 576, "columns": 1536}
SMOLLM2_DOWN = {"contraction": 1536, "columns": 576}
SMOLLM2_LOGITS = {"contraction": 576, "columns": 49152}

MODEL_CASES = (
    QuantCase(name="llama-3.1-8b up, int8, 1 row", rows=1, **LLAMA_8B_UP, bits=8),
    QuantCase(name="llama-3.1-8b up, int8, 16 rows", rows=16, **LLAMA_8B_UP, bits=8),
    QuantCase(name="llama-3.1-8b down, int8, 64 rows", rows=64, **LLAMA_8B_DOWN, bits=8),
    QuantCase(name="llama-3.1-8b logits, int8, 16 rows", rows=16, **LLAMA_8B_LOGITS, bits=8),
    QuantCase(name="llama-3.1-8b up, int4 in 32, 16 rows", rows=16, **LLAMA_8B_UP, bits=4, group=32),
    QuantCase(
        name="llama-3.1-8b up, int4 in 32 affine, 16 rows", rows=16, **LLAMA_8B_UP, bits=4, group=32, affine=True
    ),
    QuantCase(name="llama-3.1-8b down, int4 in 32, 1 row", rows=1, **LLAMA_8B_DOWN, bits=4, group=32),
    QuantCase(name="llama-3.1-8b up, int4 in 64, 64 rows", rows=64, **LLAMA_8B_UP, bits=4, group=64),
    QuantCase(name="llama-3.1-8b up, int4 in 128, 64 rows", rows=64, **LLAMA_8B_UP, bits=4, group=128),
    QuantCase(name="llama-3.1-8b down, int4 in 256, 512 rows", rows=512, **LLAMA_8B_DOWN, bits=4, group=256),
    QuantCase(name="llama-3.1-8b up, int8 in 32, 16 rows", rows=16, **LLAMA_8B_UP, bits=8, group=32),
    QuantCase(name="llama-3.1-8b keys, int8 in 32, 512 rows", rows=512, **LLAMA_8B_KEYS, bits=8, group=32),
    QuantCase(name="smollm2-135m up, int8 in 32, 16 rows", rows=16, **SMOLLM2_UP, bits=8, group=32),
    QuantCase(
        name="smollm2-135m down, int4 in 32 affine, 3 rows", rows=3, **SMOLLM2_DOWN, bits=4, group=32, affine=True
    ),
    QuantCase(name="smollm2-135m logits, int8 in 32, 16 rows", rows=16, **SMOLLM2_LOGITS, bits=8, group=32),
    QuantCase(
        name="smollm2-135m up, int8 in 32, float32, 8 rows",
        rows=8,
        **SMOLLM2_UP,
        bits=8,
        group=32,
        x_dtype="float32",
        scale_dtype="float32",
    ),
)


def _tiny(rows: int, contraction: int, columns: int, **fields: object) -> QuantCase:
    group, affine, x_dtype = fields.get("group"), fields.get("affine", False), fields.get("x_dtype", "bfloat16")
    per = "per column" if group is None else f"in {group}"
    name = f"tiny {rows}x{contraction}x{columns}, int{fields['bits']} {per}{' affine' * bool(affine)}, {x_dtype}"
    return QuantCase(name=name, rows=rows, contraction=contraction, columns=columns, **fields)


_FLOAT32 = {"x_dtype": "float32", "scale_dtype": "float32"}
TINY_CASES = (
    _tiny(1, 64, 128, bits=8),
    _tiny(5, 96, 200, bits=8, affine=True, **_FLOAT32),
    _tiny(1, 128, 128, bits=4, group=32),
    _tiny(3, 96, 130, bits=4, group=32, affine=True, **_FLOAT32),
    _tiny(9, 576, 72, bits=8, group=32),
    _tiny(17, 256, 256, bits=8, group=128, affine=True),
    _tiny(8, 192, 384, bits=8, group=64, **_FLOAT32),
    _tiny(40, 512, 128, bits=4, group=256, **_FLOAT32),
    _tiny(16, 512, 320, bits=4, group=128, affine=True),
)


def make_inputs(case: QuantCase, seed: int) -> QuantInputs:
    """Everything random; columns of the weight differ in size by up to a factor of 8."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((case.rows, case.contraction), np.float32)
    w = random_weight(rng, (case.contraction, case.columns))
    return QuantInputs(
        x_MK=np.asarray(jnp.asarray(x, case.x_dtype)),
        weight=random_quant(w, case.bits, case.group_rows, affine=case.affine, scale_dtype=case.scale_dtype),
    )


def random_weight(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """float32 [..., K, N], off center, so that a forgotten offset shows."""
    size = np.exp2(rng.uniform(0, 3, (*shape[:-2], 1, shape[-1]))).astype(np.float32)
    return size * (rng.standard_normal(shape, np.float32) + np.float32(0.5))


def random_quant(w: np.ndarray, bits: int, group: int, *, affine: bool, scale_dtype: str) -> GroupQuant:
    """The quantized weight as NumPy arrays."""
    quant = quantize_groups(jnp.asarray(w), bits, group, affine=affine, scale_dtype=jnp.dtype(scale_dtype))
    return jax.tree.map(np.asarray, quant)


def dequantized(weight: GroupQuant) -> np.ndarray:
    """float64 [..., K, N]."""
    scale = np.repeat(np.asarray(weight.scale_GN, np.float64), weight.group, axis=-2)
    w = np.asarray(weight.values_KN).astype(np.int8).astype(np.float64) * scale
    if weight.offset_GN is not None:
        w = w + np.repeat(np.asarray(weight.offset_GN, np.float64), weight.group, axis=-2)
    return w


def expected(inputs: QuantInputs) -> np.ndarray:
    """float64 [M, N]."""
    return inputs.x_MK.astype(np.float64) @ dequantized(inputs.weight)
