"""Predictions, stand-ins for programs that were never measured, and files."""

import json

import pytest

from headrace.serving.core.cost_model import CostModel, ProgramCost, cost_model_from_json, load_of, quantile
from headrace.serving.core.errors import ConfigError
from headrace.serving.core.plan import Bucket, ProgramKind


def program(base_s: float, spread: tuple[float, ...] = (1.0,)) -> ProgramCost:
    return ProgramCost(base_s=base_s, row_s=0.5, token_s=0.25, context_s=0.125, spread=spread, num_steps=9)


def model(**programs: ProgramCost) -> CostModel:
    named = {name.replace("_", "-"): cost for name, cost in programs.items()}
    return CostModel(programs=named, host_s=(0.001,), edge_s=(0.002, 0.004), source="a test")


def test_a_step_costs_its_base_rows_tokens_and_positions() -> None:
    load = load_of(Bucket(ProgramKind.MIXED, 4, 16), [9, 19], [(8, 4)])
    assert (load.program, load.rows, load.prefill_tokens) == ("mixed-4x16", 2, 4)
    assert load.context_tokens == 10 + 20 + (9 + 10 + 11 + 12)
    cost = model(mixed_4x16=program(1.0, (0.5, 1.0, 1.5)))
    assert cost.step_s(load, 0.5) == 1.0 + 2 * 0.5 + 4 * 0.25 + 72 * 0.125
    assert cost.step_s(load, 0.0) == 0.5 * cost.step_s(load, 0.5)


def test_a_program_that_was_never_measured_takes_the_nearest_of_its_kind() -> None:
    cost = model(decode_1=program(1.0), decode_16=program(2.0), mixed_16x64=program(3.0))
    assert cost.program("decode-4").base_s == 1.0
    assert cost.program("decode-12").base_s == 2.0
    assert cost.program("mixed-16x256").base_s == 3.0
    assert model(decode_4=program(7.0)).program("mixed-4x16").base_s == 7.0


def test_quantiles_are_read_between_their_points() -> None:
    assert [quantile((1.0, 3.0, 4.0), u) for u in (0.0, 0.25, 0.5, 0.75, 1.0)] == [1.0, 2.0, 3.0, 3.5, 4.0]
    assert quantile((2.0,), 0.9) == 2.0


def test_a_file_gives_the_model_again() -> None:
    cost = model(decode_4=program(0.5, (0.9, 1.1)))
    assert cost_model_from_json(json.loads(json.dumps(cost.as_json())), "file") == cost


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": "other"}, "no cost model"),
        ({"programs": {}}, "at least one program"),
        ({"host_s": []}, "host_s must be a list"),
        ({"edge_s": [2.0, 1.0]}, "edge_s must be a list of ascending"),
        ({"edge_s": [float("nan")]}, "edge_s must be"),
        ({"programs": {"decode-4": {"base_s": -1}}}, "programs.decode-4.base_s"),
        ({"programs": {"decode-4": 3}}, "programs.decode-4 must be an object"),
    ],
)
def test_a_wrong_file_is_refused_by_name(change: dict[str, object], text: str) -> None:
    value = {**model(decode_4=program(0.5)).as_json(), **change}
    with pytest.raises(ConfigError, match=text) as refused:
        cost_model_from_json(value, "costs.json")
    assert "costs.json" in str(refused.value)
