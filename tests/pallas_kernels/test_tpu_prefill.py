import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.pallas_kernels.chips import CHIPS
from headrace.pallas_kernels.paged_attention.cases import AttentionCase
from headrace.pallas_kernels.paged_attention.inputs import AttentionInputs, expected, make_inputs, poisoned
from headrace.pallas_kernels.paged_attention.tpu_prefill import prefill
from headrace.pallas_kernels.paged_attention.tpu_prefill_shape import PrefillBlocks
from headrace.pallas_kernels.tolerances import relative_error, tolerance
from headrace.pallas_kernels.types import (
    AttentionSpec,
    AttnMeta,
    Implementation,
    Kernels,
    KVPool,
    UnsupportedCase,
)
from headrace.pallas_kernels.write_pages.tpu import write_blocks
from tests.pallas_kernels import interpreter

pytestmark = pytest.mark.usefixtures("quick_compiles")

SMALL = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_tokens": 16, "block_tokens": 32}
BORDERS = ((0, 1), (0, 15), (0, 16), (0, 17), (16, 1), (32, 32), (48, 33), (96, 20))
"""One token; a page and one more or less; a first, a middle and a last block of keys; a last page that is not full."""

CASES = (
    AttentionCase(name="every border", **SMALL, segments=BORDERS, padding_blocks=2),
    AttentionCase(
        name="shared pages behind decode rows",
        **SMALL,
        decode_lens=(5, 0),
        segments=((64, 40), (64, 3)),
        shared_pages=4,
        kv_dtype="bfloat16",
    ),
    AttentionCase(
        name="window edges and sinks",
        **SMALL,
        window=20,
        has_sinks=True,
        segments=((0, 65), (16, 32), (96, 33)),
        padding_blocks=1,
    ),
    AttentionCase(name="window of a page, int8", **SMALL, window=16, segments=((0, 65), (96, 33)), kv_dtype="int8"),
    AttentionCase(
        name="soft cap, window, e5m2", **SMALL, window=40, soft_cap=3.0, segments=((96, 33),), kv_dtype="float8_e5m2"
    ),
    AttentionCase(name="sinks, e4m3", **SMALL, has_sinks=True, segments=((0, 40), (48, 1)), kv_dtype="float8_e4m3fn"),
    AttentionCase(
        name="soft cap, one key head of 256",
        **(SMALL | {"num_heads": 3, "num_kv_heads": 1, "head_dim": 256, "page_tokens": 32}),
        soft_cap=2.0,
        segments=((0, 40), (64, 64)),
    ),
    AttentionCase(
        name="many key heads, int8",
        **(SMALL | {"num_heads": 6, "num_kv_heads": 6, "head_dim": 128}),
        segments=((32, 40),),
        kv_dtype="int8",
    ),
    AttentionCase(
        name="long pages, bfloat16 queries",
        **(SMALL | {"page_tokens": 128, "block_tokens": 128}),
        segments=((0, 130), (128, 5)),
        kv_dtype="int8",
        q_dtype="bfloat16",
    ),
)


def kernels_for(case: AttentionCase, blocks: PrefillBlocks | None = None, **interpret: object) -> Kernels:
    """Two iterations of keys at least, two groups of rows of each head, all heads at once."""
    rows = case.num_heads // case.num_kv_heads * case.block_tokens
    blocks = blocks or PrefillBlocks(
        kv_tokens=max(32, case.page_tokens), kv_heads=case.num_kv_heads, query_rows=rows // 2
    )
    chip = next((name for name in ("v6e", "tpu7x") if CHIPS[name].fp8 == case.kv_dtype), "v6e")
    return Kernels(
        implementation=Implementation.TPU,
        chip=chip,
        interpret=interpreter.parameters(**interpret),
        blocks=(blocks,),
    )


def write_and_attend(case: AttentionCase, inputs: AttentionInputs, kernels: Kernels) -> Callable[[KVPool], jax.Array]:
    rows = len(case.decode_lens)

    def of_pool(pool: KVPool) -> jax.Array:
        meta = jax.tree.map(jnp.asarray, inputs.batch.meta)
        pool = write_blocks(inputs.new.rows(rows), pool, inputs.first_row, meta, kernels)
        return prefill(inputs.q_TNH[rows:], pool, inputs.first_row, meta, inputs.spec, inputs.sinks_N, kernels)

    return jax.jit(of_pool)


def error_of(case: AttentionCase, inputs: AttentionInputs, out_XNH: np.ndarray) -> float:
    rows = len(case.decode_lens)
    tokens = [(index, token - rows) for index, (token, _, _) in enumerate(inputs.batch.rows) if token >= rows]
    indices, places = zip(*tokens, strict=True)
    return relative_error(out_XNH[list(places)], expected(case, inputs)[list(indices)])


def tolerance_of(case: AttentionCase) -> float:
    return tolerance(jnp.float32 if case.kv_dtype == "float32" else jnp.bfloat16)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_dense_attention_whatever_lies_elsewhere(case: AttentionCase) -> None:
    """One program, run twice: with NaN in every place that no earlier step wrote, and with numbers there."""
    inputs = make_inputs(case, seed=3)
    attend = write_and_attend(case, inputs, kernels_for(case))
    dirty = interpreter.run_without_race(attend, poisoned(case, inputs))
    assert dirty.dtype == case.q_dtype
    assert error_of(case, inputs, dirty) < tolerance_of(case)
    assert np.isfinite(dirty).all()
    padding = case.padding_blocks * case.block_tokens
    assert (dirty[len(dirty) - padding :] == 0).all()
    np.testing.assert_array_equal(dirty, interpreter.run_without_race(attend, inputs.pool))


def test_plain_interpreter() -> None:
    """How a whole model is served without a TPU: a layer's pool is what a loop over layers carries."""
    case = replace(CASES[0], segments=((0, 17), (48, 33)), padding_blocks=1)
    inputs = make_inputs(case, seed=3)
    attend = write_and_attend(case, inputs, replace(kernels_for(case), interpret=True))

    def layer(pool: KVPool, _: None) -> tuple[KVPool, jax.Array]:
        return pool, attend(pool)

    _, out_LXNH = jax.jit(lambda pool: jax.lax.scan(layer, pool, length=2))(poisoned(case, inputs))
    for out_XNH in np.asarray(out_LXNH):
        assert error_of(case, inputs, out_XNH) < tolerance_of(case)


@pytest.mark.parametrize("num_cores", [1, 2])
def test_groups_of_heads_are_independent(num_cores: int) -> None:
    """On two cores they run at the same time, each with buffers of its own."""
    case = replace(CASES[0], segments=((0, 17), (48, 33)), padding_blocks=1)
    inputs = make_inputs(case, seed=3)
    blocks = PrefillBlocks(kv_tokens=32, kv_heads=1, query_rows=64)
    attend = write_and_attend(case, inputs, kernels_for(case, blocks, num_cores=num_cores))
    assert error_of(case, inputs, interpreter.run_without_race(attend, poisoned(case, inputs))) < tolerance_of(case)


def test_padding_blocks_between_others() -> None:
    """They start the next block's copies on their way."""
    case = replace(CASES[0], segments=((0, 17), (48, 33)), padding_blocks=2)
    inputs = make_inputs(case, seed=3)
    order = np.array([3, 0, 4, 1, 2])
    block = case.block_tokens
    places = (order[:, None] * block + np.arange(block)).reshape(-1)
    meta = inputs.batch.meta
    moved = replace(
        inputs,
        q_TNH=inputs.q_TNH[places],
        new=jax.tree.map(lambda x: x[places], inputs.new),
        batch=replace(
            inputs.batch,
            meta=meta.replace(
                blk_seq_J=meta.blk_seq_J[order], blk_pos_J=meta.blk_pos_J[order], blk_len_J=meta.blk_len_J[order]
            ),
        ),
    )
    out = interpreter.run_without_race(write_and_attend(case, moved, kernels_for(case)), poisoned(case, inputs))
    back = np.empty_like(out)
    back[places] = out
    assert error_of(case, inputs, back) < tolerance_of(case)
    assert (back[3 * block :] == 0).all()


class TestRefusals:
    case = AttentionCase(name="refusals", **SMALL, segments=((0, 40),))

    def refused(self, case: AttentionCase, chip: str | None = "v6e", blocks: tuple[object, ...] = (), pages: int = 4):
        """Context of the error; nothing runs."""
        tokens, width = case.num_tokens, 2 * case.head_dim
        shape = jax.ShapeDtypeStruct
        scale = shape((9, case.num_kv_heads, 2, case.page_tokens), jnp.float32)
        is_wide = case.kv_dtype in ("float32", "bfloat16")
        pool = KVPool(shape((9, case.num_kv_heads, case.page_tokens, width), case.kv_dtype), None if is_wide else scale)
        ints = functools.partial(shape, dtype=jnp.int32)
        blocks_J = ints((case.num_blocks,))
        meta = AttnMeta(ints((0,)), ints((1, pages)), ints((1,)), blocks_J, blocks_J, blocks_J)
        kernels = Kernels(implementation=Implementation.TPU, chip=chip, blocks=blocks)
        q = shape((tokens, case.num_heads, case.head_dim), jnp.float32)
        spec = AttentionSpec(scale=1.0)
        with pytest.raises(UnsupportedCase) as error:
            jax.eval_shape(lambda q, pool, meta: prefill(q, pool, 0, meta, spec, None, kernels), q, pool, meta)
        return error.value.why

    def test_no_chip(self) -> None:
        assert "name of a chip" in self.refused(self.case, chip=None)

    def test_heads(self) -> None:
        assert self.refused(replace(self.case, head_dim=96)).startswith("heads of 96")

    def test_pages(self) -> None:
        assert self.refused(replace(self.case, page_tokens=48, block_tokens=96)).startswith("pages of 48 tokens")

    def test_blocks_that_are_no_whole_pages(self) -> None:
        assert self.refused(replace(self.case, block_tokens=24)).startswith("query blocks of 24 tokens")

    def test_floats_of_another_chip(self) -> None:
        why = self.refused(replace(self.case, kv_dtype="float8_e4m3fn"))
        assert why == "pages of float8_e4m3fn on v6e, whose 8-bit float type is float8_e5m2"

    def test_a_table_larger_than_smem(self) -> None:
        assert "200000 pages is larger than" in self.refused(self.case, pages=200_000)

    @pytest.mark.parametrize(
        ("blocks", "why"),
        [
            (PrefillBlocks(kv_tokens=40, kv_heads=2, query_rows=32), "whole pages"),
            (PrefillBlocks(kv_tokens=192, kv_heads=2, query_rows=32), "n * 128"),
            (PrefillBlocks(kv_tokens=32, kv_heads=3, query_rows=32), "does not divide 2 heads"),
            (PrefillBlocks(kv_tokens=32, kv_heads=2, query_rows=48), "of 64 rows"),
            (PrefillBlocks(kv_tokens=65536, kv_heads=2, query_rows=64), "bytes of VMEM"),
        ],
    )
    def test_block_sizes(self, blocks: PrefillBlocks, why: str) -> None:
        assert why in self.refused(self.case, blocks=(blocks,))


def test_the_grid_has_every_border() -> None:
    assert {case.kv_dtype for case in CASES} == {"float32", "bfloat16", "int8", "float8_e5m2", "float8_e4m3fn"}
    assert {case.head_dim for case in CASES} == {64, 128, 256}
    assert {case.num_kv_heads for case in CASES} >= {1, 2, 6}
    assert {bool(case.decode_lens) for case in CASES} == {True, False}
