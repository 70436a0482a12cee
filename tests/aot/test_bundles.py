"""The parser of libtpu's dump, on what libtpu 0.0.42.1 wrote about ``write_blocks``."""

from pathlib import Path

import pytest

from tests.aot.bundles import PASSES, parse, read_dump

SAMPLES = Path(__file__).parent / "samples"
USES, BUNDLES = ((SAMPLES / f"write_blocks-{label}.txt").read_text() for label in PASSES)


def test_loops_units_and_bundles_of_a_stored_dump() -> None:
    kernel = parse(BUNDLES, USES)
    # Two loops: over blocks of pages with one over pages in it (and one over the words of a page of factors in that),
    # and one that waits for the last copies.
    assert kernel.own() == {"": 34, "1": 23, "1.1": 32, "1.1.1": 7, "2": 10}
    assert sum(kernel.own().values()) == len(USES.splitlines()) - 4
    assert kernel.spills() == 0
    assert kernel.total("SALU") > 0 and kernel.total("MXU") == 0
    assert kernel.loops[0].loops[0].loops[0].uses[5] == 1  # the one load of a word


def test_spills_and_fills_are_counted() -> None:
    lines = USES.splitlines()
    lines[-1] = "0 0 0 0 0 1 1 2 2 1"
    assert parse(BUNDLES, "\n".join(lines)).spills() == 3


def test_empty_bundles_belong_to_the_loop_of_the_branch_before_them() -> None:
    head = "MXU, ...\n" + "1 1 1 1 1 1 1 1 1 1\n"
    text = """
     0   :  { %a = smov 0 }
   0x1 LB: > { %b = sbr.rel }
   0x2   :  {}
   0x3   :  {} /* End region 1 */
   0x4 LB: > { %c = sadd }
   0x5   :  { %d = sfence }
"""
    assert parse(text, head + "0 0 0 0 0 0 0 0 0 1\n" * 6).own() == {"": 2, "1": 3, "2": 1}


def test_files_that_do_not_agree_are_an_error() -> None:
    with pytest.raises(ValueError, match="bundles with the use of"):
        parse(BUNDLES, "\n".join(USES.splitlines()[:-1]))


def test_a_kernel_without_a_dump_is_an_error(tmp_path: Path) -> None:
    names = {"write_blocks.1"}
    with pytest.raises(KeyError, match=r"nothing about the kernel write_blocks\.1"):
        read_dump(tmp_path, names)
    for index, (label, text) in enumerate(zip(PASSES, (USES, BUNDLES), strict=True)):
        (tmp_path / f"17960-write_blocks.1-0{index}-{label}.txt").write_text(text)
    (tmp_path / "17960-fusion.1-00-final_bundles.txt").write_text("not read")
    assert read_dump(tmp_path, names)["write_blocks.1"].own() == parse(BUNDLES, USES).own()
