"""Metrics: names, gauges without traffic, exact accounting over every way to end, restarts, no text as label."""

import random

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.serving.core.events import Preempted, PreemptionAction, PreemptionReason
from headrace.serving.core.request import CancelReason, FinishReason, RequestId
from headrace.serving.edge.errors import ApiError
from headrace.serving.edge.expert_metrics import MAX_SERIES
from headrace.serving.edge.service import Service
from headrace.serving.engine.lifecycle import EngineState
from tests.serving.edge.fakes import FakeEngine, make_service, open_app, ready

SHARED = [
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries", "prefix_cache_hits",
    "prompt_tokens", "generation_tokens", "num_preemptions", "request_success", "time_to_first_token_seconds",
    "inter_token_latency_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
    "request_generation_tokens", "cache_config_info",
]  # fmt: skip


def scrape(service: Service) -> dict[str, float]:
    """Sample name, with its labels of interest → value."""
    found = {}
    for family in text_string_to_metric_families(service.metrics.exposition().decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine", "le")}
            found[sample.name + "".join(f"|{v}" for v in labels.values())] = sample.value
    return found


async def test_own_names_and_vllms() -> None:
    service = make_service(FakeEngine())
    families = {f.name: f for f in text_string_to_metric_families(service.metrics.exposition().decode())}
    for name in SHARED:
        assert f"headrace_{name}" in families
        assert f"vllm:{name}" in families
    assert families["vllm:time_to_first_token_seconds"].type == "histogram"
    labels = families["vllm:num_requests_running"].samples[0].labels
    assert labels == {"model_name": "fake", "engine": "0"}
    assert families["vllm:cache_config_info"].samples[0].labels["block_size"] == "16"


async def test_gauges_are_right_after_a_mass_cancel_without_traffic() -> None:
    engine = FakeEngine(auto=False)
    service = make_service(engine)
    jobs = [await service.start("completion", {"prompt": "x"}) for _ in range(64)]
    engine.step()
    values = scrape(service)
    assert (values["vllm:num_requests_running"], values["vllm:num_requests_waiting"]) == (4, 60)
    assert values["vllm:kv_cache_usage_perc"] == 4 / 64
    for job in jobs:
        job.cancel(CancelReason.DISCONNECT)
        await job.generations[0].wait_end()
    values = scrape(service)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert values[f"vllm:{name}"] == values[f"headrace_{name}"] == 0


async def test_every_accepted_request_is_counted_once_and_tokens_equal_usage() -> None:
    engine, rng = FakeEngine(auto=False), random.Random(1)
    service = make_service(engine)
    prompt_tokens = completion_tokens = 0
    previous: dict[str, float] = {}
    for turn in range(60):
        body = {"prompt": "x" * rng.randint(1, 9), "max_tokens": rng.randint(1, 20), "stop": rng.choice(["lo", "zz"])}
        job = await service.start("completion", body)
        generation = job.generations[0]
        end = rng.randint(0, 25)
        for _ in range(end):
            engine.step()
        if engine.live and turn % 3 == 0:
            engine.finish(generation.request.request_id, FinishReason.ERROR, error_code="not_finite")
        job.cancel(CancelReason.CLIENT)
        await generation.wait_end()
        prompt_tokens += len(generation.request.prompt_ids)
        completion_tokens += generation.completion_tokens
        values = scrape(service)
        assert all(values[name] >= previous[name] for name in previous if "_total" in name or "_count" in name)
        previous = values
    ended = [value for name, value in previous.items() if name.startswith("vllm:request_success_total")]
    assert len(ended) == 4
    assert all(ended)
    assert sum(ended) == previous["headrace_requests_accepted_total"] == 60
    assert previous["vllm:prompt_tokens_total"] == prompt_tokens
    assert previous["vllm:generation_tokens_total"] == completion_tokens
    assert previous["headrace_requests_failed_total|internal_error"] == previous["vllm:request_success_total|error"]


async def test_refusals_are_counted_by_code_only() -> None:
    service = make_service(FakeEngine())
    for body in ({}, {"prompt": ""}, {"prompt": "x", "canary-name": 1}, {"prompt": "x", "model": "canary-model"}):
        try:
            await service.start("completion", body, tenant="canary-tenant")
        except ApiError:
            continue
        raise AssertionError("not refused")
    text = service.metrics.exposition().decode()
    assert "canary" not in text
    values = scrape(service)
    assert values["headrace_requests_refused_total|unknown_field"] == 1
    assert values["headrace_requests_refused_total|model_not_found"] == 1


class Restartable(FakeEngine):
    """Counts from nothing again after each restart."""

    def restart(self) -> None:
        self.num_restarts += 1
        self.generated = 0
        self.state, self.ready_info = EngineState.READY, ready()


async def test_engine_counters_go_on_over_a_restart() -> None:
    engine = Restartable()
    service = make_service(engine)
    name = "headrace_engine_generated_tokens_total"
    engine.generated = 10
    assert scrape(service)[name] == 10
    engine.die()
    assert scrape(service)[name] == 10
    assert scrape(service)["headrace_engine_up"] == 0
    engine.restart()
    engine.generated = 25
    assert scrape(service)[name] == 35
    engine.generated = 26
    assert scrape(service)[name] == 36
    assert scrape(service)["vllm:num_preemptions_total"] == 6


async def test_latencies_are_observed_once_per_token() -> None:
    service = make_service(FakeEngine())
    job = await service.start("completion", {"prompt": "x", "max_tokens": 5})
    await job.generations[0].wait_end()
    values = scrape(service)
    assert values["vllm:time_to_first_token_seconds_count"] == 1
    assert values["vllm:inter_token_latency_seconds_count"] == 4
    assert values["vllm:request_queue_time_seconds_sum"] == 0.001
    assert values["vllm:request_generation_tokens_sum"] == 5


async def test_the_endpoint_speaks_prometheus() -> None:
    app = open_app(make_service(FakeEngine()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        answer = await client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert list(text_string_to_metric_families(answer.text))


async def test_tokens_of_experts_go_on_over_a_restart_and_an_uneven_layer_shows() -> None:
    engine = Restartable()
    service = make_service(engine)
    assert not any("expert" in name for name in scrape(service))  # no experts, no series
    engine.expert_tokens = ((4, 0, 2, 2), (0, 0, 0, 0))
    values = scrape(service)
    assert [values[f"headrace_expert_tokens_total|{expert}|0"] for expert in range(4)] == [4, 0, 2, 2]
    assert values["headrace_expert_imbalance|0"] == 4 / 2
    assert "headrace_expert_imbalance|1" not in values
    engine.die()
    engine.restart()
    engine.expert_tokens = None  # not reported yet
    assert scrape(service)["headrace_expert_tokens_total|0|0"] == 4
    engine.expert_tokens = ((1, 1, 1, 1), (0, 0, 0, 3))
    values = scrape(service)
    assert [values[f"headrace_expert_tokens_total|{expert}|0"] for expert in range(4)] == [5, 1, 3, 3]
    assert values["headrace_expert_imbalance|1"] == 4


async def test_a_model_of_many_experts_has_the_imbalance_only() -> None:
    engine = FakeEngine(expert_tokens=tuple((2,) * 63 + (66,) for _ in range(MAX_SERIES // 64 + 1)))
    values = scrape(make_service(engine))
    assert sum(name.startswith("headrace_expert_tokens") for name in values) == 0
    imbalances = [value for name, value in values.items() if name.startswith("headrace_expert_imbalance")]
    assert imbalances == [66 * 64 / (2 * 63 + 66)] * (MAX_SERIES // 64 + 1)


async def test_what_vllm_has_of_a_request_and_of_steps() -> None:
    engine = FakeEngine()
    engine.step_tokens = (2, 1, *[0] * 11, 3, 9000)
    service = make_service(engine)
    job = await service.start("completion", {"prompt": ["x", "yz"], "max_tokens": 4})
    for generation in job.generations:
        await generation.wait_end()
    values = scrape(service)
    for prefix in ("headrace_", "vllm:"):
        assert values[f"{prefix}request_params_n_sum"] == 2
        assert values[f"{prefix}request_params_max_tokens_sum"] == 8
        assert values[f"{prefix}request_max_num_generation_tokens_sum"] == 8
        assert values[f"{prefix}request_prefill_kv_computed_tokens_sum"] == 3
        assert values[f"{prefix}request_inference_time_seconds_sum"] == 0.01
        assert values[f"{prefix}request_time_per_output_token_seconds_sum"] == pytest.approx(0.002)
        assert values[f"{prefix}prompt_tokens_cached_total"] == 0
        assert values[f"{prefix}iteration_tokens_total_count"] == 6
        assert values[f"{prefix}iteration_tokens_total_sum"] == 9000
    assert values["vllm:time_per_output_token_seconds_count"] == values["vllm:inter_token_latency_seconds_count"] == 6
    buckets = [
        (sample.labels["le"], sample.value)
        for family in text_string_to_metric_families(service.metrics.exposition().decode())
        for sample in family.samples
        if sample.name == "vllm:iteration_tokens_total_bucket"
    ]
    assert buckets[:3] == [("1", 2), ("8", 3), ("16", 3)] and buckets[-2:] == [("16384", 3), ("+Inf", 6)]


async def test_preemptions_by_reason_and_action_and_what_swap_holds() -> None:
    engine = FakeEngine()
    service = make_service(engine)
    assert scrape(service)["headrace_preemptions_total|swapped|priority"] == 0
    swapped = Preempted(
        request_id=RequestId(1), reason=PreemptionReason.PAGES, action=PreemptionAction.SWAPPED, num_pages=5
    )
    engine.preemptions.add((swapped, swapped))
    values = scrape(service)
    assert values["headrace_preemptions_total|swapped|pages"] == 2
    assert values["headrace_preempted_pages_total|swapped"] == 10
    engine.swap_pages_used = 3
    assert scrape(service)["headrace_swap_bytes_used"] == 3 * 16 * 1024
    assert "headrace_journal_up" not in values


async def test_cancels_are_counted_by_why_and_the_edges_own_are_none() -> None:
    service = make_service(FakeEngine(auto=False))
    job = await service.start("completion", {"prompt": "x"})
    job.cancel(CancelReason.DISCONNECT)
    job.cancel(CancelReason.CLIENT)
    job = await service.start("completion", {"prompt": "x"})
    job.cancel(CancelReason.STOP_STRING)
    values = {name: value for name, value in scrape(service).items() if name.startswith("headrace_requests_cancelled")}
    assert values.pop("headrace_requests_cancelled_total|disconnect") == 1
    assert set(values.values()) == {0} and len(values) == 4


async def test_counters_by_step_and_expert_go_on_over_a_restart() -> None:
    engine = Restartable(expert_tokens=((1, 3),))
    service = make_service(engine)
    engine.step_tokens = (1, *[0] * 13, 1)
    scrape(service)
    engine.die()
    engine.restart()
    engine.expert_tokens = None
    assert scrape(service)["headrace_expert_tokens_total|1|0"] == 3
    engine.expert_tokens = ((10, 20),)
    values = scrape(service)
    assert values["headrace_expert_tokens_total|1|0"] == 23
    assert values["vllm:iteration_tokens_total_count"] == 2
