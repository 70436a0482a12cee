"""Coefficients come back from steps that were made from them, hiccups and noise notwithstanding."""

import random
from pathlib import Path

import pytest

from headrace.serving.app.cost_model_fit import Measured, config_of, fit_cost_model, fit_program, step_times
from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.cost_model import StepLoad, cost_model_from_json
from headrace.serving.core.errors import ConfigError
from headrace.serving.core.plan import Bucket, ProgramKind
from headrace.serving.engine.journal import (
    FORMAT,
    Applied,
    Header,
    JournaledStep,
    Planned,
    PlanOutline,
    StepTimes,
    encode_record,
)

CONFIG = SchedulerConfig(
    num_slots=4,
    page_size=4,
    num_pages=65,
    max_context=128,
    chunk_tokens=16,
    block_tokens=4,
    decode_rows=(4,),
    prefill_tokens=(16,),
)
DECODE = Bucket(ProgramKind.DECODE, 4)


def outline(step_id: int, positions: tuple[int, ...] = (5,)) -> PlanOutline:
    rows = tuple((slot, 1, position) for slot, position in enumerate(positions))
    return PlanOutline(step_id=step_id, digest="", fields={}, bucket=DECODE, decode=rows)


def test_coefficients_come_back_from_noisy_steps_with_hiccups() -> None:
    rng = random.Random(1)
    group = []
    for i in range(400):
        rows, tokens = rng.randint(1, 8), 16 * rng.randint(1, 8)
        load = StepLoad(program="mixed-8x128", rows=rows, prefill_tokens=tokens, context_tokens=rng.randint(0, 20_000))
        seconds = 0.020 + 0.001 * rows + 0.0005 * tokens + 1e-6 * load.context_tokens
        seconds *= rng.uniform(0.95, 1.05) * (10 if i % 40 == 0 else 1)
        group.append(Measured(load, seconds))
    cost = fit_program(group)
    assert cost.base_s == pytest.approx(0.020, rel=0.2)
    assert cost.row_s == pytest.approx(0.001, rel=0.2)
    assert cost.token_s == pytest.approx(0.0005, rel=0.05)
    assert cost.context_s == pytest.approx(1e-6, rel=0.1)
    assert cost.spread[len(cost.spread) // 2] == pytest.approx(1.0, abs=0.02)
    assert 5 < cost.spread[-1] < 12


def test_no_coefficient_is_negative_and_few_steps_give_a_constant() -> None:
    falling = [
        Measured(StepLoad(program="d", rows=1 + i % 4, prefill_tokens=0, context_tokens=i), 0.05 - 0.0001 * i)
        for i in range(100)
    ]
    cost = fit_program(falling)
    assert min(cost.base_s, cost.row_s, cost.token_s, cost.context_s) >= 0
    few = fit_program(falling[:5])
    assert (few.row_s, few.context_s, few.num_steps) == (0.0, 0.0, 5)
    assert few.base_s == pytest.approx(0.0498)


def test_a_step_begins_when_the_one_before_it_is_done() -> None:
    def step(i: int, dispatch_s: float, collect_s: float, collected_s: float) -> JournaledStep:
        times = StepTimes(dispatch_s=dispatch_s, dispatched_s=dispatch_s, collect_s=collect_s, collected_s=collected_s)
        return JournaledStep(segment=0, plan=outline(i), planned_s=dispatch_s, times=times)

    measured, host_s = step_times([step(0, 1.0, 1.1, 1.5), step(1, 1.1, 1.52, 2.0), step(2, 3.0, 3.0, 3.4)])
    assert [each.seconds for each in measured] == pytest.approx([0.5, 0.5, 0.4])
    assert host_s == pytest.approx([0.02])
    assert measured[0].load == StepLoad(program="decode-4", rows=1, prefill_tokens=0, context_tokens=6)


def header(**changes: object) -> Header:
    given: dict[str, object] = {
        "format": FORMAT, "version": "0", "python": "3", "started": "then", "now_s": 0.0, "config": CONFIG,
        "policy_version": 3, "model_hash": "00", **changes,
    }  # fmt: skip
    return Header(**given)  # type: ignore[arg-type]


def test_a_journal_becomes_a_cost_model_and_a_file(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    lines = [header()]
    for i in range(20):
        at_s = float(i)
        times = StepTimes(dispatch_s=at_s, dispatched_s=at_s, collect_s=at_s, collected_s=at_s + 0.25)
        lines += [
            Planned(now_s=at_s, plan=outline(i)),
            Applied(now_s=at_s + 0.25, step_id=i, times=times, decode=(1,)),
        ]  # type: ignore[list-item]
    journal.write_bytes(b"".join(map(encode_record, lines)))
    cost = fit_cost_model(journal, [5.0, 7.0])
    assert cost.programs["decode-4"].base_s == pytest.approx(0.25)
    assert cost.edge_s == (0.005, 0.007) and cost.edge_is_measured
    assert config_of(cost, "file") == CONFIG
    assert cost_model_from_json(cost.as_json(), "file").programs == cost.programs


def test_what_is_no_journal_of_one_server_is_refused(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    journal.write_bytes(b"{}\n")
    with pytest.raises(ConfigError, match="cannot be used"):
        fit_cost_model(journal, None)
    journal.write_bytes(encode_record(header()))
    with pytest.raises(ConfigError, match="no step that gave a result"):
        fit_cost_model(journal, None)
