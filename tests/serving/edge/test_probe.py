"""The readiness probe before an engine of known answers: what passes, what fails and how it is told."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from headrace.serving.core.contract import Contract
from headrace.serving.core.probe import PROBE_FORMAT, ChatTurn, ProbePrompt, ProbeRecord
from headrace.serving.core.request import Rejection, RejectionReason
from headrace.serving.edge.bodies import chat_prompt
from headrace.serving.edge.errors import ApiError, ErrorCode
from headrace.serving.edge.probe import PROBE_TENANT, ProbeConfig, ReadinessProbe
from headrace.serving.edge.service import Service
from headrace.serving.engine.lifecycle import EngineState
from tests.serving.edge.fakes import VOCAB_SIZE, FakeEngine, make_service, open_app, ready
from tests.serving.edge.live_edge import until
from tests.serving.edge.test_metrics import scrape

REPLY = b"Hello, world"
TOP = tuple((i, -0.5 - i) for i in range(8))
"""What FakeEngine says at every step."""
TURNS = (ChatTurn(role="user", content="hi"),)
CHAT_IDS = (256, *b"user:hi\n", *b"assistant:")
PROMPTS = (
    ProbePrompt(name="text", text="hé", prompt_ids=tuple("hé".encode()), ids=tuple(REPLY[:4]), top=(TOP,) * 4),
    ProbePrompt(name="chat", messages=TURNS, prompt_ids=CHAT_IDS, ids=tuple(REPLY[:3]), top=(TOP,) * 3),
    ProbePrompt(name="ids", prompt_ids=(1, 2), ids=tuple(REPLY[:2]), top=(TOP,) * 2),
)


def record_of(service: Service, **parts: object) -> ProbeRecord:
    served = service.served
    assert served is not None
    contract = {**served.parts, **parts}
    return ProbeRecord(
        format=PROBE_FORMAT,
        fingerprint=Contract(contract, {}).fingerprint,
        contract=contract,
        numerics={"jax": "1"},
        tolerance=0.01,
        prompts=PROMPTS,
    )


def probe_of(service: Service, engine: FakeEngine, *records: ProbeRecord, **config: Any) -> ReadinessProbe:
    async def encode(text: str | None, messages: tuple[ChatTurn, ...] | None) -> Sequence[int]:
        if messages is None:
            return await service.preparation.token_ids(None, text)
        turns = [{"role": turn.role, "content": turn.content} for turn in messages]
        return await service.preparation.token_ids(chat_prompt({"messages": turns}), None)

    service.probe = probe = ReadinessProbe(
        ProbeConfig(given=records, **config),
        engine=engine,
        contract=service.contract_of,
        encode=encode,
        counts=service.metrics,
        vocab_size=VOCAB_SIZE,
    )
    return probe


@asynccontextmanager
async def running(probe: ReadinessProbe) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(probe.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait((task,))
        assert task.cancelled()


def state_of(service: Service) -> str:
    values = scrape(service)
    (state,) = [name.partition("|")[2] for name, value in values.items() if "probe_state" in name and value == 1]
    return state


async def refusal(service: Service) -> str:
    with pytest.raises(ApiError) as refused:
        await service.start("completion", {"prompt": "x", "max_tokens": 1})
    return refused.value.code


async def test_requests_wait_for_the_probe_which_nobody_sees_but_the_engine() -> None:
    engine = FakeEngine(reply=REPLY, auto=False)
    service = make_service(engine)
    probe = probe_of(service, engine, record_of(service))
    assert service.is_ready().reason == "the probe has not passed yet: it is running"
    assert (probe.status, state_of(service)) == ("pending", "pending")
    assert await refusal(service) == "not_ready"
    async with running(probe):
        await until(lambda: len(engine.live) == len(PROMPTS))
        assert not service.is_ready().ready
        engine.auto = True
        engine._task = asyncio.create_task(engine._run())
        assert await probe.wait_judged() is None
        assert service.is_ready().ready and probe.status == state_of(service) == "passed"
        assert {request.tenant for request in engine.submitted} == {PROBE_TENANT}
        assert len({request.cache_namespace for request in engine.submitted}) == 1
        assert [request.prompt_ids for request in engine.submitted] == [prompt.prompt_ids for prompt in PROMPTS]
        assert all(request.stop.stop_token_ids == () and request.sampling.is_greedy for request in engine.submitted)
        job = await service.start("completion", {"prompt": "x", "max_tokens": 1})
        await job.generations[0].wait_end()
    values = scrape(service)
    assert values["headrace_requests_accepted_total"] == 1
    assert values["headrace_probe_runs_total|passed"] == 1
    document = service.contract_document()["probe"]
    assert isinstance(document, dict) and (document["status"], document["passed"]) == ("passed", 1)


async def test_without_a_record_a_server_is_ready_and_says_so() -> None:
    engine = FakeEngine()
    service = make_service(engine)
    other = record_of(service, model="another")
    probe = probe_of(service, engine, shipped=(other,))
    async with running(probe):
        assert await probe.wait_judged() is None
    assert service.is_ready().ready and probe.status == state_of(service) == "unrecorded"
    assert not engine.submitted
    transport = httpx.ASGITransport(open_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        found = (await http.get("/readyz")).json()
        assert (found["ready"], found["probe"]) == (True, "unrecorded")
        assert (await http.get("/v1/contract")).json()["probe"] == {"status": "unrecorded"}


async def test_a_required_probe_without_a_record_keeps_the_server_out() -> None:
    engine = FakeEngine()
    service = make_service(engine)
    probe = probe_of(service, engine, is_required=True)
    async with running(probe):
        reason = await probe.wait_judged()
    assert reason is not None and "unrecorded" in reason and "--require-probe" in reason
    assert await refusal(service) == "not_ready"
    transport = httpx.ASGITransport(open_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        found = await http.get("/readyz")
    assert (found.status_code, found.json()["reason"]) == (503, reason)


@pytest.mark.parametrize(
    ("part", "value", "word"),
    [
        ("tokenizer", "other", "tokenizer differs (recorded other, served byte-tokenizer)"),
        ("template", "other", "chat template differs (recorded other, served line-template)"),
        ("weights", "int8", "quantization (how weights lie in memory) differs (recorded int8, served native)"),
        ("dtype", "bfloat16", "dtype differs (recorded bfloat16, served float32)"),
        ("model", "cd" * 32, "weights (hash of the model) differs (recorded cdcdcdcdcdcd…, served abababababab…)"),
    ],
)
async def test_another_part_of_the_contract_is_named_alone(part: str, value: str, word: str) -> None:
    engine = FakeEngine(reply=REPLY)
    service = make_service(engine)
    probe = probe_of(service, engine, record_of(service, **{part: value}))
    async with running(probe):
        assert await probe.wait_judged() == f"probe failed: {word}"
    assert not engine.submitted and state_of(service) == "failed"
    assert await refusal(service) == "not_ready"


@pytest.mark.parametrize(
    ("prompt", "what"),
    [
        (replace(PROMPTS[0], prompt_ids=(104,)), "tokenizer differs: prompt 'text' becomes other ids than recorded"),
        (replace(PROMPTS[1], prompt_ids=(104,)), "chat template differs: prompt 'chat' becomes other ids"),
        (replace(PROMPTS[1], messages=(ChatTurn(role="user", content="refuse me"),)), "refused with template_failed"),
        (replace(PROMPTS[2], ids=(72, 102)), "(prompt 'ids': ids differ at step 1: 101 instead of 102"),
        (replace(PROMPTS[2], top=(TOP, ((0, -0.52), *TOP[1:]))), "logits differ at step 1"),
    ],
)
async def test_equal_hashes_are_not_enough(prompt: ProbePrompt, what: str) -> None:
    engine = FakeEngine(reply=REPLY)
    service = make_service(engine)
    probe = probe_of(service, engine, replace(record_of(service), prompts=(prompt,)))
    async with running(probe):
        reason = await probe.wait_judged()
    assert reason is not None and what in reason and reason.startswith("probe failed: ")
    if "step" in what:
        assert "weights differ in effect, though hashes are as recorded" in reason
        assert "beside the record differ jax" in reason


async def test_it_runs_again_and_what_failed_once_is_out_until_the_engine_starts_anew() -> None:
    engine = FakeEngine(reply=REPLY)
    service = make_service(engine)
    probe = probe_of(service, engine, record_of(service), interval_s=0.01)
    async with running(probe):
        await until(lambda: scrape(service).get("headrace_probe_runs_total|passed", 0) >= 3)
        assert len({request.cache_namespace for request in engine.submitted}) >= 3  # every run computes
        engine.choose = lambda request, index: 7
        await until(lambda: probe.status == "failed")
        engine.choose = None
        await asyncio.sleep(0.05)
        assert probe.status == "failed"
        assert await refusal(service) == "not_ready"
        engine.die()
        assert "dead" in service.is_ready().reason
        probe.wake()
        assert probe.status == state_of(service) == "pending"
        await asyncio.sleep(0.03)  # it waits while there is no engine
        engine.state, engine.ready_info, engine.num_restarts = EngineState.READY, ready(), 1
        assert await refusal(service) == "not_ready"  # before the probe has had a turn
        probe.wake()
        await until(lambda: service.is_ready().ready)


async def test_a_late_run_proves_nothing_after_the_first_pass_unless_ids_differ() -> None:
    engine = FakeEngine(reply=REPLY)
    service = make_service(engine)
    probe = probe_of(service, engine, record_of(service), interval_s=0.01, limit_s=0.05)
    async with running(probe):
        await probe.wait_judged()
        engine.auto = False
        if engine._task is not None:
            engine._task.cancel()
        await until(lambda: scrape(service).get("headrace_probe_runs_total|late", 0) >= 2)
        assert service.is_ready().ready and probe.status == "passed"
        await until(lambda: len(engine.live) <= len(PROMPTS))  # those of late runs were cancelled
        engine.choose = lambda request, index: 9
        before = len(engine.submitted)
        await until(lambda: len(engine.submitted) > before)
        engine.step()
        await until(lambda: probe.status == "failed")
        assert "9 instead of 72" in (probe.fault or "")


async def test_a_late_first_run_is_tried_again_and_a_full_queue_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.serving.edge.probe.RETRY_S", 0.01)
    engine = FakeEngine(reply=REPLY, auto=False)
    service = make_service(engine)
    probe = probe_of(service, engine, record_of(service), limit_s=0.05)
    full = Rejection(reason=RejectionReason.QUEUE_FULL, message="full")
    async with running(probe):
        await until(lambda: scrape(service).get("headrace_probe_runs_total|late", 0) >= 1)
        assert "the last run was late (0.05 s are allowed)" in service.is_ready().reason
        while not scrape(service).get("headrace_probe_runs_total|refused", 0):
            for request_id in list(engine.live):
                engine.refuse(request_id, full)
            await asyncio.sleep(0.005)
        assert "the last run was refused" in service.is_ready().reason
        engine.auto = True
        engine._task = None
        assert await asyncio.wait_for(probe.wait_judged(), 20) is None


async def test_every_copy_of_the_model_gets_a_request() -> None:
    engine = FakeEngine(reply=REPLY, ready_info=ready(num_lanes=4))
    service = make_service(engine)
    probe = probe_of(service, engine, record_of(service))
    async with running(probe):
        assert await probe.wait_judged() is None
    assert len(engine.submitted) == 2 * len(PROMPTS)


async def test_a_drain_does_not_wait_for_it() -> None:
    engine = FakeEngine(reply=REPLY, auto=False)
    service = make_service(engine)
    probe = probe_of(service, engine, record_of(service))
    async with running(probe):
        await until(lambda: len(engine.live) == len(PROMPTS))
        probe.begin_drain(1.0)
        await until(lambda: not engine.live)
        await asyncio.wait_for(probe.wait_idle(), 1)
        assert probe.abort() == 0 and len(engine.submitted) == len(PROMPTS)


async def test_a_record_that_cannot_run_here_is_told_of_and_one_that_came_with_us_is_none() -> None:
    engine = FakeEngine(reply=REPLY, ready_info=ready(max_context=8))
    service = make_service(engine)
    record = record_of(service)
    assert "longer than the context" in (probe_of(service, engine, record).fault or "")
    assert probe_of(service, engine, shipped=(record,)).status == "unrecorded"


async def test_a_fault_of_the_probe_itself_proves_nothing_and_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(reply=REPLY)
    service = make_service(engine)
    probe = probe_of(service, engine, record_of(service))
    monkeypatch.setattr("headrace.serving.edge.probe.RETRY_S", 0.01)
    gone = ApiError(ErrorCode.INTERNAL, "The process that encodes long prompts failed.")
    encode, faults = probe._encode, iter([RuntimeError("the process is gone"), gone])

    async def fails_once(text: str | None, messages: tuple[ChatTurn, ...] | None) -> Sequence[int]:
        for fault in faults:
            raise fault
        return await encode(text, messages)

    probe._encode = fails_once
    async with running(probe):
        assert await asyncio.wait_for(probe.wait_judged(), 5) is None
    values = scrape(service)
    assert values["headrace_probe_runs_total|faulty"] == values["headrace_probe_runs_total|lost"] == 1
    assert values["headrace_probe_runs_total|passed"] == 1
    assert "the process is gone" in caplog.text
