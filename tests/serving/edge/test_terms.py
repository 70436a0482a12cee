"""Deadlines and priorities on both doors."""

import httpx
import pytest

from headrace.serving.core.request import Priority
from headrace.serving.edge.errors import ApiError
from headrace.serving.edge.terms import Terms, terms_of_headers
from tests.serving.edge.fakes import FakeEngine, RunningServer, make_service, open_app
from tests.serving.edge.live_edge import running_edge

DEADLINE, PRIORITY = b"x-headrace-deadline-ms", b"x-headrace-priority"


def test_headers() -> None:
    assert terms_of_headers([(b"host", b"x")], 5.0) == Terms(arrival_s=5.0)
    assert terms_of_headers([(DEADLINE, b" 600000 "), (PRIORITY, b"high")], 5.0) == Terms(
        deadline_ms=600_000, priority=Priority.HIGH, arrival_s=5.0
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [(DEADLINE, value) for value in (b"", b"0", b"600001", b"-5", b"1.5", b"1e3", b"9" * 5000, b"\xb2", b"soon")]
    + [(PRIORITY, value) for value in (b"", b"High", b"1", b"\xff")],
)
def test_headers_that_say_nothing(name: bytes, value: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        terms_of_headers([(name, value)], 0.0)
    assert (caught.value.status, caught.value.param) == (400, name.decode())
    assert name.decode() in caught.value.message


def test_a_repeated_header() -> None:
    with pytest.raises(ApiError, match="must not be repeated"):
        terms_of_headers([(DEADLINE, b"5"), (DEADLINE, b"6")], 0.0)


async def test_over_http() -> None:
    engine = FakeEngine()
    async with RunningServer(open_app(make_service(engine))) as server, httpx.AsyncClient() as client:
        url = server.url + "/v1/completions"
        headers = {"x-headrace-deadline-ms": "60000", "x-headrace-priority": "low"}
        answer = await client.post(url, json={"prompt": "hi", "generate": False}, headers=headers)
        body = answer.json()
        assert body["choices"][0] | {"logprobs": None} == {
            "index": 0, "text": "", "logprobs": None, "finish_reason": "length", "stop_reason": None,
        }  # fmt: skip
        assert body["usage"]["completion_tokens"] == 0
        assert (body["metrics"]["preempted_ms"], body["metrics"]["preempted"]) == (0.0, [])
        bad = await client.post(url, json={"prompt": "hi"}, headers={"x-headrace-deadline-ms": "soon"})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "x-headrace-deadline-ms")
        load = (await client.get(server.url + "/v1/load")).json()
        scraped = (await client.get(server.url + "/metrics")).text
    [request] = engine.submitted
    assert request.priority is Priority.LOW
    assert 50_000 < (request.deadline_ms or 0) <= 60_000
    assert load["sequences"] == {"active": 0, "waiting": 0}
    assert load["refusals"] == {}
    assert 'headrace_budget_used{budget="streams",engine="0",model_name="fake"} 0.0' in scraped
    assert 'headrace_budget_limit{budget="queued_requests",engine="0",model_name="fake"} 512.0' in scraped


async def test_over_the_websocket() -> None:
    async with running_edge() as edge, edge.opened() as client:
        body = {"text": "x"}
        await client.send("create", id="a", endpoint="completion", body=body, deadline_ms=1500, priority="high")
        await client.until_end("a")
        await client.send("create", id="b", endpoint="completion", body=body)
        await client.until_end("b")
        await client.send("create", id="c", endpoint="completion", body=body, priority="urgent")
        [error] = await client.until_end("c")
    first, second = edge.service.terms
    assert first is not None and second is not None
    assert (first.deadline_ms, first.priority) == (1500, Priority.HIGH)
    assert (second.deadline_ms, second.priority) == (None, None)
    assert first.arrival_s < second.arrival_s
    assert error["error"]["param"] == "priority"
