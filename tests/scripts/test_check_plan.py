"""How ``check_plan`` judges what a command printed; it compiles nothing here."""

from pathlib import Path
from typing import Any

import pytest

from scripts import check_plan
from scripts.check_plan import (
    COMMANDS,
    PUBLIC,
    Command,
    Public,
    check_rows,
    compare,
    compare_sums,
    largest_activation,
    largest_made,
)

COMMAND = Command(model="llama-3.1-8b", arguments=())


def row(**changes: Any) -> dict[str, Any]:
    exchanges = [{"what": "sum", "count": 65}, {"what": "draw", "count": 3}]
    decode = {
        "seconds": 0.010, "hbm_s": 0.008, "products_s": 0.001, "links_s": 0.002, "weight_bytes": 6.0, "kv_bytes": 2.0,
        "exchanges": exchanges,
    }  # fmt: skip
    memory = {
        "limit_bytes": 100 << 30, "weights_bytes": 10 << 30, "state_bytes": 0, "temporary_bytes": 8 << 20,
        "steps_bytes": 0,
    }  # fmt: skip
    return {
        "topology": "v6e:2x2",
        "mesh": "tensor=4",
        "misfit": None,
        "compiled": {"memory": memory, "layer_kv_bytes": 1 << 30, "code_bytes": {"decode-16": None}},
        "points": [{"streams": 16, "token_s": 0.012, "decode": decode, "mixed": decode}],
    } | changes


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"misfit": "does not fit: short by 3.00 GiB in weights"}, "should fit"),
        ({"misfit": "was not compiled: the compiler was ended by SIGABRT"}, "SIGABRT"),
        ({"compiled": row()["compiled"] | {"layer_kv_bytes": 3 << 30}}, "more than the device has"),
        ({"compiled": row()["compiled"] | {"layer_kv_bytes": 1 << 20}}, "a temporary of 8388608 bytes"),
    ],
)
def test_what_is_wrong_with_a_row(changes: dict[str, Any], problem: str | None) -> None:
    found = list(check_rows({"rows": [row(**changes)]}, COMMAND, {}))
    assert (found == []) if problem is None else (len(found) == 1 and problem in found[0])


def test_one_of_many_meshes_must_fit() -> None:
    command = Command(model="llama-3.1-8b", arguments=(), may_misfit=True)
    misfit = row(misfit="does not fit: short by 3.00 GiB in weights")
    assert list(check_rows({"rows": [misfit, row()]}, command, {})) == []
    assert list(check_rows({"rows": [misfit]}, command, {})) == ["no mesh fits"]


def test_where_little_kv_fits_the_largest_array_counts() -> None:
    little = {"rows": [row(compiled=row()["compiled"] | {"layer_kv_bytes": 1 << 20})]}
    made = "  %a = f32[16,4096]{1,0} add(%x, %y)\n  %b = f32[9999,4096]{1,0:S(1)} add(%x, %y)\n"
    text = "ENTRY %main () -> f32[] {\n" + made + "}\n"
    assert largest_made(text) == 16 * 4096 * 4
    assert list(check_rows(little, COMMAND, {"tensor=4": largest_made(text)})) == []


def test_sums_of_a_program_are_set_against_the_plan(tmp_path: Path) -> None:
    one = '  %a = f32[16,4096]{1,0} all-reduce(%x), metadata={op_name="jit(step)/shard_map/psum"}\n'
    loop = one.replace("shard_map/psum", "shard_map/while/body/psum")
    file = tmp_path / "v6e-2x4-tensor=4-decode-16.txt"
    document = {"rows": [row(mesh="data=2,tensor=4")]}
    file.write_text("ENTRY %main () -> f32[] {\n" + one + 2 * loop + "}\n")
    assert compare_sums(file, document, "llama-3.1-8b") == (
        "tensor=4 decode-16: 65 sums of 16 tokens, 65 planned",
        True,
    )
    file.write_text("ENTRY %main () -> f32[] {\n" + one + loop + "}\n")
    assert compare_sums(file, document, "llama-3.1-8b")[1] is False
    assert compare_sums(file, {"rows": [row(misfit="does not fit")]}, "llama-3.1-8b")[1] is True


@pytest.mark.parametrize(
    ("measured_ms", "with_prompts", "off", "is_problem"),
    [(10.0, False, 0.0, False), (13.0, False, 0.3, False), (6.4, False, -0.36, True), (12.0, True, 0.0, False)],
)
def test_rates_are_compared(measured_ms: float, with_prompts: bool, off: float, is_problem: bool) -> None:
    public = Public(
        name="a", command=0, mesh="tensor=4", streams=16, token_ms=measured_ms, source="b", with_prompts=with_prompts
    )
    found = compare(public, {"rows": [row()]})
    assert found["off"] == pytest.approx(off) and found["problem"] is is_problem
    assert found["terms"]["weights_ms"] == pytest.approx(6.0) and found["terms"]["kv_ms"] == pytest.approx(2.0)


def test_every_comparison_names_a_command_with_its_mesh() -> None:
    for public in PUBLIC:
        arguments = COMMANDS[public.command].arguments
        assert public.mesh in arguments
        most = int(arguments[arguments.index("--max-streams") + 1])
        assert public.streams <= most
    assert sum(public.outside is None for public in PUBLIC) >= 4
    assert check_plan.WITHIN == 0.35


def test_activations_are_those_of_the_experts_rows_in_whole_tiles() -> None:
    """2,112 rows of four experts a token are nine tiles."""
    assert largest_activation("gpt-oss-120b", {"decode-16": 1, "mixed-16+512": 1}) == 4 * 9 * 256 * 2880 + 1
    assert largest_activation("llama-3.1-8b", {"decode-16": 1}) == 4 * 256 * 4096 + 1
