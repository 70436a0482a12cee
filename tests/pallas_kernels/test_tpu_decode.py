"""TPU decode in the TPU interpreter, which looks for races, fills memory with NaN and refuses to read outside."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.pallas_kernels import api
from headrace.pallas_kernels.paged_attention.cases import GEMMA_3_270M, SMOLLM2, AttentionCase
from headrace.pallas_kernels.paged_attention.decode_blocks import (
    DecodeBlocks,
    decode_shape,
    decode_trips,
    heads_at_once,
    pick_blocks,
)
from headrace.pallas_kernels.paged_attention.decode_work import list_work
from headrace.pallas_kernels.paged_attention.inputs import (
    AttentionInputs,
    expected,
    make_inputs,
    poisoned,
    stored_after,
)
from headrace.pallas_kernels.tolerances import relative_error, tolerance
from headrace.pallas_kernels.types import AttnMeta, Implementation, Kernels, KVPool, UnsupportedCase
from tests.pallas_kernels import interpreter

pytestmark = pytest.mark.usefixtures("quick_compiles")

STRICT = interpreter.parameters()
LLAMA_LIKE = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "page_tokens": 32}
CASES = (
    AttentionCase(name="page borders", **SMOLLM2, decode_lens=(1, 16, 17, 0, 33, 65)),
    AttentionCase(name="no live row", **SMOLLM2, decode_lens=(0,)),
    AttentionCase(name="shared pages", **SMOLLM2, decode_lens=(50, 33), shared_pages=2),
    AttentionCase(name="window edges", **GEMMA_3_270M, window=32, decode_lens=(1, 32, 33, 34, 48, 80)),
    AttentionCase(name="window of one token", **SMOLLM2, window=1, decode_lens=(1, 18)),
    AttentionCase(
        name="window, cap and sinks",
        num_heads=16,
        num_kv_heads=8,
        head_dim=64,
        page_tokens=16,
        soft_cap=5.0,
        window=20,
        has_sinks=True,
        decode_lens=(30, 1, 0, 16),
    ),
    *(
        AttentionCase(name=f"llama, {kv_dtype}", **LLAMA_LIKE, kv_dtype=kv_dtype, decode_lens=(0, 1, 32, 33, 100))
        for kv_dtype in ("bfloat16", "int8", "float8_e5m2", "float8_e4m3fn")
    ),
    *(
        AttentionCase(
            name=f"three heads of 64, window, {kv_dtype}",
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            page_tokens=32,
            window=40,
            q_dtype="bfloat16",
            kv_dtype=kv_dtype,
            has_sinks=True,
            decode_lens=(41, 97),
        )
        for kv_dtype in ("int8", "float8_e5m2")
    ),
    AttentionCase(
        name="pages of 128",
        num_heads=2,
        num_kv_heads=1,
        head_dim=256,
        page_tokens=128,
        kv_dtype="int8",
        decode_lens=(129, 300),
    ),
)
PIECES = AttentionCase(
    name="pieces of heads",
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    page_tokens=32,
    window=40,
    soft_cap=5.0,
    kv_dtype="int8",
    has_sinks=True,
    decode_lens=(41, 97),
)
BLOCKS = DecodeBlocks(block_pages=2, group=2)


@functools.cache
def _run(kernels: Kernels):
    return jax.jit(functools.partial(api.paged_attention, kernels=kernels), static_argnames="spec")


def kernels(blocks: DecodeBlocks | None = BLOCKS, interpret: object = STRICT, chip: str | None = "v6e") -> Kernels:
    explicit = () if blocks is None else (blocks,)
    return Kernels(implementation=Implementation.TPU, chip=chip, interpret=interpret, blocks=explicit)


def attend(inputs: AttentionInputs, pool: KVPool, with_kernels: Kernels) -> tuple[np.ndarray, KVPool]:
    arguments = replace(inputs, pool=pool).arguments()
    run = _run(with_kernels)
    if with_kernels.interpret is True:
        return jax.tree.map(np.asarray, run(*arguments, sinks_N=inputs.sinks_N))
    return interpreter.run_without_race(run, *arguments, sinks_N=inputs.sinks_N)


def check(case: AttentionCase, with_kernels: Kernels) -> None:
    inputs = make_inputs(case, seed=3)
    before = poisoned(case, inputs)
    out, pool = attend(inputs, before, with_kernels)
    assert out.dtype == case.q_dtype
    bound = tolerance(jnp.float32 if case.kv_dtype == case.q_dtype == "float32" else jnp.bfloat16)
    live = [token for token, _, _ in inputs.batch.rows]
    assert relative_error(out[live], expected(case, inputs)) < bound
    padding = sorted(set(range(len(out))) - set(live))
    np.testing.assert_array_equal(out[padding].astype(np.float32), 0)
    check_pool(case, inputs, before, pool)


def check_pool(case: AttentionCase, inputs: AttentionInputs, before: KVPool, pool: KVPool) -> None:
    """Bit for bit what it was, with this step's tokens in it."""
    after = stored_after(case, replace(inputs, pool=before))

    def bits(array: np.ndarray) -> np.ndarray:
        return np.asarray(array).view(f"u{array.dtype.itemsize}")

    np.testing.assert_array_equal(bits(pool.pages_RKWC), bits(after.pages_RKWC))
    if after.scale_RK2W is not None:
        np.testing.assert_array_equal(bits(pool.scale_RK2W), bits(after.scale_RK2W))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_dense_attention_and_stores_the_tokens(case: AttentionCase) -> None:
    check(case, kernels(chip="tpu7x" if case.kv_dtype == "float8_e4m3fn" else "v6e"))


@pytest.mark.parametrize(("rows", "heads"), [(8, 2), (16, 4), (1, 2)])
def test_pieces_of_heads(rows: int, heads: int) -> None:
    """Few rows cut the key heads into pieces, whose query heads still fill whole registers."""
    blocks = replace(BLOCKS, rows=rows)
    inputs = make_inputs(PIECES, seed=3)
    shape = decode_shape(2, 4, PIECES.num_heads, jnp.bfloat16, inputs.pool)
    assert heads_at_once(shape, blocks) == heads
    if rows != 1:
        check(PIECES, kernels(blocks))


def test_mixed_batch() -> None:
    """Query blocks are written, decode rows written and attended, query blocks attended: one pool through all."""
    case = AttentionCase(name="mixed", **SMOLLM2, decode_lens=(20, 0, 33), segments=((16, 20),), padding_blocks=1)
    inputs = make_inputs(case, seed=3)
    out, _ = attend(inputs, poisoned(case, inputs), kernels())
    live = [token for token, _, _ in inputs.batch.rows]
    assert relative_error(out[live], expected(case, inputs)) < tolerance(jnp.float32)
    assert np.isfinite(out).all()


def test_plain_interpreter() -> None:
    """How a whole model is served without a TPU. With the heuristic's block sizes, which the strict cases are too short
    for."""
    check(CASES[0], kernels(blocks=None, interpret=True))


class TestBatchMates:
    case = AttentionCase(name="mates", **SMOLLM2, kv_dtype="bfloat16", decode_lens=(64, 20, 35, 0, 1, 40))
    kernels = kernels(replace(BLOCKS, slots=3))

    def test_a_row_is_bit_equal_in_every_place(self) -> None:
        """Its place decides its group, the slots of its blocks, and what those slots held before."""
        inputs = make_inputs(self.case, seed=3)
        full, _ = attend(inputs, inputs.pool, self.kernels)
        order, meta = np.array([3, 5, 1, 0, 4, 2]), inputs.batch.meta
        moved = meta.replace(
            position_B=meta.position_B[order],
            page_table_ZM=meta.page_table_ZM[order],
            kv_len_Z=meta.kv_len_Z[order],
        )
        moved_inputs = replace(
            inputs,
            q_TNH=inputs.q_TNH[order],
            new=jax.tree.map(lambda x: x[order], inputs.new),
            batch=replace(inputs.batch, meta=moved),
        )
        out, _ = attend(moved_inputs, inputs.pool, self.kernels)
        np.testing.assert_array_equal(out, full[order])

    def test_nan_of_one_sequence_stays_there(self) -> None:
        """Its pages fill slots that shorter sequences use in part, later."""
        inputs = make_inputs(self.case, seed=3)
        pages = np.array(inputs.pool.pages_RKWC)
        pages[inputs.first_row + inputs.batch.meta.page_table_ZM[0, :4]] = np.nan
        clean, _ = attend(inputs, inputs.pool, self.kernels)
        out, _ = attend(inputs, KVPool(pages), self.kernels)
        assert np.isnan(out[0]).any()
        np.testing.assert_array_equal(out[1:], clean[1:])


@pytest.mark.parametrize("window", [None, 1, 100, 300])
def test_trips_are_what_the_work_list_holds(window: int | None) -> None:
    """The cost model counts by decode_trips; the kernel's loops run by list_work."""
    blocks, page_tokens = DecodeBlocks(block_pages=4, group=8), 32
    lens = np.random.default_rng(4).integers(0, 600, 30).astype(np.int32)
    meta = AttnMeta(
        position_B=np.maximum(lens - 1, 0),
        page_table_ZM=np.zeros((30, 19), np.int32),
        kv_len_Z=lens,
        **dict.fromkeys(("blk_seq_J", "blk_pos_J", "blk_len_J"), np.zeros(0, np.int32)),
    )
    pool = KVPool(jax.ShapeDtypeStruct((40, 2, page_tokens, 256), jnp.bfloat16))
    shape = decode_shape(30, 19, 4, jnp.bfloat16, pool)
    work = list_work(meta, 20, shape, blocks, window)
    trips = decode_trips(lens.tolist(), page_tokens, blocks, window)
    assert trips.groups == len(work.group_start) - 1 == 4
    assert trips.items == work.group_start[-1]
    assert trips.tokens == (lens > 0).sum()
    pages = set()
    for item in range(trips.items):
        sequence, block = int(work.item_seq[item]), int(work.item_block[item])
        first = 0 if window is None else max(lens[sequence] - window, 0)
        held = range(first // page_tokens, -(-(lens[sequence] - 1) // page_tokens))
        of_block = set(held) & set(range(block * 4, block * 4 + 4))
        assert of_block
        pages |= {(sequence, page) for page in of_block}
    assert trips.pages == len(pages)


def refusal(with_kernels: Kernels, table_pages: int = 8, **changes: object) -> str:
    """Why a call of these shapes cannot run."""
    case = AttentionCase(**{"name": "refused", **LLAMA_LIKE, "decode_lens": (9,) * 64, **changes})
    dtype = jnp.dtype(case.kv_dtype)
    pool = KVPool(jax.ShapeDtypeStruct((9, case.num_kv_heads, case.page_tokens, 2 * case.head_dim), dtype))
    with pytest.raises(UnsupportedCase) as error:
        pick_blocks(decode_shape(64, table_pages, case.num_heads, jnp.bfloat16, pool), with_kernels)
    return error.value.why


class TestRefusals:
    def test_heads_that_fill_no_lanes(self) -> None:
        assert "heads of 80" in refusal(kernels(), head_dim=80)

    @pytest.mark.parametrize(("kv_dtype", "page_tokens"), [("float32", 12), ("bfloat16", 24), ("int8", 16)])
    def test_pages_that_are_no_whole_tiles(self, kv_dtype: str, page_tokens: int) -> None:
        assert f"pages of {page_tokens} tokens of {kv_dtype}" in refusal(
            kernels(), kv_dtype=kv_dtype, page_tokens=page_tokens
        )

    def test_a_table_over_scalar_memory(self) -> None:
        assert "64 x 8192 takes" in refusal(kernels(blocks=None), table_pages=8192)

    def test_blocks_over_vmem(self) -> None:
        big = DecodeBlocks(block_pages=2048)
        assert "tpu7x has 67108864" in refusal(kernels(big, chip="tpu7x"), num_kv_heads=8, kv_dtype="bfloat16")

    def test_8_bit_floats_that_the_chip_does_not_store(self) -> None:
        assert "float8_e5m2 on v5e" in refusal(kernels(chip="v5e"), kv_dtype="float8_e5m2")
        assert "float8_e4m3fn on v6e" in refusal(kernels(), kv_dtype="float8_e4m3fn")

    @pytest.mark.parametrize("chip", [None, "h100"])
    def test_no_tpu(self, chip: str | None) -> None:
        assert f"the chip is {chip}" in refusal(kernels(chip=chip))

    def test_one_slot(self) -> None:
        assert "slots >= 2" in refusal(kernels(replace(BLOCKS, slots=1)))
