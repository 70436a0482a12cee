"""Arrays that kernels share, the choice of an implementation, and the error of one that cannot run.

Axis letters (others: model/shapes.py): Z sequences of the step (decode rows, then prefill segments) · J query blocks ·
R rows of the pool (layers times pages) · W tokens of a page · C key and value of one head side by side (2H) ·
G groups of a quantized weight along its contraction axis.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
from flax import struct

Blocks = TypeVar("Blocks")


class Implementation(StrEnum):
    """How an operation runs; always an explicit choice."""

    REFERENCE = "reference"
    TPU = "tpu"
    GPU = "gpu"
    CPU = "cpu"


class Activations(StrEnum):
    """In what form CPU kernels read the inputs of a product with a quantized weight: float32, or integers with one
    factor for each row and 32 values. int16 keeps the golden ids (relative error of a product 6e-5), int8 does not
    always (4e-3)."""

    EXACT = "exact"
    INT16 = "int16"
    INT8 = "int8"


class UnsupportedCase(ValueError):
    """The chosen implementation cannot run this case; ``why`` names the limit. Nothing falls back by itself."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(why)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Which code runs the operations: chosen once at start, static in every program.

    chip: an entry of ``chips.CHIPS``, given and never asked of ``jax.devices()``, so that programs can be compiled for
      a chip that is not there. None for the reference.
    interpret: what ``pallas_call`` gets as ``interpret``: False, True, or parameters of an interpreter.
    blocks: explicit block sizes, one frozen dataclass at most of each operation's kind; they win over tuned ones.
    activations: of products with quantized weights; other implementations than the CPU's are always exact.
    by_reference: operations, by name, that the implementation has no code for and the reference runs; a part of the
      choice, shown at the start. What is not listed is refused.
    """

    implementation: Implementation = Implementation.REFERENCE
    chip: str | None = None
    interpret: Hashable = False
    blocks: tuple[Hashable, ...] = ()
    activations: Activations = Activations.EXACT
    by_reference: tuple[str, ...] = ()

    def explicit(self, kind: type[Blocks]) -> Blocks | None:
        """The given block sizes of this kind."""
        return next((blocks for blocks in self.blocks if isinstance(blocks, kind)), None)


class Across(Protocol):
    """Combines what the devices have that hold the other parts of an axis; the same result on all of them."""

    def sum(self, x: jax.Array) -> jax.Array: ...
    def max(self, x: jax.Array) -> jax.Array: ...


class Alone:
    """``Across`` no other device."""

    def sum(self, x: jax.Array) -> jax.Array:
        return x

    def max(self, x: jax.Array) -> jax.Array:
        return x


ALONE = Alone()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What is fixed in one layer's attention.

    scale: factor on the scores. window: a query at position p sees keys at p - window + 1 .. p; None = all before it.
    soft_cap: scores become soft_cap * tanh(score / soft_cap), after the scale.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None


@struct.dataclass
class KVPool:
    """Pages of keys and values of all layers of one kind; donate it.

    pages_RKWC: float32, bfloat16, int8 or an 8-bit float. The key of a head is [..., :H], its value [..., H:]; page p
      of layer l is row l * P + p, and page 0 of each layer is the null page.
    scale_RK2W: float32, factors of each token's key (0) and value (1), where pages are 8 bits wide; else None.
    bits_of: name of the float type whose bits the pages hold, as unsigned integers of its width; reference on CPU only.
      XLA:CPU does in float32 what it has no narrow floats for: writing one token would convert the whole pool.
    """

    pages_RKWC: jax.Array
    scale_RK2W: jax.Array | None = None
    bits_of: str | None = struct.field(pytree_node=False, default=None)

    @property
    def dtype(self) -> jnp.dtype:
        """Of keys and values."""
        return self.pages_RKWC.dtype if self.bits_of is None else jnp.dtype(self.bits_of)

    @property
    def page_tokens(self) -> int:
        return self.pages_RKWC.shape[2]

    @property
    def num_kv_heads(self) -> int:
        return self.pages_RKWC.shape[1]

    @property
    def head_dim(self) -> int:
        return self.pages_RKWC.shape[3] // 2


@struct.dataclass
class TokenKV:
    """This step's keys and values as the pool stores them (``kv_quantization.to_pool``).

    kv_TKC: in the pool's type. scale_TK2: float32, or None like the pool's.
    """

    kv_TKC: jax.Array
    scale_TK2: jax.Array | None = None

    def rows(self, first: int, last: int | None = None) -> "TokenKV":
        """Tokens first..last of the flat batch."""
        scale = None if self.scale_TK2 is None else self.scale_TK2[first:last]
        return TokenKV(self.kv_TKC[first:last], scale)


@struct.dataclass
class GroupQuant:
    """A weight [K, N] (or [..., K, N]) of small integers: scale * value + offset, one scale per group of K and column.

    In float32 the product is rounded, and then the sum.

    values_KN: int8, int4 or uint4. scale_GN, offset_GN: float16, bfloat16 or float32, G groups of as many rows; offset
      None = symmetric. One group is one scale per output channel; cut along K over a mesh, each device has all of them.
    stands_for: name of the float type of the weight: what a product reads beside it is in that type.
    """

    values_KN: jax.Array
    scale_GN: jax.Array
    offset_GN: jax.Array | None = None
    stands_for: str = struct.field(pytree_node=False, default="float32", kw_only=True)

    @property
    def group(self) -> int:
        """Values along K that share a scale."""
        return self.values_KN.shape[-2] // self.scale_GN.shape[-2]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values_KN.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Of the weight, as of one that is not quantized."""
        return jnp.dtype(self.stands_for)


@struct.dataclass
class TiledQuant:
    """A ``GroupQuant`` [K, N] as CPU kernels read it: tiles of a few columns, each one stream of bytes; exact.

    blocks_NGU: uint8 [N / tile, G, bytes], or [L, N / tile, G, bytes] of all layers. A block holds the values of one
      group and of one tile's columns, then their scales, then their offsets (``quant_matmul/cpu/tiles.py``).
    num_rows, num_columns: K, N. bits: 4 or 8, of a value. group: values along K that share a scale. tile: columns.
    zero: values are stored unsigned, as value + zero.
    is_affine: there are offsets. scale_dtype: of scales and offsets, float16 or float32. stands_for: as GroupQuant's.
    """

    blocks_NGU: jax.Array
    num_rows: int = struct.field(pytree_node=False, kw_only=True)
    num_columns: int = struct.field(pytree_node=False, kw_only=True)
    bits: int = struct.field(pytree_node=False, kw_only=True)
    group: int = struct.field(pytree_node=False, kw_only=True)
    tile: int = struct.field(pytree_node=False, kw_only=True)
    zero: int = struct.field(pytree_node=False, kw_only=True)
    is_affine: bool = struct.field(pytree_node=False, kw_only=True)
    scale_dtype: str = struct.field(pytree_node=False, kw_only=True)
    stands_for: str = struct.field(pytree_node=False, default="float32", kw_only=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        return (*self.blocks_NGU.shape[:-3], self.num_rows, self.num_columns)

    @property
    def dtype(self) -> jnp.dtype:
        """Of the weight, as of one that is not quantized."""
        return jnp.dtype(self.stands_for)


@struct.dataclass
class Rms:
    """A normalization in front of a product: x / sqrt(mean(x^2) + eps) * scale (arXiv:1910.07467).

    scale_D: float32.
    """

    scale_D: jax.Array
    eps: float = struct.field(pytree_node=False)


@struct.dataclass
class AttnMeta:
    """Which tokens of the flat batch belong to which sequence, and where their pages are.

    The flat token axis T holds B decode rows of one token each, then J query blocks of T_block tokens. A block belongs
    to one sequence and starts on a page boundary of it; every block of a segment but the last is full.

    position_B: i32, index of the row's token in its sequence; its key and value are written there.
    page_table_ZM: i32, pages of each sequence in order; Z = B + prefill segments. Page 0 is the null page: table
      entries behind a sequence's pages hold it, and padding rows have nothing else.
    kv_len_Z: i32, tokens of each sequence including those of this step; 0 marks a padding row.
    blk_seq_J: i32, row of page_table_ZM, in [B, Z).
    blk_pos_J: i32, position of the block's first token, a multiple of the page size.
    blk_len_J: i32, real tokens of the block, 0 marks a padding block.
    """

    position_B: jax.Array
    page_table_ZM: jax.Array
    kv_len_Z: jax.Array
    blk_seq_J: jax.Array
    blk_pos_J: jax.Array
    blk_len_J: jax.Array

    @property
    def num_decode_rows(self) -> int:
        return self.position_B.shape[0]

    @property
    def num_blocks(self) -> int:
        return self.blk_seq_J.shape[0]

    def block_tokens(self, num_tokens: int) -> int:
        """Tokens of one query block in a flat batch of num_tokens; 0 where there are no blocks."""
        return (num_tokens - self.num_decode_rows) // self.num_blocks if self.num_blocks else 0
