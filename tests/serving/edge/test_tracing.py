"""Traces of requests by both doors: spans in order, right counts, no text, and nothing where nobody wants them."""

import asyncio
import time
from typing import Any

import httpx
import pytest

from headrace.serving.core.request import CancelReason
from headrace.serving.edge.app import build_app
from headrace.serving.edge.errors import ApiError
from headrace.serving.edge.generation import Failure
from headrace.serving.edge.job import Job
from headrace.serving.edge.service import ServiceConfig
from headrace.serving.edge.terms import Terms
from headrace.serving.edge.trace_context import TraceHeaders, caller
from headrace.serving.edge.tracing import RequestTrace, TracedService
from tests.serving.edge.fakes import EOS, VOCAB_SIZE, ByteTokenizer, FakeEngine, LineTemplate
from tests.serving.edge.live_edge import running_edge

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CANARY = "canary-of-prompt"


class Traces:
    def __init__(self) -> None:
        self.all: list[RequestTrace] = []

    def record(self, trace: RequestTrace) -> None:
        self.all.append(trace)


def traced_service(engine: FakeEngine, traces: Traces, **others: Any) -> TracedService:
    config = ServiceConfig(model_names=("fake",), vocab_size=VOCAB_SIZE, eos_ids=(EOS,))
    return TracedService(
        config, engine=engine, tokenizer=ByteTokenizer(), template=LineTemplate(), sink=traces, **others
    )


async def answer(service: TracedService, body: dict[str, object], headers: dict[str, str]) -> httpx.Response:
    app = build_app(service, security=TraceHeaders)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        return await client.post("/v1/completions", json=body, headers=headers)


async def test_spans_follow_each_other_and_say_what_was_done() -> None:
    traces = Traces()
    before_ns = time.time_ns()
    done = await answer(
        traced_service(FakeEngine(), traces),
        {"prompt": CANARY, "max_tokens": 5, "temperature": 0.5, "stream": True},
        {"traceparent": PARENT, "tracestate": "a=b"},
    )
    assert done.status_code == 200
    (trace,) = traces.all
    assert trace.headers == {"traceparent": PARENT, "tracestate": "a=b"} and trace.error is None
    assert [span.name for span in trace.spans] == ["edge", "queue", "prefill", "decode", "detokenize", "write"]
    spans = {span.name: span for span in trace.spans}
    assert before_ns <= trace.root.start_ns == spans["edge"].start_ns <= spans["edge"].end_ns
    assert spans["edge"].end_ns == spans["queue"].start_ns
    assert spans["queue"].end_ns == spans["prefill"].start_ns and spans["prefill"].end_ns == spans["decode"].start_ns
    assert spans["decode"].end_ns - spans["decode"].start_ns == pytest.approx(3e6, abs=2)
    assert spans["write"].end_ns <= trace.root.end_ns <= time.time_ns()
    assert trace.root.name == "text_completion fake"
    assert dict(trace.root.attributes) == {
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "headrace",
        "gen_ai.request.model": "fake", "gen_ai.response.model": "fake",
        "gen_ai.response.id": done.headers["x-request-id"], "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 1.0, "gen_ai.request.top_k": 0,
        "gen_ai.request.frequency_penalty": 0.0, "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.usage.input_tokens": len(CANARY), "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ("length",), "headrace.cached_tokens": 0, "headrace.preemptions": 0,
    }  # fmt: skip
    assert CANARY not in repr(trace)


async def test_one_trace_for_several_choices() -> None:
    traces = Traces()
    service = traced_service(FakeEngine(), traces)
    job = await service.start("completion", {"prompt": ["a", "bc"], "max_tokens": 2})
    for generation in job.generations:
        while not isinstance(await generation.next(), type(generation.outcome)):
            pass
    (trace,) = traces.all
    assert [s.attributes["headrace.choice"] for s in trace.spans if s.name == "decode"] == [0, 1]
    assert trace.root.attributes["gen_ai.usage.output_tokens"] == 4


async def test_refused_failed_and_abandoned_requests_have_traces_too() -> None:
    traces, engine = Traces(), FakeEngine(auto=False)
    service = traced_service(engine, traces)
    with pytest.raises(ApiError):
        await service.start("chat", {"messages": CANARY})
    job = await service.start("completion", {"prompt": "x"})
    job.cancel(CancelReason.DISCONNECT)
    await job.generations[0].wait_end()
    job = await service.start("completion", {"prompt": "x"})
    engine.die()
    await asyncio.wait_for(job.generations[0].next(), 5)
    refused, abandoned, failed = traces.all
    assert (refused.error, refused.spans) == ("invalid_type", ()) and CANARY not in repr(refused)
    assert abandoned.error is None
    assert abandoned.root.attributes["gen_ai.response.finish_reasons"] == ("cancelled",)
    assert failed.error == failed.root.attributes["error.type"] == "engine_lost"
    assert [span.name for span in failed.spans] == ["edge"]


async def test_a_client_that_leaves_before_it_is_admitted_has_a_trace() -> None:
    traces, engine = Traces(), FakeEngine()
    task = asyncio.create_task(traced_service(engine, traces).start("completion", {"prompt": "x"}))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (trace,) = traces.all
    assert (trace.error, trace.spans, engine.submitted) == ("cancelled", (), [])


async def test_an_end_that_nobody_takes_ends_the_trace_too() -> None:
    traces, engine = Traces(), FakeEngine()
    service = traced_service(engine, traces)
    job = await service.start("completion", {"prompt": "x", "max_tokens": 2})
    await job.generations[0].wait_end()
    assert not traces.all
    job.cancel(CancelReason.DISCONNECT)  # as both doors do when the client has left
    job.cancel(CancelReason.DISCONNECT)
    (trace,) = traces.all
    assert trace.root.attributes["gen_ai.response.finish_reasons"] == ("length",)


async def test_what_was_not_read_by_its_deadline_is_a_failure_in_the_trace() -> None:
    traces, engine = Traces(), FakeEngine()
    now_s = [time.monotonic()]
    service = traced_service(engine, traces, clock=lambda: now_s[0])
    terms = Terms(arrival_s=now_s[0], deadline_ms=10_000)
    job = await service.start("completion", {"prompt": "x", "max_tokens": 2}, terms=terms)
    await job.generations[0].wait_end()
    now_s[0] += 11
    assert isinstance(job.generations[0].take(), Failure)
    (trace,) = traces.all
    assert trace.error == "deadline_exceeded"
    assert trace.root.attributes["gen_ai.response.finish_reasons"] == ("error",)


async def test_headers_of_one_connection_are_not_those_of_the_next() -> None:
    traces = Traces()
    service = traced_service(FakeEngine(), traces)
    body = {"prompt": "x", "max_tokens": 1}
    for headers in ({"traceparent": PARENT}, {}, {"traceparent": "x" * 9000}):
        await asyncio.create_task(answer(service, body, headers))
    assert [dict(t.headers) for t in traces.all] == [{"traceparent": PARENT}, {}, {}]


async def test_a_frame_names_the_trace_of_its_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    async with running_edge() as edge, edge.opened() as client:
        start = edge.service.start

        async def noting(*arguments: Any, **terms: Any) -> Job:
            seen.append(dict(caller()))
            return await start(*arguments, **terms)

        monkeypatch.setattr(edge.service, "start", noting)
        for stream_id, envelope in (("a", {"traceparent": PARENT}), ("b", {})):
            await client.send("create", id=stream_id, endpoint="completion", body={"prompt": "x"}, **envelope)
            while (await client.receive()).get("type") != "done":
                pass
    assert seen == [{"traceparent": PARENT}, {}]
