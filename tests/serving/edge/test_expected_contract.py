"""Clients that pin what serves them: over HTTP, in hello and in create; refused before any work."""

import json

import httpx
import pytest

from headrace.serving.edge.errors import ApiError
from headrace.serving.edge.messages import CloseCode
from tests.serving.edge.fakes import FakeEngine, make_service, open_app, ready
from tests.serving.edge.live_edge import running_edge
from tests.serving.edge.session_peer import Host, Peer
from tests.serving.edge.test_metrics import scrape

OTHER = "fp_" + "0" * 64
BODY = {"prompt": "hi", "max_tokens": 1}
FINGERPRINT, NUMERICS = Host.contract_hashes


async def test_over_http() -> None:
    engine = FakeEngine()
    service = make_service(engine)
    fingerprint, numerics = service.contract_hashes
    transport = httpx.ASGITransport(open_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:

        async def ask(expected: str, **body: object) -> httpx.Response:
            headers = {"x-headrace-expect-contract": expected}
            return await http.post("/v1/completions", json={**BODY, **body}, headers=headers)

        for expected in (fingerprint, numerics, f"{fingerprint}, {numerics}"):
            assert expected is not None
            answer = await ask(expected)
            assert answer.status_code == 200
            assert answer.headers["x-headrace-contract"] == answer.json()["system_fingerprint"] == fingerprint
        streamed = await ask(f"{fingerprint}", stream=True)
        chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
        assert {chunk["system_fingerprint"] for chunk in chunks} == {fingerprint} and len(chunks) >= 1
        assert streamed.headers["x-headrace-contract"] == fingerprint

        done = len(engine.submitted)
        for expected in (OTHER, f"{OTHER},{numerics}"):
            refused = await ask(expected)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (412, "contract_mismatch")
            assert error["param"] == "x-headrace-expect-contract" and f"{fingerprint}" in error["message"]
        assert scrape(service)["headrace_requests_refused_total|contract_mismatch"] == 2
        assert (await http.get("/v1/load")).json()["refusals"] == {"contract_mismatch": 2}
        malformed = (await ask("latest")).json()["error"]
        assert (malformed["code"], malformed["param"]) == ("invalid_value", "x-headrace-expect-contract")
        assert "latest" not in malformed["message"]
        engine.die()
        assert (await ask(OTHER)).json()["error"]["code"] == "not_ready"
        assert len(engine.submitted) == done


async def test_an_engine_that_changed_while_the_prompt_was_read_is_not_used() -> None:
    engine = FakeEngine()
    service = make_service(engine)
    expected = service.contract_hashes[0]
    assert expected is not None
    encode = service.preparation.requests

    async def slow(*arguments: object) -> object:
        found = await encode(*arguments)  # type: ignore[arg-type]
        engine.ready_info = ready(model_hash="cd" * 32)
        return found

    service.preparation.requests = slow  # type: ignore[method-assign, assignment]
    with pytest.raises(ApiError) as refused:
        await service.start("completion", BODY, expected=(expected,))
    assert refused.value.code == "contract_mismatch" and not engine.submitted
    job = await service.start("completion", BODY)
    assert job.contract == service.contract_hashes[0] != expected


def test_create_hands_its_expectation_on_with_that_of_hello() -> None:
    peer = Peer()
    peer.read()
    create = {"type": "create", "endpoint": "completion", "body": BODY}
    (start,) = (peer.session.receive_text(json.dumps({**create, "id": "a", "expect_contract": OTHER})),)
    assert start is not None and start.expected == (OTHER,)
    assert peer.send("hello", expect_contract=FINGERPRINT) == []
    start = peer.session.receive_text(json.dumps({**create, "id": "b", "expect_contract": NUMERICS}))
    assert start is not None and start.expected == (FINGERPRINT, NUMERICS)
    (error,) = peer.send("create", id="c", endpoint="completion", body={}, expect_contract="f" * 161)
    assert (error["error"]["code"], error["error"]["param"]) == ("invalid_value", "expect_contract")


@pytest.mark.parametrize("needs_key", [False, True])
def test_a_hello_that_expects_another_contract_ends_the_socket(needs_key: bool) -> None:
    peer = Peer(identity=None) if needs_key else Peer()
    frames = peer.send("hello", token="key-a", expect_contract=OTHER)
    assert [frame["type"] for frame in frames] == ["welcome", "error"]
    assert (frames[1]["id"], frames[1]["status"], frames[1]["error"]["code"]) == (None, 412, "contract_mismatch")
    assert peer.session.close is not None and peer.session.close.code is CloseCode.CONTRACT_MISMATCH
    assert frames[0]["contract"] == FINGERPRINT


async def test_over_a_real_socket() -> None:
    async with running_edge() as edge, edge.opened() as client:
        await client.send(
            "create",
            id="a",
            endpoint="completion",
            body={"text": "hi"},
            expect_contract=edge.service.contract_hashes[0],
        )
        assert (await client.until_end("a"))[-1]["type"] == "done"
        await client.send("create", id="b", endpoint="completion", body={"text": "hi"}, expect_contract=OTHER)
        (error,) = await client.until_end("b")
        assert (error["seq"], error["error"]["code"]) == (0, "contract_mismatch")
        await client.send("hello", expect_contract=OTHER)
        assert (await client.receive())["error"]["code"] == "contract_mismatch"
        assert await client.close_code() == CloseCode.CONTRACT_MISMATCH
