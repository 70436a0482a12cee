"""Attention of query blocks on TPU: an online softmax over keys and values that all come from the pool's pages.

The block's own tokens were written to the pool before. Blocks of pages are copied to VMEM while the blocks before them
are worked on, also across query blocks: the last one of a query block starts the first one of the next.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from headrace.pallas_kernels import block_sizes
from headrace.pallas_kernels.chips import CHIPS, MIB
from headrace.pallas_kernels.kv_quantization import is_quantized
from headrace.pallas_kernels.types import AttentionSpec, AttnMeta, Kernels, KVPool, UnsupportedCase

LANES = 128
LOWEST = -1e30
"""Start of the running maximum. Finite: the difference of two infinities would be NaN."""
TABLE_BYTES = MIB * 3 // 4
"""Largest page table: it lies in SMEM (1 MiB), beside the compiler's own scalars."""
LOG2_E = math.log2(math.e)

Refs = Sequence[jax.Ref]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillBlocks:
    """kv_tokens: keys of one iteration, whole pages, a multiple of 128 or fewer. kv_heads: key heads of one grid step.
    query_rows: rows (a query token of one head each) whose scores are worked on at once."""

    kv_tokens: int
    kv_heads: int
    query_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """Static numbers of one call. rows: query tokens of a block times query heads of a key head."""

    blocks: PrefillBlocks
    spec: AttentionSpec
    page_tokens: int
    block_tokens: int
    group: int
    max_pages: int
    head_dim: int
    has_scales: bool
    has_sinks: bool
    compute_dtype: jnp.dtype

    @property
    def rows(self) -> int:
        return self.group * self.block_tokens

    @property
    def kv_pages(self) -> int:
        return self.blocks.kv_tokens // self.page_tokens

    @property
    def shares_lanes(self) -> bool:
        """Key and value in one row of 128 lanes: queries are padded with zeros, and the result's first half is cut."""
        return 2 * self.head_dim == LANES

    @property
    def width(self) -> int:
        """Lanes of a query and of a result."""
        return LANES if self.shares_lanes else self.head_dim

    @property
    def score_factor(self) -> float:
        """What the product of a query and a stored key is multiplied by before the exponential's own factor."""
        if self.spec.soft_cap is not None:
            return self.spec.scale / self.spec.soft_cap
        return self.spec.scale * LOG2_E if self.has_scales else 1.0

    @property
    def exponent_factor(self) -> float:
        """Powers are of 2, which is what the hardware has; a factor on the scores then costs nothing."""
        if self.spec.soft_cap is not None:
            return self.spec.soft_cap * LOG2_E
        return 1.0 if self.has_scales else self.spec.scale * LOG2_E


def prefill(
    q_XNH: jax.Array,
    pool: KVPool,
    first_row: jax.Array | int,
    meta: AttnMeta,
    spec: AttentionSpec,
    sinks_N: jax.Array | None,
    kernels: Kernels,
) -> jax.Array:
    """Attention of the query blocks to what the pool holds of their sequences, their own tokens included.

    Args:
      q_XNH: queries of the query blocks alone, X = J * block tokens.
      Others: as ``headrace.pallas_kernels.api.paged_attention``.
    Returns: [X, N, H] in the type of q; zeros in padding blocks, finite in a block's padding.
    Raises: UnsupportedCase: see ``_shape``.
    """
    tokens, num_heads, head_dim = q_XNH.shape
    shape = _shape(q_XNH, pool, meta, spec, sinks_N is not None, kernels)
    num_blocks, num_kv_heads = meta.num_blocks, pool.num_kv_heads
    q = q_XNH.astype(shape.compute_dtype).reshape(num_blocks, shape.block_tokens, num_kv_heads, shape.group, head_dim)
    # All query heads of a key head are rows of one product, so that the matrix unit is full with 64 tokens already.
    q_JKXH = q.transpose(0, 2, 3, 1, 4).reshape(num_blocks, num_kv_heads, shape.rows, head_dim)
    q_JKXH = jnp.pad(q_JKXH, ((0, 0), (0, 0), (0, 0), (0, shape.width - head_dim)))
    operands = [q_JKXH]
    if sinks_N is not None:
        # In units of the running maximum.
        sink_KG1 = sinks_N.astype(jnp.float32).reshape(num_kv_heads, shape.group, 1) * (LOG2_E / shape.exponent_factor)
        operands.append(jnp.broadcast_to(sink_KG1, (num_kv_heads, shape.group, LANES)))
    out_JKXH = _call(shape, operands, jax.tree.leaves(pool), _scalars(first_row, meta), q_XNH.dtype, kernels)
    out = out_JKXH[..., shape.width - head_dim :]
    out = out.reshape(num_blocks, num_kv_heads, shape.group, shape.block_tokens, head_dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(tokens, num_heads, head_dim)


def _scalars(first_row: jax.Array | int, meta: AttnMeta) -> list[jax.Array]:
    """Only the table rows of prefill segments: SMEM is small."""
    rows = meta.num_decode_rows
    return [
        meta.page_table_ZM[rows:].reshape(-1),
        jnp.asarray(first_row, jnp.int32).reshape(1),
        meta.blk_seq_J - rows,
        meta.blk_pos_J,
        meta.blk_len_J,
    ]


def _shape(
    q_XNH: jax.Array, pool: KVPool, meta: AttnMeta, spec: AttentionSpec, has_sinks: bool, kernels: Kernels
) -> _Shape:
    tokens, num_heads, head_dim = q_XNH.shape
    dtype, page_tokens = pool.pages_RKWC.dtype, pool.page_tokens
    if kernels.chip is None:
        raise UnsupportedCase("TPU kernels need the name of a chip: block sizes follow from its VMEM")
    chip = CHIPS[kernels.chip]
    if dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2) and chip.fp8 != dtype:
        raise UnsupportedCase(f"pages of {dtype} on {chip.name}, whose 8-bit float type is {chip.fp8}")
    if head_dim != 64 and head_dim % LANES:
        raise UnsupportedCase(f"heads of {head_dim}: keys and values are cut at {LANES} lanes; 64, 128, 256 can be")
    if page_tokens % 16 or page_tokens > LANES:
        raise UnsupportedCase(f"pages of {page_tokens} tokens; TPU kernels have 16 to {LANES}, in steps of 16")
    block_tokens = meta.block_tokens(tokens + meta.num_decode_rows)
    if block_tokens % page_tokens:
        raise UnsupportedCase(f"query blocks of {block_tokens} tokens are no whole pages of {page_tokens}")
    segments, max_pages = meta.page_table_ZM.shape[0] - meta.num_decode_rows, meta.page_table_ZM.shape[1]
    if 4 * segments * max_pages > TABLE_BYTES:
        limit = f"{TABLE_BYTES} bytes of SMEM"
        raise UnsupportedCase(f"a table of {segments} segments of {max_pages} pages is larger than {limit}")
    compute_dtype = jnp.float32 if dtype == jnp.float32 else jnp.bfloat16
    make = functools.partial(
        _Shape,
        spec=spec,
        page_tokens=page_tokens,
        block_tokens=block_tokens,
        group=num_heads // pool.num_kv_heads,
        max_pages=max_pages,
        head_dim=head_dim,
        has_scales=is_quantized(dtype),
        has_sinks=has_sinks,
        compute_dtype=jnp.dtype(compute_dtype),
    )
    key = f"{dtype} N{num_heads} K{pool.num_kv_heads} H{head_dim} W{page_tokens} block{block_tokens}"

    def heuristic() -> PrefillBlocks:
        return _heuristic(make, pool, q_XNH.dtype, chip.on_chip_bytes)

    shape = make(blocks=block_sizes.pick(kernels, PrefillBlocks, "paged_attention.prefill", key, heuristic))
    _check_blocks(shape, pool, q_XNH.dtype, chip.on_chip_bytes)
    return shape


def _heuristic(make: Callable[..., _Shape], pool: KVPool, q_dtype: jnp.dtype, on_chip_bytes: int) -> PrefillBlocks:
    """512 keys: a row's scores are rescaled once per iteration, and 512 keys of 8 heads are 1 us of HBM on v6e, more
    than a copy's latency. All heads that fit, since one page of all heads is one copy."""
    kv_tokens = max(512 // pool.page_tokens, 1) * pool.page_tokens
    heads = [n for n in range(1, pool.num_kv_heads + 1) if pool.num_kv_heads % n == 0]
    shape = make(blocks=PrefillBlocks(kv_tokens=kv_tokens, kv_heads=1, query_rows=1))
    rows = max(n for n in range(16, min(shape.rows, 256) + 1, 16) if shape.rows % n == 0)
    fitting = [1]
    for count in heads:
        blocks = PrefillBlocks(kv_tokens=kv_tokens, kv_heads=count, query_rows=rows)
        if _vmem_bytes(make(blocks=blocks), pool, q_dtype) <= on_chip_bytes // 2:
            fitting.append(count)
    return PrefillBlocks(kv_tokens=kv_tokens, kv_heads=max(fitting), query_rows=rows)


def _vmem_bytes(shape: _Shape, pool: KVPool, q_dtype: jnp.dtype) -> int:
    """Scratch and pipelined blocks, as laid out; a row of scores takes three passes through VMEM."""
    blocks, pages = shape.blocks, pool.pages_RKWC
    per_row = 2 * shape.width * (shape.compute_dtype.itemsize + q_dtype.itemsize) + 4 * (2 * LANES + shape.width)
    keys = 2 * blocks.kv_tokens * pages.shape[3] * pages.dtype.itemsize
    scales = 2 * shape.kv_pages * 2 * LANES * 4 if shape.has_scales else 0
    scores = 3 * 4 * blocks.query_rows * max(blocks.kv_tokens, LANES)
    return blocks.kv_heads * (shape.rows * per_row + keys + scales) + scores


def _check_blocks(shape: _Shape, pool: KVPool, q_dtype: jnp.dtype, on_chip_bytes: int) -> None:
    blocks = shape.blocks
    if blocks.kv_tokens % shape.page_tokens or (blocks.kv_tokens > LANES and blocks.kv_tokens % LANES):
        raise UnsupportedCase(f"{blocks} for pages of {shape.page_tokens}: kv_tokens are whole pages, and n * {LANES}")
    if pool.num_kv_heads % blocks.kv_heads or shape.rows % blocks.query_rows or blocks.query_rows % 16:
        raise UnsupportedCase(f"{blocks} does not divide {pool.num_kv_heads} heads of {shape.rows} rows")
    need, limit = _vmem_bytes(shape, pool, q_dtype), on_chip_bytes * 3 // 4
    if need > limit:
        raise UnsupportedCase(f"{blocks} with {shape.rows} rows needs {need} of {limit} bytes of VMEM")


def _call(
    shape: _Shape,
    operands: list[jax.Array],
    pool: list[jax.Array],
    scalars: list[jax.Array],
    out_dtype: jnp.dtype,
    kernels: Kernels,
) -> jax.Array:
    num_blocks, num_kv_heads, rows, width = operands[0].shape
    heads, pages = shape.blocks.kv_heads, shape.kv_pages

    def query_index(head: jax.Array, block: jax.Array, *scalars: jax.Ref) -> tuple[jax.Array | int, ...]:
        # The queries of padding blocks are not fetched: they all name the same block.
        return jnp.where(scalars[-1][block] > 0, block, 0), head, 0, 0

    in_specs = [pl.BlockSpec((1, heads, rows, width), query_index)]
    if shape.has_sinks:
        in_specs.append(pl.BlockSpec((heads, shape.group, LANES), lambda head, *_: (head, 0, 0)))
    buffers = [pltpu.VMEM((2, pages, heads, *leaf.shape[2:]), leaf.dtype) for leaf in pool]
    statistics = pltpu.VMEM((heads, rows, LANES), jnp.float32)
    return pl.pallas_call(
        functools.partial(_kernel, shape=shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(num_kv_heads // heads, num_blocks),
            in_specs=[*in_specs, *[pl.BlockSpec(memory_space=pl.ANY)] * len(pool)],
            out_specs=pl.BlockSpec((1, heads, rows, width), lambda head, block, *_: (block, head, 0, 0)),
            scratch_shapes=[
                *buffers,
                statistics,
                statistics,
                pltpu.VMEM((heads, rows, width), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2, len(pool))),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((num_blocks, num_kv_heads, rows, width), out_dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=CHIPS[kernels.chip].on_chip_bytes * 3 // 4,
            disable_bounds_checks=True,
        ),
        interpret=kernels.interpret,
        name="prefill",
    )(*scalars, *operands, *pool)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Keys:
    """Blocks of keys of each query block, and their way to VMEM."""

    shape: _Shape
    scalars: Refs
    pool: Refs
    buffers: Refs
    sems: jax.Ref
    first_head: jax.Array

    def tokens(self, block: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First and end position of what the query block sees; equal for a padding block."""
        pos, length = self.scalars[3][block], self.scalars[4][block]
        window = self.shape.spec.window
        first = 0 if window is None else jnp.maximum(pos + 1 - window, 0)
        return jnp.where(length > 0, first, 0), jnp.where(length > 0, pos + length, 0)

    def span(self, block: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First and end block of keys."""
        first, end = self.tokens(block)
        return first // self.shape.blocks.kv_tokens, pl.cdiv(end, self.shape.blocks.kv_tokens)

    def each_copy(self, block: jax.Array, index: jax.Array, slot: jax.Array, action: Callable[..., None]) -> None:
        """Do something with the copy of each page that holds a key in sight."""
        page_tokens, count = self.shape.page_tokens, self.shape.kv_pages
        table, first_row, seq_J = self.scalars[:3]
        first, end = self.tokens(block)
        base = index * count
        heads = pl.ds(self.first_head, self.shape.blocks.kv_heads)

        @pl.loop(jnp.maximum(base, first // page_tokens), jnp.minimum(base + count, pl.cdiv(end, page_tokens)))
        def _(page: jax.Array) -> None:
            row = first_row[0] + table[seq_J[block] * self.shape.max_pages + page]
            for i, (pool, buffer) in enumerate(zip(self.pool, self.buffers, strict=True)):
                action(pltpu.make_async_copy(pool.at[row, heads], buffer.at[slot, page - base], self.sems.at[slot, i]))

    def start(self, block: jax.Array, index: jax.Array, slot: jax.Array) -> None:
        self.each_copy(block, index, slot, lambda copy: copy.start())

    def start_first(self, block: jax.Array, slot: jax.Array) -> None:
        """Start the first block of keys of a query block, if there is one."""
        clamped = jnp.minimum(block, pl.num_programs(1) - 1)
        index, end = self.span(clamped)
        pl.when((block < pl.num_programs(1)) & (index < end))(lambda: self.start(clamped, index, slot))

    def wait(self, block: jax.Array, index: jax.Array, slot: jax.Array) -> None:
        self.each_copy(block, index, slot, lambda copy: copy.wait())


def other_slot(slot: jax.Array) -> jax.Array:
    """The buffer that the next block of keys goes to."""
    return 1 - slot


def take_block(keys: _Keys, block: jax.Array, index: jax.Array, end: jax.Array, slot_ref: jax.Ref) -> jax.Array:
    """Start the next block of keys, of this or of the next query block, and wait for this one. Returns its slot."""
    slot = slot_ref[0]
    is_last = index + 1 == end
    pl.when(is_last)(lambda: keys.start_first(block + 1, other_slot(slot)))
    pl.when(jnp.logical_not(is_last))(lambda: keys.start(block, index + 1, other_slot(slot)))
    slot_ref[0] = other_slot(slot)
    keys.wait(block, index, slot)
    return slot


def _kernel(*refs: jax.Ref, shape: _Shape) -> None:
    refs = list(refs)
    scalars, refs = refs[:5], refs[5:]
    q, sinks, refs = refs[0], refs[1] if shape.has_sinks else None, refs[1 + shape.has_sinks :]
    pools = 1 + shape.has_scales
    pool, out, buffers = refs[:pools], refs[pools], refs[pools + 1 : 2 * pools + 1]
    top, total, acc, slot_ref, sems = refs[2 * pools + 1 :]
    block = pl.program_id(1)
    keys = _Keys(
        shape=shape,
        scalars=scalars,
        pool=pool,
        buffers=buffers,
        sems=sems,
        first_head=pl.program_id(0) * shape.blocks.kv_heads,
    )
    begin, end = keys.span(block)

    @pl.when(block == 0)
    def _() -> None:
        # Per group of heads: on v5p each of its two cores takes some, with a scratch of its own.
        slot_ref[0] = 0
        keys.start_first(block, 0)

    @pl.when(begin == end)
    def _() -> None:
        keys.start_first(block + 1, slot_ref[0])
        out[...] = jnp.zeros_like(out)

    @pl.when(begin < end)
    def _() -> None:
        _reset(shape, sinks, top, total, acc)
        pos, length = scalars[3][block], scalars[4][block]
        bounds = keys.tokens(block)

        def attend(index: jax.Array, _: None, is_masked: bool) -> None:
            slot = take_block(keys, block, index, end, slot_ref)
            _attend(shape, q, buffers, (top, total, acc), slot, index, (pos, length, *bounds), is_masked)

        # Every row of the query block sees all keys of the blocks in the middle.
        kv_tokens = shape.blocks.kv_tokens
        seen_by_all = 0 if shape.spec.window is None else jnp.maximum(pos + length - shape.spec.window, 0)
        middle = jnp.clip(pl.cdiv(seen_by_all, kv_tokens), begin, end)
        tail = jnp.clip((pos + 1) // kv_tokens, middle, end)
        if shape.spec.window is not None:
            lax.fori_loop(begin, middle, functools.partial(attend, is_masked=True), None)
        lax.fori_loop(middle, tail, functools.partial(attend, is_masked=False), None)
        lax.fori_loop(tail, end, functools.partial(attend, is_masked=True), None)

        @pl.loop(0, shape.blocks.kv_heads)
        def _(head: jax.Array) -> None:
            out[0, head] = (acc[head] / _lanes(total[head], shape.width)).astype(out.dtype)


def _reset(shape: _Shape, sinks: jax.Ref | None, top: jax.Ref, total: jax.Ref, acc: jax.Ref) -> None:
    acc[...] = jnp.zeros_like(acc)
    if sinks is None:
        top[...] = jnp.full_like(top, LOWEST)
        total[...] = jnp.zeros_like(total)
        return
    total[...] = jnp.ones_like(total)
    for head in range(shape.blocks.kv_heads):
        for member in range(shape.group):
            rows = pl.ds(member * shape.block_tokens, shape.block_tokens)
            top[head, rows] = jnp.broadcast_to(sinks[head, member : member + 1], (shape.block_tokens, LANES))


def _lanes(value_XL: jax.Array, width: int) -> jax.Array:
    """A value that is the same in all 128 lanes, in as many as asked for."""
    return value_XL[:, :width] if width <= LANES else jnp.tile(value_XL, (1, width // LANES))


def _attend(
    shape: _Shape,
    q: jax.Ref,
    buffers: Refs,
    state: Refs,
    slot: jax.Array,
    index: jax.Array,
    bounds: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    is_masked: bool,
) -> None:
    """One block of keys joins the softmax of every row."""
    blocks = shape.blocks
    pos, length, first, end = bounds
    key_base = index * blocks.kv_tokens

    @pl.loop(0, blocks.kv_heads)
    def _(head: jax.Array) -> None:
        kv_YC = buffers[0][slot, :, head].astype(shape.compute_dtype).reshape(blocks.kv_tokens, -1)
        scales = _scales(shape, buffers[1], slot, head) if shape.has_scales else None
        if is_masked:
            # Values outside may be NaN (a page's last tenant), and 0 * NaN is not 0. Integers cannot.
            if buffers[0].dtype != jnp.int8:
                key_YC = key_base + lax.broadcasted_iota(jnp.int32, kv_YC.shape, 0)
                kv_YC = jnp.where((key_YC >= first) & (key_YC < end), kv_YC, 0)
            if scales is not None:
                key_1Y = key_base + lax.broadcasted_iota(jnp.int32, (1, blocks.kv_tokens), 1)
                is_live = (key_1Y >= first) & (key_1Y < end)
                scales = tuple(jnp.where(is_live, scale, 0) for scale in scales)
        k_YC, v_YC = (kv_YC, kv_YC) if shape.shares_lanes else (kv_YC[:, : shape.head_dim], kv_YC[:, shape.head_dim :])

        @pl.loop(0, shape.rows // blocks.query_rows)
        def _(chunk: jax.Array) -> None:
            rows = pl.ds(pl.multiple_of(chunk * blocks.query_rows, 16), blocks.query_rows)
            is_seen = None
            if is_masked:
                row = chunk * blocks.query_rows + lax.broadcasted_iota(jnp.int32, (blocks.query_rows, 1), 0)
                # Padding tokens see what the last real token sees.
                seen_end = pos + jnp.minimum(lax.rem(row, shape.block_tokens) + 1, length)
                key = key_base + lax.broadcasted_iota(jnp.int32, (blocks.query_rows, blocks.kv_tokens), 1)
                is_seen = key < seen_end
                if shape.spec.window is not None:
                    is_seen &= key >= seen_end - shape.spec.window
            refs = tuple(ref.at[head, rows] for ref in state)
            _update(shape, q[0, head, rows], k_YC, v_YC, scales, is_seen, refs)


def _scales(shape: _Shape, buffer: jax.Ref, slot: jax.Array, head: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Factors of keys and of values of one head, [1, Y] each."""
    key, value = (
        jnp.concatenate([buffer[slot, page, head, half : half + 1] for page in range(shape.kv_pages)], axis=1)
        for half in range(2)
    )
    return key, value


def _update(
    shape: _Shape,
    q_XH: jax.Array,
    k_YH: jax.Array,
    v_YH: jax.Array,
    scales: tuple[jax.Array, jax.Array] | None,
    is_seen: jax.Array | None,
    state: tuple[jax.Ref, jax.Ref, jax.Ref],
) -> None:
    top, total, acc = state
    precision = lax.Precision.HIGHEST if shape.compute_dtype == jnp.float32 else None
    score = lax.dot_general(
        q_XH, k_YH, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    if scales is not None:
        score = score * (scales[0] * shape.score_factor)
    elif shape.score_factor != 1:
        score = score * shape.score_factor
    if shape.spec.soft_cap is not None:
        score = jnp.tanh(score)
    if is_seen is not None:
        score = jnp.where(is_seen, score, -jnp.inf)
    old_top = top[...]
    new_top = jnp.maximum(old_top, score.max(axis=1, keepdims=True))
    weight = jnp.exp2((score - _lanes(new_top, score.shape[1])) * shape.exponent_factor)
    factor = jnp.exp2((old_top - new_top) * shape.exponent_factor)
    top[...] = new_top
    total[...] = total[...] * factor + weight.sum(axis=1, keepdims=True)
    if scales is not None:
        weight = weight * scales[1]
    value = lax.dot_general(
        weight.astype(shape.compute_dtype),
        v_YH,
        (((1,), (0,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    acc[...] = acc[...] * _lanes(factor, shape.width) + value
