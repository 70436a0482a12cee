"""The race detector finds faults that are planted in the kernels themselves, and finds none without them."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.pallas_kernels.paged_attention import tpu_prefill_kernel
from headrace.pallas_kernels.paged_attention.cases import AttentionCase
from headrace.pallas_kernels.paged_attention.inputs import make_inputs
from headrace.pallas_kernels.paged_attention.tpu_prefill import prefill
from headrace.pallas_kernels.paged_attention.tpu_prefill_shape import PrefillBlocks
from headrace.pallas_kernels.types import Implementation, Kernels
from headrace.pallas_kernels.write_pages import tpu as write
from tests.pallas_kernels import interpreter

pytestmark = pytest.mark.usefixtures("quick_compiles")

SHAPE = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 64, "page_tokens": 16, "block_tokens": 32}
MODES = pytest.mark.parametrize("mode", ["on_wait", "eager"])


@pytest.fixture(autouse=True)
def _traces_of_its_own() -> Iterator[None]:
    """A kernel that was traced without the fault, or with it, must not be found in a cache."""
    jax.clear_caches()
    yield
    jax.clear_caches()


def has_prefill_raced(mode: str) -> bool:
    """Three iterations of keys of one query block."""
    case = AttentionCase(name="prefill", **SHAPE, segments=((64, 32),))
    inputs = make_inputs(case, seed=3)
    kernels = Kernels(
        implementation=Implementation.TPU,
        chip="v6e",
        interpret=interpreter.parameters(dma_execution_mode=mode),
        blocks=(PrefillBlocks(kv_tokens=32, kv_heads=1, query_rows=32),),
    )
    meta = jax.tree.map(jnp.asarray, inputs.batch.meta)
    attend = jax.jit(lambda q, pool: prefill(q, pool, inputs.first_row, meta, inputs.spec, None, kernels))
    _, has_raced = interpreter.run(attend, inputs.q_TNH, inputs.pool)
    return has_raced


def has_write_raced(mode: str) -> bool:
    """Two decode rows."""
    case = AttentionCase(name="write", **SHAPE, decode_lens=(17, 3))
    inputs = make_inputs(case, seed=3)
    kernels = Kernels(
        implementation=Implementation.TPU, chip="v6e", interpret=interpreter.parameters(dma_execution_mode=mode)
    )
    meta = jax.tree.map(jnp.asarray, inputs.batch.meta)
    put = jax.jit(lambda new, pool: write.write_tokens(new, pool, inputs.first_row, meta, kernels))
    _, has_raced = interpreter.run(put, inputs.new, inputs.pool)
    return has_raced


@MODES
@pytest.mark.parametrize("has_raced", [has_prefill_raced, has_write_raced])
def test_without_a_fault_there_is_no_race(has_raced: Callable[[str], bool], mode: str) -> None:
    assert not has_raced(mode)


def test_a_missing_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager: a copy that nobody waits for still happens."""
    monkeypatch.setattr(tpu_prefill_kernel, "wait_for_block", lambda *_: None)
    assert has_prefill_raced("eager")


@MODES
def test_a_reused_buffer(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """The next keys go where these are being read."""
    monkeypatch.setattr(tpu_prefill_kernel, "buffer_of", lambda slot: 0 * slot)
    assert has_prefill_raced(mode)


@MODES
def test_an_early_write(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """A tile is on its way to HBM while the token is put into it."""

    def write_then_change(change: Callable[[], None], copies: write.Copies) -> None:
        write.start(copies)
        change()

    monkeypatch.setattr(write, "put", write_then_change)
    assert has_write_raced(mode)


def test_a_call_that_ran_no_kernel_has_no_verdict() -> None:
    with pytest.raises(AssertionError, match="no kernel ran"):
        interpreter.run(jax.jit(jnp.sin), np.float32(1))
