"""Discovery and operations over HTTP."""

import hashlib
import json
from collections.abc import AsyncIterator
from importlib.metadata import version

import httpx
import pytest

from headrace.serving.engine.lifecycle import EngineState
from headrace.serving.engine.messages import Topology
from tests.serving.edge.fakes import BOS, CONTEXT, EOS, FakeEngine, make_service, open_app, ready

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def http(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(open_app(make_service(engine)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


async def test_models(http: httpx.AsyncClient) -> None:
    listed = (await http.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [(m["id"], m["root"], m["max_model_len"]) for m in listed["data"]] == [
        ("fake", "fake", CONTEXT),
        ("alias", "fake", CONTEXT),
    ]
    assert (await http.get("/v1/models/alias")).json()["id"] == "alias"
    missing = await http.get("/v1/models/org/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert "other" not in missing.text


async def test_tokenize_a_prompt(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/tokenize", json={"model": "fake", "prompt": "é", "return_token_strs": True})).json()
    assert answer == {
        "count": 2,
        "max_model_len": CONTEXT,
        "tokens": [0xC3, 0xA9],
        "token_strs": ["bytes:\\xc3", "bytes:\\xa9"],
    }


async def test_tokenize_a_chat_as_a_request_would(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    tokens = (await http.post("/tokenize", json={"messages": HI})).json()["tokens"]
    await http.post("/v1/chat/completions", json={"messages": HI})
    assert tuple(tokens) == engine.submitted[0].prompt_ids
    assert tokens[0] == BOS


async def test_detokenize(http: httpx.AsyncClient) -> None:
    answer = await http.post("/detokenize", json={"tokens": [104, 105, EOS, 0xC3]})
    assert answer.json() == {"prompt": "hi<eos>\ufffd"}
    assert (await http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "promt": "b"}, "promt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "model": "x"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1.0]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [260]}, "tokens"),
        ("/detokenize", {"tokens": [2**40]}, "tokens[0]"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
    ],
)
async def test_odd_bodies(http: httpx.AsyncClient, path: str, body: dict[str, object], param: str) -> None:
    answer = await http.post(path, json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/readyz", "/health"])
async def test_readiness_turns_with_the_engine(http: httpx.AsyncClient, engine: FakeEngine, path: str) -> None:
    good = await http.get(path)
    assert (good.status_code, good.json()["ready"]) == (200, True)
    engine.die()
    bad = await http.get(path)
    assert (bad.status_code, bad.json()["ready"], bad.json()["engine"]) == (503, False, "dead")
    assert "SIGKILL" in bad.json()["reason"]
    engine.state = EngineState.STARTING
    assert (await http.get(path)).json()["reason"] == "the engine is starting"
    assert (await http.get("/livez")).status_code == 200


async def test_a_draining_server_is_not_ready_but_alive() -> None:
    service = make_service(FakeEngine())
    service.drain()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(open_app(service)), base_url="http://test") as client:
        assert (await client.get("/readyz")).json()["reason"] == "draining"
        assert (await client.get("/livez")).status_code == 200
        refused = await client.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")


async def test_version(http: httpx.AsyncClient) -> None:
    assert (await http.get("/version")).json() == {"version": "0.1.0"}


async def test_the_contract_says_what_fixes_an_answer_and_what_it_runs_on(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    answer = await http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1})
    engine.ready_info = ready(
        mesh="tensor=4",
        topology=Topology(platform="tpu", device_kind="TPU v6 lite", num_devices=4, num_processes=1, link="ICI"),
    )
    found = (await http.get("/v1/contract")).json()
    assert found["topology"] == {
        "mesh": "tensor=4", "platform": "tpu", "device_kind": "TPU v6 lite", "num_devices": 4, "num_processes": 1,
        "link": "ICI",
    }  # fmt: skip
    assert (found["contract"]["model"], found["contract"]["dtype"]) == ("ab" * 32, "float32")
    assert found["versions"]["headrace"] == "0.1.0"
    assert found["versions"]["jax"] == version("jax")
    assert found["fingerprint"] == answer.json()["system_fingerprint"] == answer.headers["x-headrace-contract"]
    assert found["probe"] == {"status": "unrecorded"}
    parts, numerics = found["contract"], found["numerics"]
    assert (parts["stop_ids"], parts["adapter"], parts["deterministic"]) == ([EOS], None, False)
    # What the page says: anyone can work the hashes out from the document.
    for value, hashed in ((parts, found["fingerprint"]), (numerics, found["numerics_hash"])):
        text = json.dumps(value, sort_keys=True, separators=(",", ":"))
        assert hashlib.sha256(text.encode()).hexdigest() == hashed[3:]


async def test_other_chips_and_links_keep_the_fingerprint(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    first = (await http.get("/v1/contract")).json()
    topology = Topology(platform="gpu", device_kind="H100", link="none")
    engine.ready_info = ready(topology=topology, mesh="tensor=4", num_pages=9)
    second = (await http.get("/v1/contract")).json()
    assert second["topology"] != first["topology"]
    assert second["fingerprint"] == first["fingerprint"]


async def test_no_contract_without_an_engine(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.die()
    refused = await http.get("/v1/contract")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
