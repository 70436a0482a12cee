"""What is compiled by the chips' own compilers without the chips: every kernel, at the shapes and types of the table.

Free of any one compiler: ``tpu.py`` and ``cuda.py`` take entries from here. Attention and writes run on the second of
two layers, whose row is an argument as it is inside a scan. For products D and K become the output width: one
projection to K heads of D, from a model width of 4096.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from headrace.pallas_kernels import api
from headrace.pallas_kernels.chips import CHIPS
from headrace.pallas_kernels.kv_quantization import is_quantized
from headrace.pallas_kernels.types import AttentionSpec, AttnMeta, GroupQuant, Implementation, Kernels, KVPool, TokenKV
from tests.aot.hlo import Shape

HEAD_DIMS = (64, 128, 256)
KV_HEADS = (1, 8)
HEADS_PER_KV_HEAD = 4
LAYERS = 2
ROWS = 64
"""Decode rows, of 1,024 tokens on average; the table has room for twice that."""
MEAN_TOKENS, MOST_TOKENS = 1024, 2048
BLOCK_TOKENS, BLOCKS, SEGMENTS = 128, 4, 2
PAGE_TOKENS = {Implementation.TPU: 128, Implementation.GPU: 64}
OTHER_PAGE_TOKENS = (16, 32, 64, 128)
"""Tried at one shape (D 128, 8 KV heads) beside the page size of the table. A TPU page of 8-bit values has 32 tokens at
least: copies address whole tiles."""
LEAST_PAGE_TOKENS = {
    ("bf16", Implementation.TPU): 16,
    ("int8", Implementation.TPU): 32,
    ("fp8", Implementation.TPU): 32,
}
WIDTH, PRODUCT_ROWS, EXPERTS, EXPERTS_OF_TOKEN, GROUP = 4096, 16, 8, 2, 32


class Operation(StrEnum):
    """The five rows of the compile matrix; prefill is a batch of query blocks alone, write a mixed one."""

    DECODE = "decode"
    PREFILL = "prefill"
    WRITE = "write"
    GROUPED = "grouped"
    QUANT = "quant"


ATTENTION = (Operation.DECODE, Operation.PREFILL, Operation.WRITE)
TYPES = {
    **dict.fromkeys(ATTENTION, ("bf16", "int8", "fp8")),
    Operation.GROUPED: ("bf16", "int8"),
    Operation.QUANT: ("int8", "int8g32", "int4g32"),
}
"""Types of the pool, or of the weight: int8 has one scale per output channel, g32 one per 32 inputs. Activations and
results of attention are bf16 throughout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One compilation. features: of AttentionSpec, and sinks."""

    chip: str
    operation: Operation
    dtype: str
    head_dim: int
    kv_heads: int
    page_tokens: int
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False

    @property
    def name(self) -> str:
        page = f" W{self.page_tokens}" if self.operation in ATTENTION else ""
        features = " window cap sinks" if self.window or self.soft_cap or self.has_sinks else ""
        return f"{self.chip} {self.operation} {self.dtype} D{self.head_dim} K{self.kv_heads}{page}{features}"

    @property
    def kernels(self) -> Kernels:
        return Kernels(implementation=CHIPS[self.chip].implementation, chip=self.chip)


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """Something to compile. arguments: ShapeDtypeStructs. donated: indexes of arguments. donated_bytes: of their
    leaves, unpadded. bound_bytes: no temporary may reach it: the pages and scales of one layer, or the weight as bf16.
    activation_bytes: of a whole step; XLA:TPU reports all temporaries as one sum, which these may add to.
    row_major: leaves of arguments that lie row-major whatever XLA would choose: the values of weights that a kernel
    reads. may_be_copied: those of donated that XLA may move about: a step's sampling state is small. weights: of a
    whole step, one layer at a time; no array like one of them may be made in HBM. mesh: that arguments are placed on,
    None: one device.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...]
    donated_bytes: int
    bound_bytes: int
    activation_bytes: int = 0
    row_major: tuple[jax.ShapeDtypeStruct, ...] = ()
    may_be_copied: tuple[int, ...] = ()
    weights: tuple[jax.ShapeDtypeStruct, ...] = ()
    mesh: Mesh | None = None

    @property
    def uncopied(self) -> set[tuple[int, int]]:
        """(size, bits of an element) of arrays of which no other one may be made."""
        indexes = set(self.donated) - set(self.may_be_copied)
        leaves = (leaf for index in indexes for leaf in jax.tree.leaves(self.arguments[index]))
        return {_key(leaf) for leaf in leaves if leaf.size > 1}

    def is_copy(self, shape: Shape) -> bool:
        """Whether an array of this shape may not be made."""
        key = (shape.size, shape.bits)
        is_weight = key in {_key(weight) for weight in self.weights}
        is_large = shape.bytes >= self.bound_bytes
        return key in self.uncopied or (not shape.is_on_chip and (is_weight or is_large))


def _key(x: jax.ShapeDtypeStruct) -> tuple[int, int]:
    return x.size, 8 * x.dtype.itemsize


def entries(chips: tuple[str, ...] = tuple(CHIPS)) -> Iterator[Entry]:
    """The whole matrix, and along with it, at one shape: the other page sizes, and window, soft cap and sinks."""
    for chip in chips:
        page = PAGE_TOKENS[CHIPS[chip].implementation]
        for operation, types in TYPES.items():
            for dtype in types:
                if dtype == "fp8" and CHIPS[chip].fp8 is None:
                    continue
                for head_dim in HEAD_DIMS:
                    for kv_heads in KV_HEADS:
                        yield Entry(
                            chip=chip,
                            operation=operation,
                            dtype=dtype,
                            head_dim=head_dim,
                            kv_heads=kv_heads,
                            page_tokens=page,
                        )
                if operation in ATTENTION:
                    yield from _variants(chip, operation, dtype, page)


def _variants(chip: str, operation: Operation, dtype: str, page: int) -> Iterator[Entry]:
    plain = Entry(chip=chip, operation=operation, dtype=dtype, head_dim=128, kv_heads=8, page_tokens=page)
    least = LEAST_PAGE_TOKENS.get((dtype, CHIPS[chip].implementation), 0)
    yield from (replace(plain, page_tokens=other) for other in OTHER_PAGE_TOKENS if other != page and other >= least)
    if operation is not Operation.WRITE:
        yield replace(plain, window=512, soft_cap=50.0, has_sinks=True)


def pool_dtype(entry: Entry) -> jnp.dtype:
    """The stored type of a pool. Raises: KeyError where the chip has no such type."""
    names = {"bf16": "bfloat16", "int8": "int8", "fp8": CHIPS[entry.chip].fp8}
    name = names[entry.dtype]
    if name is None:
        raise KeyError(f"{entry.chip} has no 8-bit float pages")
    return jnp.dtype(name)


def build(entry: Entry, kernels: Kernels | None = None) -> Built:
    """The call of an entry through the public functions. kernels: None for the chip's, with the blocks that they pick.

    Raises: UnsupportedCase when it is traced, not here.
    """
    makes = {Operation.QUANT: _quant, Operation.GROUPED: _grouped, Operation.WRITE: _write}
    return makes.get(entry.operation, _attention)(entry, kernels or entry.kernels)


def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def size_bytes(tree: Any) -> int:
    """Unpadded; 4-bit values count half a byte."""
    leaves = jax.tree.leaves(tree)
    return sum(x.size * (4 if x.dtype == jnp.int4 else 8 * x.dtype.itemsize) // 8 for x in leaves)


def pool(entry: Entry) -> KVPool:
    """Shapes of two layers: pages of ROWS sequences of the mean length, and the null page."""
    pages = ROWS * MEAN_TOKENS // entry.page_tokens + 1
    rows, dtype = LAYERS * pages, pool_dtype(entry)
    scale = array((rows, entry.kv_heads, 2, entry.page_tokens), jnp.float32) if is_quantized(dtype) else None
    return KVPool(array((rows, entry.kv_heads, entry.page_tokens, 2 * entry.head_dim), dtype), scale)


def meta(entry: Entry, rows: int, blocks: int) -> AttnMeta:
    sequences = rows + (SEGMENTS if blocks else 0)
    i32 = jnp.int32
    return AttnMeta(
        position_B=array((rows,), i32),
        page_table_ZM=array((sequences, MOST_TOKENS // entry.page_tokens), i32),
        kv_len_Z=array((sequences,), i32),
        blk_seq_J=array((blocks,), i32),
        blk_pos_J=array((blocks,), i32),
        blk_len_J=array((blocks,), i32),
    )


def tokens(entry: Entry, count: int) -> TokenKV:
    dtype = pool_dtype(entry)
    scale = array((count, entry.kv_heads, 2), jnp.float32) if is_quantized(dtype) else None
    return TokenKV(array((count, entry.kv_heads, 2 * entry.head_dim), dtype), scale)


def _attention(entry: Entry, kernels: Kernels) -> Built:
    is_decode = entry.operation is Operation.DECODE
    rows, blocks = (ROWS, 0) if is_decode else (0, BLOCKS)
    count = rows + blocks * BLOCK_TOKENS
    heads = entry.kv_heads * HEADS_PER_KV_HEAD
    spec = AttentionSpec(scale=entry.head_dim**-0.5, window=entry.window, soft_cap=entry.soft_cap)

    def call(q: Any, new: TokenKV, kv: KVPool, first_row: Any, batch: AttnMeta, sinks: Any) -> tuple[Any, KVPool]:
        return api.paged_attention(q, new, kv, first_row, batch, spec, sinks_N=sinks, kernels=kernels)

    kv = pool(entry)
    arguments = (
        array((count, heads, entry.head_dim), jnp.bfloat16),
        tokens(entry, count),
        kv,
        array((), jnp.int32),
        meta(entry, rows, blocks),
        array((heads,), jnp.float32) if entry.has_sinks else None,
    )
    return Built(
        function=call,
        arguments=arguments,
        donated=(2,),
        donated_bytes=size_bytes(kv),
        bound_bytes=size_bytes(kv) // LAYERS,
    )


def _write(entry: Entry, kernels: Kernels) -> Built:
    def call(new: TokenKV, kv: KVPool, first_row: Any, batch: AttnMeta) -> KVPool:
        return api.write_pages(new, kv, first_row, batch, kernels=kernels)

    kv = pool(entry)
    count = ROWS + BLOCKS * BLOCK_TOKENS
    return Built(
        function=call,
        arguments=(tokens(entry, count), kv, array((), jnp.int32), meta(entry, ROWS, BLOCKS)),
        donated=(1,),
        donated_bytes=size_bytes(kv),
        bound_bytes=size_bytes(kv) // LAYERS,
    )


def _quant(entry: Entry, kernels: Kernels) -> Built:
    columns = entry.kv_heads * entry.head_dim
    values = "int4" if entry.dtype.startswith("int4") else "int8"
    group = GROUP if entry.dtype.endswith("g32") else WIDTH
    weight = GroupQuant(array((WIDTH, columns), values), array((WIDTH // group, columns), jnp.bfloat16))

    def call(x: Any, weight: GroupQuant) -> Any:
        return api.quant_matmul(x, weight, kernels=kernels)

    x = array((PRODUCT_ROWS, WIDTH), jnp.bfloat16)
    return Built(
        function=call,
        arguments=(x, weight),
        donated=(),
        donated_bytes=0,
        bound_bytes=2 * WIDTH * columns,
        row_major=() if group == WIDTH else (weight.values_KN,),  # one scale per column is XLA's own product
    )


def _grouped(entry: Entry, kernels: Kernels) -> Built:
    columns = entry.kv_heads * entry.head_dim
    shape = (EXPERTS, WIDTH, columns)
    values = array(shape, jnp.int8 if entry.dtype == "int8" else jnp.bfloat16)
    weight: Any = values
    if entry.dtype == "int8":
        weight = GroupQuant(values, array((EXPERTS, 1, columns), jnp.bfloat16))

    def call(x: Any, weight: Any, sizes: Any, offset: Any) -> Any:
        return api.grouped_matmul(x, weight, sizes, group_offset=offset, kernels=kernels)

    i32 = jnp.int32
    x = array((ROWS * EXPERTS_OF_TOKEN, WIDTH), jnp.bfloat16)
    return Built(
        function=call,
        arguments=(x, weight, array((2 * EXPERTS,), i32), array((), i32)),
        donated=(),
        donated_bytes=0,
        bound_bytes=2 * EXPERTS * WIDTH * columns,
        row_major=(values,),
    )
