"""A request's lines: right ids and counts, never text or keys, and so many a second."""

import logging

import pytest

from headrace.serving.core.request import CancelReason
from headrace.serving.edge.errors import ApiError
from headrace.serving.edge.request_log import BURST_LINES
from tests.serving.edge.fakes import FakeEngine, make_service

CANARY = "canary-of-prompt"


def fields_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [r.__dict__["fields"] for r in caplog.records if r.name == "headrace.request"]


async def test_accepted_finished_and_refused(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    service = make_service(FakeEngine())
    job = await service.start("completion", {"prompt": CANARY, "max_tokens": 3, "user": CANARY}, tenant="shop")
    await job.generations[0].wait_end()
    with pytest.raises(ApiError):
        await service.start("completion", {"prompt": CANARY, "model": CANARY, CANARY: 1}, tenant="shop")
    accepted, finished, refused = fields_of(caplog)
    assert accepted == {
        "request_id": job.request_id, "event": "accepted", "endpoint": "completion", "choices": 1,
        "prompt_tokens": len(CANARY), "max_tokens": 3, "tenant": "shop",
    }  # fmt: skip
    assert finished.pop("total_ms")
    assert finished == {
        "request_id": job.request_id, "event": "finished", "choice": 0, "prompt_tokens": len(CANARY),
        "completion_tokens": 3, "cached_tokens": 0, "preemptions": 0, "queue_ms": 1.0, "prefill_ms": 2.0,
        "decode_ms": 3.0, "first_token_ms": 4.0, "reason": "length", "tenant": "shop",
    }  # fmt: skip
    assert refused == {"event": "refused", "code": "unknown_field", "tenant": "shop"}
    assert CANARY not in caplog.text + str(fields_of(caplog))


async def test_a_failed_and_a_cancelled_choice_say_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine = FakeEngine(auto=False)
    service = make_service(engine)
    job = await service.start("completion", {"prompt": "x"})
    job.cancel(CancelReason.DISCONNECT)
    await job.generations[0].wait_end()
    job = await service.start("completion", {"prompt": "x"})
    engine.die()
    assert [f["reason"] for f in fields_of(caplog) if f["event"] == "finished"] == ["cancelled", "engine_lost"]


async def test_lines_are_bounded_for_each_tenant_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    service = make_service(FakeEngine())
    now_s = 0.0
    service._clock = lambda: now_s
    for tenant, number in (("loud", 100), ("quiet", 3)):
        for _ in range(number):
            with pytest.raises(ApiError):
                await service.start("completion", {}, tenant=tenant)
    tenants = [f["tenant"] for f in fields_of(caplog)]
    assert (tenants.count("loud"), tenants.count("quiet")) == (BURST_LINES, 3)
    now_s = 0.11
    with pytest.raises(ApiError):
        await service.start("completion", {}, tenant="loud")
    assert fields_of(caplog)[-1]["lines_left_out"] == 100 - BURST_LINES
    assert "(70 lines left out before)" in caplog.text
