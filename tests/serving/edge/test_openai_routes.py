"""The OpenAI HTTP API: the bytes on the wire, odd bodies, and clients that leave."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from headrace.serving.core.request import CancelReason, FinishReason
from headrace.serving.edge.fields import Endpoint
from headrace.serving.edge.openai_routes import DONE, PING, GenerateEndpoint
from headrace.serving.edge.service import Service
from tests.serving.edge.fakes import EOS, FakeEngine, make_service, open_app

HI: Any = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def service(engine: FakeEngine) -> Service:
    return make_service(engine)


@pytest.fixture
async def http(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(open_app(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


def events(text: str) -> list[Any]:
    """Parsed data lines; the last one is [DONE]."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks if not block.startswith(":")]


class TestWire:
    async def test_return_token_ids(self, http: httpx.AsyncClient) -> None:
        chat = (await http.post(CHAT, json={"messages": HI, "return_token_ids": True})).json()
        assert chat["choices"][0]["token_ids"] == [*b"Hello, world", EOS]
        assert chat["prompt_token_ids"][-10:] == [*b"assistant:"]
        text = (await http.post(TEXT, json={"prompt": "hi", "return_token_ids": True})).json()
        assert text["choices"][0]["prompt_token_ids"] == [*b"hi"]
        body = {"prompt": "hi", "return_token_ids": True, "stream": True}
        chunks = events((await http.post(TEXT, json=body)).text)
        assert [i for c in chunks for i in c["choices"][0]["token_ids"]] == [*b"Hello, world", EOS]
        assert ["prompt_token_ids" in c["choices"][0] for c in chunks] == [True] + [False] * (len(chunks) - 1)

    async def test_a_stop_string(self, http: httpx.AsyncClient) -> None:
        body = {"prompt": "hi", "stop": [", w", "zz"], "return_token_ids": True}
        choice = (await http.post(TEXT, json=body)).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Hello", "stop", ", w")
        assert bytes(choice["token_ids"]) == b"Hello, w"
        streamed = events((await http.post(TEXT, json=body | {"stream": True})).text)
        assert "".join(c["choices"][0]["text"] for c in streamed) == "Hello"
        assert streamed[-1]["choices"][0]["stop_reason"] == ", w"

    async def test_ignore_eos(self, http: httpx.AsyncClient) -> None:
        answer = (await http.post(TEXT, json={"prompt": "hi", "ignore_eos": True, "max_tokens": 20})).json()
        assert answer["usage"]["completion_tokens"] == 20
        assert answer["choices"][0]["finish_reason"] == "length"

    async def test_headers_and_usage_of_a_stream(self, http: httpx.AsyncClient) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        answer = await http.post(CHAT, json={"messages": HI, "stream": True, "stream_options": options})
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-request-id"].startswith("req_")
        chunks = events(answer.text)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 13
        assert chunks[-1]["metrics"]["first_token_ms"] == 4.0

    async def test_usage_is_null_in_other_chunks(self, http: httpx.AsyncClient) -> None:
        body = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}}
        chunks = events((await http.post(CHAT, json=body)).text)
        assert {chunk["usage"] for chunk in chunks[:-1]} == {None}
        assert "usage" not in events((await http.post(CHAT, json={"messages": HI, "stream": True})).text)[-1]

    async def test_an_error_in_the_stream_ends_it_with_done(self, http: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.auto = False
        task = asyncio.create_task(http.post(CHAT, json={"messages": HI, "stream": True}))
        await engine.submit_seen.wait()
        engine.step()
        engine.finish(
            engine.submitted[0].request_id, FinishReason.ERROR, error_code="not_finite", error_message="not finite"
        )
        answer = await task
        assert answer.status_code == 200
        last = events(answer.text)[-1]
        assert last == {"error": {"message": "not finite", "type": "server_error", "param": None, "code": "not_finite"}}

    async def test_behind_the_headers_an_error_brings_its_own_hint(
        self, http: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.auto = False
        task = asyncio.create_task(http.post(CHAT, json={"messages": HI, "stream": True}))
        await engine.submit_seen.wait()
        engine.die()
        error = events((await task).text)[-1]["error"]
        assert (error["code"], error["retry_after_ms"]) == ("engine_lost", 5000)

    async def test_unknown_fields_can_be_ignored(self, engine: FakeEngine) -> None:
        service = make_service(engine, allow_unknown_fields=True)
        transport = httpx.ASGITransport(open_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answer = await client.post(CHAT, json={"messages": HI, "mirostat": 2})
        assert answer.status_code == 200
        assert answer.headers["x-headrace-ignored-fields"] == "mirostat"

    async def test_chunks_of_many_tokens(self, http: httpx.AsyncClient) -> None:
        options = {"chunk_tokens": 5, "chunk_ms": 10_000, "include_usage": True}
        body = {"messages": HI, "stream": True, "return_token_ids": True, "stream_options": options}
        *chunks, last = events((await http.post(CHAT, json=body)).text)
        choices = [chunk["choices"][0] for chunk in chunks]
        assert "".join(choice["delta"]["content"] for choice in choices) == "Hello, world"
        assert all(len(choice["token_ids"]) >= 5 for choice in choices[:-1])
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
        assert last["usage"]["completion_tokens"] == 13

    async def test_padded_chunks_have_one_size(self, http: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.reply = b'a"b\nc\x07d'
        body = {"prompt": "hi", "stream": True, "stream_options": {"include_obfuscation": True}}
        text = (await http.post(TEXT, json=body)).text
        assert "".join(chunk["choices"][0]["text"] for chunk in events(text)) == 'a"b\nc\x07d'
        sizes = [len(line) for line in text.split("\n\n") if '"obfuscation":' in line]
        assert len(sizes) == len(events(text)) >= 3
        assert len(set(sizes[:-1])) == 1, "all but the end, which has its finish_reason"
        del body["stream_options"]
        assert '"obfuscation":' not in (await http.post(TEXT, json=body)).text

    async def test_stream_options_need_a_stream(self, http: httpx.AsyncClient) -> None:
        answer = await http.post(CHAT, json={"messages": HI, "stream_options": {"include_usage": True}})
        assert answer.json()["error"]["code"] == "conflicting_fields"

    @pytest.mark.parametrize(
        "raw",
        [
            b"", b"{", b"[]", b"5", b"null", b'"x"', b'{"prompt":"x"}x', b"\xef\xbb\xbf{}", b'{"prompt":"\xff"}',
            '{"prompt":"x"}'.encode("utf-16"), b'{"prompt":"emoji \\ud83d"}', b'{"prompt":"\\udcf0"}',
            b'{"prompt":"x","max_tokens":1,"max_tokens":5}', b'{"prompt":"x","temperature":NaN}',
            b'{"prompt":"x","temperature":1e999}', b'{"prompt":"x","temperature":-Infinity}',
            b"[" * 20_000, b"[" * 1_000_000, b'{"a":' * 20_000, b'{"' + b"k" * 1_000_000 + b'":1}', b'{"\\u0000":1}',
        ],
    )  # fmt: skip
    async def test_bodies_that_are_no_strict_json(self, http: httpx.AsyncClient, raw: bytes) -> None:
        answer = await http.post(TEXT, content=raw, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert len(answer.content) < 1000

    async def test_a_proper_pair_and_a_nul_pass(self, http: httpx.AsyncClient) -> None:
        body = b'{"prompt":"\\ud83d\\ude00\\u0000","return_token_ids":true}'
        answer = await http.post(TEXT, content=body, headers={"content-type": "application/json; charset=utf-8"})
        assert bytes(answer.json()["choices"][0]["prompt_token_ids"]) == "😀\0".encode()

    @pytest.mark.parametrize(
        ("method", "path", "status"),
        [
            ("GET", CHAT, 405),
            ("PUT", TEXT, 405),
            ("POST", "/v1/nothing", 404),
            ("GET", "/v1", 404),
            ("POST", "/livez", 405),
        ],
    )
    async def test_paths_and_methods(self, http: httpx.AsyncClient, method: str, path: str, status: int) -> None:
        answer = await http.request(method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    @pytest.mark.parametrize(
        "kind", ["", "text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-16"]
    )
    async def test_other_content_types_are_refused(self, http: httpx.AsyncClient, kind: str) -> None:
        answer = await http.post(TEXT, content=b'{"prompt":"x"}', headers={"content-type": kind})
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")

    async def test_large_bodies_are_refused_by_their_size(self, engine: FakeEngine) -> None:
        service = make_service(engine, max_body_bytes=1000)
        transport = httpx.ASGITransport(open_app(service))

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield b" " * 500

        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            kind = {"content-type": "application/json"}
            for content in (b" " * 1001, pieces()):
                answer = await client.post(TEXT, content=content, headers=kind)
                assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")

    async def test_a_fault_of_ours_says_nothing_of_itself(self, http: httpx.AsyncClient, service: Service) -> None:
        async def broken(*_: object, **__: object) -> None:
            raise RuntimeError("canary")

        service.start = broken  # type: ignore[method-assign,assignment]
        answer = await http.post(TEXT, json={"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
        assert "canary" not in answer.text


class Peer:
    """An ASGI client driven by hand: what it sends is a queue, what it gets is a list."""

    def __init__(self, body: dict[str, object]) -> None:
        self.inbox: asyncio.Queue[dict[str, object]] = asyncio.Queue()
        self.inbox.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})
        self.got: list[Any] = []
        self.news = asyncio.Event()
        self.is_stuck = False

    async def send(self, message: Any) -> None:
        if self.is_stuck:
            await asyncio.Event().wait()
        self.got.append(message)
        self.news.set()

    def start(self, endpoint: GenerateEndpoint) -> asyncio.Task[None]:
        scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
        return asyncio.ensure_future(endpoint(scope, self.inbox.get, self.send))

    @property
    def text(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.got)


async def test_silence_is_filled_with_comments(engine: FakeEngine, service: Service) -> None:
    engine.auto = False
    peer = Peer({"prompt": "x", "stream": True})
    task = peer.start(GenerateEndpoint(service, Endpoint.COMPLETION, keepalive_s=0.001))
    while PING not in peer.text:
        peer.news.clear()
        await peer.news.wait()
    assert peer.got[0]["type"] == "http.response.start"
    for _ in range(13):
        engine.step()
    await task
    assert peer.text.endswith(DONE)
    assert events(peer.text.decode())[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_reader_that_stops_is_cancelled(engine: FakeEngine, service: Service) -> None:
    engine.auto = False
    peer = Peer({"prompt": "x", "stream": True})
    task = peer.start(GenerateEndpoint(service, Endpoint.COMPLETION, write_limit_s=0.01))
    await engine.submit_seen.wait()
    peer.is_stuck = True
    engine.step()
    await task
    assert [reason for _, reason in engine.cancels] == [CancelReason.SLOW_CLIENT]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 5])
async def test_a_disconnect_cancels_at_any_step(engine: FakeEngine, service: Service, stream: bool, steps: int) -> None:
    engine.auto = False
    peer = Peer({"prompt": ["x", "y"], "stream": stream})
    task = peer.start(GenerateEndpoint(service, Endpoint.COMPLETION))
    await engine.submit_seen.wait()
    for _ in range(steps):
        engine.step()
    peer.inbox.put_nowait({"type": "http.disconnect"})
    await task
    assert [reason for _, reason in engine.cancels] == [CancelReason.DISCONNECT] * 2
    assert not peer.text.endswith(DONE)


async def test_a_body_that_never_completes_is_not_answered(service: Service) -> None:
    peer = Peer({})
    peer.inbox.get_nowait()
    peer.inbox.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
    peer.inbox.put_nowait({"type": "http.disconnect"})
    await peer.start(GenerateEndpoint(service, Endpoint.COMPLETION))
    assert peer.got == []


async def test_tokens_of_one_step_share_a_chunk_with_the_end(engine: FakeEngine, service: Service) -> None:
    engine.auto = False
    peer = Peer({"prompt": "x", "stream": True, "max_tokens": 3})
    task = peer.start(GenerateEndpoint(service, Endpoint.COMPLETION))
    await engine.submit_seen.wait()
    for _ in range(3):
        engine.step()
    await task
    chunks = events(peer.text.decode())
    assert [c["choices"][0]["text"] for c in chunks] == ["Hel"]
    assert chunks[0]["choices"][0]["finish_reason"] == "length"
