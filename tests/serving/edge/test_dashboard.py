"""The dashboard asks for metrics that the server has, with labels and bounds that they have, and is laid out whole."""

import asyncio
import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.serving.core.request import CancelReason
from headrace.serving.edge.errors import ErrorCode
from tests.serving.edge.fakes import FakeEngine, make_service

PATH = Path(__file__).parents[3] / "dashboards" / "headrace.json"
DASHBOARD: dict[str, Any] = json.loads(PATH.read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
METRIC = re.compile(r"\b((?:headrace_|vllm:)\w+)\{([^}]*)\}")


@pytest.fixture(scope="module")
def samples() -> dict[str, set[str]]:
    """Name of each sample that a server can have, with its labels and its bounds."""
    return asyncio.run(_samples())


async def _samples() -> dict[str, set[str]]:
    service = make_service(FakeEngine(journal_bytes=1))
    metrics = service.metrics
    metrics.refused(ErrorCode.QUEUE_FULL)
    metrics.cancelled(CancelReason.CLIENT)
    metrics._failures.labels("engine_lost")
    metrics.ws_closes.labels("1000")
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            known = found.setdefault(sample.name, set())
            known |= set(sample.labels) | {f"le={sample.labels.get('le')}"}
    return found


def test_every_metric_of_a_query_exists(samples: dict[str, set[str]]) -> None:
    for query in QUERIES:
        found = METRIC.findall(query)
        assert found and len(found) == len(re.findall(r"headrace_|vllm:", query)), query
        for name, labels in found:
            assert name in samples, name
            assert {label.split("=")[0].strip(" ~!") for label in labels.split(",")} <= samples[name]
        for label in re.findall(r"by \(([^)]*)\)", query):
            assert set(label.split(", ")) <= samples[found[0][0]], query


def test_the_bounds_to_choose_from_are_those_of_the_histograms(samples: dict[str, set[str]]) -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    for name, histogram in (("ttft", "time_to_first_token"), ("itl", "inter_token_latency")):
        bounds = variables[name]["query"].split(",")
        assert {f"le={bound}" for bound in bounds} <= samples[f"headrace_{histogram}_seconds_bucket"]
        assert variables[name]["current"]["value"] in bounds


def test_it_is_a_whole_dashboard() -> None:
    assert DASHBOARD["schemaVersion"] >= 36 and DASHBOARD["uid"] == "headrace" and DASHBOARD["title"]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    known = {variable["name"] for variable in DASHBOARD["templating"]["list"]} | {"__rate_interval"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) <= known | {"__all"}
    for panel in PANELS:
        assert panel["title"] and panel["description"] and panel["targets"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert all(target["legendFormat"] and target["refId"] for target in panel["targets"])


def test_no_panel_lies_on_another() -> None:
    boxes = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(box["x"] >= 0 and box["x"] + box["w"] <= 24 for box in boxes)
    for a, b in combinations(boxes, 2):
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert apart or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]


def test_what_an_operator_looks_for_is_there() -> None:
    text = " ".join(QUERIES)
    for name in (
        "time_to_first_token_seconds", "inter_token_latency_seconds", "num_requests_waiting", "kv_cache_usage_perc",
        "preemptions_total", "requests_refused_total", "deadline_misses_total",
    ):  # fmt: skip
        assert f"headrace_{name}" in text
