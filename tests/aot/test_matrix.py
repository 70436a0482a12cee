"""The compile matrix: what is in it, and that every entry traces in the reference."""

from dataclasses import replace

import jax
import pytest

from headrace.pallas_kernels.chips import CHIPS
from headrace.pallas_kernels.types import Kernels
from tests.aot.matrix import ATTENTION, HEAD_DIMS, KV_HEADS, TYPES, Entry, Operation, build, entries, size_bytes


def test_every_chip_operation_type_and_head_shape_is_there_once() -> None:
    found = list(entries())
    assert len({entry.name for entry in found}) == len(found)
    for chip in CHIPS.values():
        of_chip = {(e.operation, e.dtype, e.head_dim, e.kv_heads) for e in found if e.chip == chip.name}
        expected = {
            (operation, dtype, head_dim, heads)
            for operation, types in TYPES.items()
            for dtype in types
            if dtype != "fp8" or chip.fp8
            for head_dim in HEAD_DIMS
            for heads in KV_HEADS
        }
        assert of_chip == expected


@pytest.mark.parametrize("entry", [e for e in entries(("v6e",)) if e.kv_heads == 8], ids=lambda entry: entry.name)
def test_arguments_are_those_of_the_public_function(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Entry, "kernels", Kernels())
    built = build(entry)
    out = jax.eval_shape(built.function, *built.arguments)
    donated = tuple(built.arguments[index] for index in built.donated)
    assert size_bytes(donated) == built.donated_bytes
    if entry.operation in ATTENTION:
        pool = out if entry.operation is Operation.WRITE else out[1]
        assert jax.tree.map(lambda x: (x.shape, x.dtype), (pool,)) == jax.tree.map(
            lambda x: (x.shape, x.dtype), donated
        )


def test_a_chip_without_8_bit_float_pages_refuses_them() -> None:
    entry = next(entries(("v5e",)))
    with pytest.raises(KeyError, match="v5e"):
        build(replace(entry, dtype="fp8"))
