"""A client of the three doors (a whole answer, server-sent events, the native WebSocket) with one shape of answer."""

import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, TypeVar

import httpx
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from tests.cases.five_checks import only_terminal

Json = dict[str, Any]
Endpoint = Literal["chat", "completion"]
PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
TIMEOUT_S = 120.0
T = TypeVar("T")
R = TypeVar("R")


@dataclass(slots=True)
class Answer:
    """One choice. pieces: the texts of its deltas, and sizes their numbers of tokens; a whole answer is one piece.
    logprobs: as the door has them."""

    finish_reason: str = ""
    stop_reason: str | int | None = None
    usage: Json = field(default_factory=dict)
    pieces: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def outcome(self) -> tuple[object, ...]:
        """What all doors must agree on."""
        usage = (self.usage["prompt_tokens"], self.usage["completion_tokens"])
        return self.text, self.finish_reason, self.stop_reason, usage, self.token_ids, self.prompt_ids


@dataclass(frozen=True, slots=True)
class Refusal:
    """A typed error. status: also inside frames of the WebSocket."""

    status: int
    code: str
    param: str | None
    message: str


class CaseClient:
    """Synchronous; threads may share it."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=TIMEOUT_S)
        self._stream_url = url.replace("http", "ws", 1) + "/v1/stream"

    def __enter__(self) -> "CaseClient":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.http.close()

    # Bytes as they are

    def post(self, endpoint: Endpoint, body: Json | bytes) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.post(PATHS[endpoint], content=content, headers={"content-type": "application/json"})

    def refusal(self, endpoint: Endpoint, body: Json | bytes) -> Refusal:
        """The error that HTTP answers with; strict JSON in OpenAI's shape."""
        answer = self.post(endpoint, body)
        assert answer.status_code != 200, answer.text
        return Refusal(answer.status_code, *_told(strict(answer.content)["error"]))

    def native_refusal(self, endpoint: Endpoint, body: Json) -> Refusal:
        """The error frame that is the one frame of a refused stream; the socket stays open."""
        frames = self.frames(endpoint, body)
        assert [frame["type"] for frame in frames] == ["error"], frames
        return Refusal(frames[0]["status"], *_told(frames[0]["error"]))

    def refused_alike(self, endpoint: Endpoint, body: Json) -> Refusal:
        """The refusal, after checking that HTTP and the WebSocket give the same one."""
        refusal = self.refusal(endpoint, body)
        assert self.native_refusal(endpoint, {k: v for k, v in body.items() if k != "stream"}) == refusal
        return refusal

    # Answers

    def whole(self, endpoint: Endpoint, body: Json) -> Answer:
        answer = self.post(endpoint, body)
        assert answer.status_code == 200, answer.text
        value = strict(answer.content)
        (choice,) = value["choices"]
        made = Answer(choice["finish_reason"], choice["stop_reason"], value["usage"])
        made.pieces.append(choice["text"] if endpoint == "completion" else choice["message"]["content"])
        _add(made, choice)
        made.prompt_ids = choice.get("prompt_token_ids") or value.get("prompt_token_ids", [])
        return made

    def events(self, endpoint: Endpoint, body: Json) -> Answer:
        """Server-sent events: one finish_reason, then the usage, then the end of the answer."""
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        answer = self.post(endpoint, streamed)
        assert answer.status_code == 200, answer.text
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        chunks = [strict(line) for line in lines]
        assert not [chunk for chunk in chunks if "error" in chunk]
        made = Answer(usage=chunks.pop()["usage"])
        kinds = []
        for chunk in chunks:
            (choice,) = chunk["choices"]
            kinds.append("done" if choice["finish_reason"] else "delta")
            made.pieces.append(choice["text"] if endpoint == "completion" else choice["delta"].get("content", ""))
            _add(made, choice)
            made.prompt_ids += choice.get("prompt_token_ids") or chunk.get("prompt_token_ids", [])
            made.finish_reason, made.stop_reason = choice["finish_reason"], choice["stop_reason"]
        assert only_terminal(kinds, ("done",)), kinds
        return made

    def native(self, endpoint: Endpoint, body: Json) -> Answer:
        """The native WebSocket; prompt_ids only with return_token_ids, as with the others."""
        created, *deltas, done = self.frames(endpoint, body)
        assert (created["type"], done["type"]) == ("created", "done"), done
        (end,) = done["choices"]
        made = Answer(end["finish_reason"], end["stop_reason"], done["usage"])
        made.prompt_ids = created.get("prompt_token_ids", [[]])[0]
        for delta in deltas:
            made.pieces.append(delta["text"])
            made.sizes.append(delta["n"])
            made.token_ids += delta.get("token_ids", [])
            made.logprobs += delta.get("logprobs", [])
        return made

    def everywhere(self, endpoint: Endpoint, body: Json) -> list[Answer]:
        """The whole answer, the events and the native stream, after checking that they agree."""
        body = body | {"return_token_ids": True}
        answers = at_once(lambda door: door(endpoint, body), (self.whole, self.events, self.native))
        for answer in answers[1:]:
            assert answer.outcome == answers[0].outcome
        assert answers[0].usage["completion_tokens"] == len(answers[0].token_ids)
        return answers

    def frames(self, endpoint: Endpoint, body: Json | str) -> list[Json]:
        """All frames of one stream on a socket of its own. body: also as JSON text that json.dumps would not write."""
        text = body if isinstance(body, str) else json.dumps(body)
        with self.welcomed() as socket:
            socket.send(f'{{"type":"create","id":"case","endpoint":"{endpoint}","body":{text}}}')
            frames = []
            while not frames or frames[-1]["type"] not in ("done", "error"):
                frames.append(strict(socket.recv(TIMEOUT_S)))
            socket.send('{"type":"ping","t":"behind it"}')
            assert strict(socket.recv(TIMEOUT_S)) == {"type": "pong", "t": "behind it"}
        assert [frame["id"] for frame in frames] == ["case"] * len(frames)
        assert [frame["seq"] for frame in frames] == list(range(len(frames)))
        return frames

    @contextmanager
    def welcomed(self) -> Iterator[ClientConnection]:
        """A native WebSocket that has got its welcome."""
        opening = connect(self._stream_url, subprotocols=[Subprotocol("headrace.v1")], compression=None, proxy=None)
        with opening as socket:
            assert strict(socket.recv(TIMEOUT_S))["type"] == "welcome"
            yield socket


def at_once(call: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """call of each item, four at a time: the rows of the session's server."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(call, items))


def _add(made: Answer, choice: Json) -> None:
    made.token_ids += choice.get("token_ids", [])
    made.sizes.append(len(choice.get("token_ids", [])))
    logprobs = choice.get("logprobs")
    if logprobs is not None:
        made.logprobs += logprobs.get("content", [logprobs])


def _told(error: Json) -> tuple[str, str | None, str]:
    assert set(error) == {"message", "type", "param", "code"}, error
    return error["code"], error["param"], error["message"]


def strict(text: str | bytes) -> Json:
    """JSON as the standard has it: no NaN, no infinities."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    value: Json = json.loads(text, parse_constant=refuse)
    return value
