"""headrace simulate from its files to its table, CSV, JSON and report."""

import csv
import json
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner

from headrace.serving.app.simulate_command import outside_ms, simulate
from headrace.serving.bench.make_workload import Lengths, Share, WorkloadPlan, make_workload
from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.cost_model import CostModel, ProgramCost, program_name
from headrace.serving.core.errors import ConfigError

CONFIG = SchedulerConfig(
    num_slots=2,
    page_size=16,
    num_pages=65,
    max_context=256,
    chunk_tokens=64,
    block_tokens=16,
    decode_rows=(1, 2),
    prefill_tokens=(16, 64),
)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """(workload, cost model): 40 requests of two tenants in 10 s, steps of 10 ms and 0.2 ms a prompt token."""
    program = ProgramCost(base_s=0.01, row_s=0.0, token_s=2e-4, context_s=0.0, spread=(0.9, 1.1), num_steps=50)
    cost = CostModel(
        programs={program_name(bucket): program for bucket in CONFIG.buckets},
        host_s=(0.001,),
        edge_s=(0.002,),
        context={"config": msgspec.to_builtins(CONFIG)},
    )
    tenants = (Share(name="one", share=1.0), Share(name="two", share=1.0))
    plan = WorkloadPlan(
        phases=((4.0, 10.0),),
        requests=40,
        prompt=Lengths(low=32, high=64),
        max_tokens=Lengths(low=8, high=8),
        tenants=tenants,
    )
    workload, model = tmp_path / "workload.jsonl", tmp_path / "cost.json"
    workload.write_text("\n".join(make_workload(plan).lines()) + "\n")
    model.write_text(json.dumps(cost.as_json()))
    return str(workload), str(model)


def run(files: tuple[str, str], *options: str) -> str:
    arguments = ["--workload", files[0], "--cost-model", files[1], "--slo", "ttft=1s,itl=100ms", *options]
    done = CliRunner().invoke(simulate, arguments, catch_exceptions=False, standalone_mode=False)
    assert done.return_value == 0, done.output
    return done.output


def test_a_light_load_is_answered_and_every_file_says_the_same(files: tuple[str, str], tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("out.csv", "out.json", "out.html")]
    text = run(files, "--csv", str(paths[0]), "--json", str(paths[1]), "--plot", str(paths[2]))
    assert "40 answered, 0 refused, 0 failed" in text and "goodput" in text and "100.0%" in text
    assert "simulating workload.jsonl" in text  # how far it is, on standard error
    rows = list(csv.DictReader(paths[0].read_text().splitlines()))
    assert [row["outcome"] for row in rows] == ["length"] * 40
    figures = json.loads(paths[1].read_text())["figures"]
    firsts = sorted(float(row["first_token_ms"]) for row in rows)
    assert firsts[19] <= figures["first_token"]["p50_ms"] <= firsts[20]
    assert sum(part["answered"] for part in figures["tenants"].values()) == 40
    page = paths[2].read_text()
    assert page.startswith("<!doctype html>") and "<svg" in page and "goodput" in page


def test_a_short_queue_refuses_with_a_hint_and_replicas_take_more(files: tuple[str, str]) -> None:
    tight = ("--max-streams", "1", "--max-queued", "1")
    alone = run(files, *tight)
    assert "refused" in alone and "told to retry after" in alone
    assert "40 answered" in run(files, *tight, "--replicas", "8")


def test_a_program_that_was_never_measured_is_named(files: tuple[str, str]) -> None:
    text = run(files, "--max-streams", "8")
    assert "never measured take the times of others" in text and "decode-8 by decode-2" in text


def planned(tmp_path: Path, **fields: object) -> str:
    """A workload of one request with those fields."""
    header = {"format": "headrace-workload/1"}
    request = {"at_s": 0, "prompt": {"tokens": 8}, "max_tokens": 4, **fields}
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(header) + "\n" + json.dumps(request) + "\n")
    return str(path)


@pytest.mark.parametrize("priority", ["urgent", 7])
def test_a_priority_that_no_server_of_ours_has_is_named(
    files: tuple[str, str], tmp_path: Path, priority: object
) -> None:
    with pytest.raises(ConfigError, match="request 1: priority .* high, normal, low"):
        run((planned(tmp_path, priority=priority), files[1]))


def test_a_priority_above_the_keys_is_refused_as_by_the_server(files: tuple[str, str], tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text('[default]\nmax_priority = "normal"\n')
    text = run((planned(tmp_path, priority="high"), files[1]), "--tenants", str(tenants))
    assert "0 answered, 1 refused" in text and "invalid" in text


def test_more_than_the_context_is_refused(files: tuple[str, str], tmp_path: Path) -> None:
    assert "1 context_exceeded" in run((planned(tmp_path, prompt={"tokens": 300}), files[1]))


def test_the_time_outside_an_engine_comes_from_both_kinds_of_bench(tmp_path: Path) -> None:
    request = {"sent_s": 1.0, "first_s": 1.012, "server": {"first_token_ms": 10.0}}
    for found in ({"requests": [request]}, {"runs": [{"requests": [request]}, {"requests": []}]}):
        path = tmp_path / "bench.json"
        path.write_text(json.dumps(found))
        assert outside_ms(path) == [pytest.approx(2.0)]


@pytest.mark.parametrize("text", ["[]", '{"requests": 3}', '{"runs": [1]}', '{"requests": [{"server": {"x": 1}}]}'])
def test_a_file_without_the_servers_times_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="bench.json has no request with the server's own times"):
        outside_ms(path)


def test_the_servers_own_tenant_file_does(files: tuple[str, str], tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text("[tenants.one]\nweight = 2\n[tenants.absent]\nweight = 3\n")
    assert "40 answered" in run(files, "--tenants", str(tenants))


@pytest.mark.parametrize(
    "options",
    [("--max-streams", "0"), ("--pages", "0"), ("--chunk-tokens", "0"), ("--context", "0"), ("--max-queued", "0"),
     ("--chunk-tokens", "50"), ("--swap-pages", "-1"), ("--max-queued-tokens", "-5"), ("--max-streams", "100000000")],
)  # fmt: skip
def test_numbers_that_cannot_be_are_named(files: tuple[str, str], options: tuple[str, str]) -> None:
    with pytest.raises((ConfigError, click.BadParameter)) as refused:
        run(files, *options)
    error = refused.value
    assert options[0] in (error.format_message() if isinstance(error, click.BadParameter) else str(error))
