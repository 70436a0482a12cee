"""Golden bundle counts: what is a difference, and what is not passed over."""

import json
from pathlib import Path

import pytest

from tests.aot import golden

COUNTS = {"v6e write int8": {"write_blocks": {"": 40, "1": 200}}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(golden, "FOLDER", tmp_path)
    return tmp_path


def changed(**own: int) -> dict[str, dict[str, dict[str, int]]]:
    return {"v6e write int8": {"write_blocks": {"": 40, "1": 200} | {k.strip("_"): v for k, v in own.items()}}}


def test_the_band_is_15_percent_and_a_few_bundles() -> None:
    golden.compare(COUNTS, "1.0", update=True)
    assert golden.compare(changed(_1=230, __=48), "1.0", update=False).problems == ()
    (problem,) = golden.compare(changed(_1=231), "1.0", update=False).problems
    assert "write_blocks loop 1 has 231 bundles, golden 200" in problem
    assert len(golden.compare(changed(_1=169), "1.0", update=False).problems) == 1


def test_other_loops_are_compared_by_their_sum() -> None:
    golden.compare(COUNTS, "1.0", update=True)
    assert golden.compare(changed(_2=30), "1.0", update=False).problems == ()
    assert len(golden.compare(changed(_2=60), "1.0", update=False).problems) == 1


def test_another_libtpu_an_unknown_entry_and_another_kernel_are_problems() -> None:
    golden.compare(COUNTS, "1.0", update=True)
    (problem,) = golden.compare(COUNTS, "2.0", update=False).problems
    assert "libtpu 2.0" in problem and "bundles-1.0.json" in problem
    assert len(golden.compare({"new": {"a": {"": 1}}}, "1.0", update=False).problems) == 1
    other = {"v6e write int8": {"write_rows": {"": 40, "1": 200}}}
    assert len(golden.compare(other, "1.0", update=False).problems) == 1


def test_an_update_keeps_what_was_not_compiled(folder: Path) -> None:
    golden.compare(COUNTS, "1.0", update=True)
    golden.compare({"other": {"a": {"": 1}}}, "1.0", update=True)
    assert set(json.loads((folder / "bundles-1.0.json").read_text())["bundles"]) == {"v6e write int8", "other"}
    assert golden.compare({}, "1.0", update=False).problems == ()
