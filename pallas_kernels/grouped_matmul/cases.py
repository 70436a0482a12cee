"""Expert shapes of real models, tiny ones for interpreters, random inputs of a case, and what must come out."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from headrace.pallas_kernels.quant_matmul.cases import dequantized, random_quant, random_weight
from headrace.pallas_kernels.types import GroupQuant


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedCase:
    """Rows of one expert layer: tokens * top_k rows, each times its expert's [contraction, columns].

    group_sizes: rows of each of all experts; None: drawn at random, top_k different experts for each token.
    padding_rows: behind the last group. group_offset, local_experts: the shard; None is all experts.
    bits: None is a weight of x's type; 8 is int8 with one scale per column.
    """

    name: str
    num_experts: int
    contraction: int
    columns: int
    tokens: int = 0
    top_k: int = 1
    group_sizes: tuple[int, ...] | None = None
    padding_rows: int = 0
    group_offset: int = 0
    local_experts: int | None = None
    bits: int | None = None
    group: int | None = None
    x_dtype: str = "bfloat16"

    @property
    def experts_here(self) -> int:
        return self.num_experts if self.local_experts is None else self.local_experts

    @property
    def rows(self) -> int:
        used = self.tokens * self.top_k if self.group_sizes is None else sum(self.group_sizes)
        return used + self.padding_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedInputs:
    """Arguments of ``api.grouped_matmul``. Arrays are NumPy's."""

    x_MK: np.ndarray
    weight: np.ndarray | GroupQuant
    group_sizes_G: np.ndarray
    group_offset: int


MIXTRAL_UP = {"num_experts": 8, "top_k": 2, "contraction": 4096, "columns": 14336}
MIXTRAL_DOWN = {"num_experts": 8, "top_k": 2, "contraction": 14336, "columns": 4096}
QWEN3_30B_UP = {"num_experts": 128, "top_k": 8, "contraction": 2048, "columns": 768}
QWEN3_30B_DOWN = {"num_experts": 128, "top_k": 8, "contraction": 768, "columns": 2048}
GPT_OSS_20B_UP = {"num_experts": 32, "top_k": 4, "contraction": 2880, "columns": 5760}
GPT_OSS_20B_DOWN = {"num_experts": 32, "top_k": 4, "contraction": 2880, "columns": 2880}

MODEL_CASES = (
    GroupedCase(name="mixtral-8x7b up, 1 token", **MIXTRAL_UP, tokens=1),
    GroupedCase(name="mixtral-8x7b up, int8, 16 tokens", **MIXTRAL_UP, tokens=16, bits=8),
    GroupedCase(name="mixtral-8x7b down, 16 tokens", **MIXTRAL_DOWN, tokens=16),
    GroupedCase(name="mixtral-8x7b down, int8, 1024 tokens", **MIXTRAL_DOWN, tokens=1024, bits=8),
    GroupedCase(
        name="mixtral-8x7b up, half of the experts, 256 tokens",
        **MIXTRAL_UP,
        tokens=256,
        group_offset=4,
        local_experts=4,
    ),
    GroupedCase(name="qwen3-30b-a3b up, 1 token", **QWEN3_30B_UP, tokens=1),
    GroupedCase(name="qwen3-30b-a3b up, int8, 16 tokens", **QWEN3_30B_UP, tokens=16, bits=8),
    GroupedCase(name="qwen3-30b-a3b down, int8, 64 tokens", **QWEN3_30B_DOWN, tokens=64, bits=8),
    GroupedCase(name="qwen3-30b-a3b down, 1024 tokens", **QWEN3_30B_DOWN, tokens=1024),
    GroupedCase(name="gpt-oss-20b up, 16 tokens", **GPT_OSS_20B_UP, tokens=16),
    GroupedCase(name="gpt-oss-20b down, int8, 512 tokens", **GPT_OSS_20B_DOWN, tokens=512, bits=8),
)

_TINY = {"num_experts": 4, "contraction": 64, "columns": 128, "x_dtype": "float32"}
TINY_CASES = (
    GroupedCase(name="tiny, one row", **_TINY, group_sizes=(0, 0, 1, 0)),
    GroupedCase(name="tiny, no rows at all", **_TINY, group_sizes=(0, 0, 0, 0), padding_rows=5),
    GroupedCase(name="tiny, borders on tiles", **_TINY, group_sizes=(16, 0, 8, 16)),
    GroupedCase(name="tiny, borders inside tiles, padding", **_TINY, group_sizes=(3, 11, 1, 20), padding_rows=6),
    GroupedCase(name="tiny, one expert has all", **_TINY, group_sizes=(0, 37, 0, 0), padding_rows=3),
    GroupedCase(name="tiny, first shard", **_TINY, group_sizes=(5, 12, 9, 3), local_experts=2),
    GroupedCase(
        name="tiny, last shard, padding",
        **_TINY,
        group_sizes=(17, 4, 0, 8),
        group_offset=2,
        local_experts=2,
        padding_rows=20,
    ),
    GroupedCase(name="tiny, shard without rows", **_TINY, group_sizes=(9, 0, 0, 12), group_offset=1, local_experts=2),
    GroupedCase(name="tiny, int8", **_TINY, group_sizes=(7, 0, 2, 10), bits=8),
    GroupedCase(
        name="tiny, bfloat16, odd columns", **_TINY | {"columns": 200, "x_dtype": "bfloat16"}, group_sizes=(4, 13, 0, 1)
    ),
    GroupedCase(
        name="tiny, int8, bfloat16, shard",
        **_TINY | {"contraction": 96, "x_dtype": "bfloat16"},
        group_sizes=(4, 13, 18, 1),
        group_offset=1,
        local_experts=2,
        bits=8,
    ),
    GroupedCase(name="tiny, int8 in 32", **_TINY, group_sizes=(7, 0, 2, 10), bits=8, group=32),
)


def draw_sizes(case: GroupedCase, rng: np.random.Generator) -> np.ndarray:
    """i32 [G], rows of each of the model's experts."""
    if case.group_sizes is not None:
        return np.array(case.group_sizes, np.int32)
    chosen = np.argsort(rng.random((case.tokens, case.num_experts)), axis=1)[:, : case.top_k]
    return np.bincount(chosen.ravel(), minlength=case.num_experts).astype(np.int32)


def make_inputs(case: GroupedCase, seed: int) -> GroupedInputs:
    """Everything random."""
    rng = np.random.default_rng(seed)
    sizes = draw_sizes(case, rng)
    x = np.asarray(jnp.asarray(rng.standard_normal((case.rows, case.contraction), np.float32), case.x_dtype))
    w = random_weight(rng, (case.experts_here, case.contraction, case.columns))
    if case.bits is None:
        weight: np.ndarray | GroupQuant = np.asarray(jnp.asarray(w, case.x_dtype))
    else:
        group = case.contraction if case.group is None else case.group
        weight = random_quant(w, case.bits, group, affine=False, scale_dtype=case.x_dtype)
    return GroupedInputs(x_MK=x, weight=weight, group_sizes_G=sizes, group_offset=case.group_offset)


def in_a_stack(inputs: GroupedInputs, layer: int, layers: int) -> np.ndarray | GroupQuant:
    """The weight as one layer of many; the others hold NaN, or the largest integers."""

    def stacked(array: np.ndarray) -> np.ndarray:
        rest = np.full_like(array, 127 if array.dtype == np.int8 else np.nan)
        return np.stack([array if index == layer else rest for index in range(layers)])

    of_layers: np.ndarray | GroupQuant = jax.tree.map(stacked, inputs.weight)
    return of_layers


def expected(inputs: GroupedInputs) -> np.ndarray:
    """float64 [M, N], one expert's rows after the other."""
    weight = inputs.weight
    w = dequantized(weight) if isinstance(weight, GroupQuant) else weight.astype(np.float64)
    out = np.zeros((inputs.x_MK.shape[0], w.shape[2]))
    ends = np.cumsum(inputs.group_sizes_G)
    for expert in range(w.shape[0]):
        end = ends[inputs.group_offset + expert]
        rows = slice(end - inputs.group_sizes_G[inputs.group_offset + expert], end)
        out[rows] = inputs.x_MK[rows].astype(np.float64) @ w[expert]
    return out
