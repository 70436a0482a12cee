"""Plays one broken connection or body to a real server, and holds what comes back against the oracle."""

import asyncio
import json
import random
import re
from contextlib import suppress

from scripts.fuzz import bodies, frames
from scripts.fuzz.oracle import Wrong, check_frame, check_http
from tests.raw_websocket import CLOSE, PING, PONG, TEXT, Lost, RawWebSocket, frame, say

ANSWER_S = 30.0
HANDSHAKE_S = 0.5
"""A head that a mutation left without its end gets no answer before the server's limit of 10 s; nobody waits for it."""
HANDSHAKE_STATUS = frozenset({101, 400, 403, 404, 405, 408, 431, 426, 501, 505})
_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")


async def play_frames(port: int, rng: random.Random, sent: list[bytes]) -> str:
    """One connection of its own; how it ended. sent: gets what was sent, for the report. Raises Wrong or Lost."""
    case = frames.draw_case(rng)
    sent.append(case.sent)
    try:
        return await _connection(port, case)
    except (Lost, OSError):
        if case.outcome.may_reset:
            return "reset behind a close"
        raise


async def _connection(port: int, case: frames.FrameCase) -> str:
    async with RawWebSocket.open(port) as client:
        with suppress(ConnectionError):  # the server may have seen enough before the last piece
            for data, pause_s in case.pieces:
                client.writer.write(data)
                if len(case.pieces) > 1:
                    await asyncio.sleep(pause_s)
            if case.outcome.answers:
                client.writer.write(frame(TEXT, say("ping", t="still there")))
        if case.outcome.is_open and not case.outcome.answers:
            return "left open"
        code = await _until_close(client, case.outcome.answers)
        if code == "answers":
            return code
        if code not in case.outcome.codes:
            raise Wrong(f"closed with {code}; allowed: {sorted(map(str, case.outcome.codes))}")
        if isinstance(code, int) and code >= 4000:
            if case.is_cut:
                return f"close {code}"
            client.send(frame(CLOSE, code.to_bytes(2, "big")))
        if await asyncio.wait_for(client.reader.read(), ANSWER_S):
            raise Wrong("bytes behind the close frame")
        return f"close {code}"


async def _until_close(client: RawWebSocket, answers: bool) -> int | str | None:
    """The code of the close frame; "answers" for the pong that shows that the socket lives."""
    while True:
        received = await client.read()
        if received.opcode == CLOSE:
            return received.close_code
        if received.opcode == TEXT:
            message = json.loads(received.data)
            check_frame(message)
            if answers and message == {"type": "pong", "t": "still there"}:
                return "answers"
        elif received.opcode not in (PING, PONG):
            raise Wrong(f"a frame with opcode {received.opcode}")


async def play_handshake(port: int, rng: random.Random, sent: list[bytes]) -> str:
    head = frames.draw_handshake(rng)
    sent.append(head)
    async with RawWebSocket.tcp(port) as client:
        client.send(head)
        try:
            status, _ = await asyncio.wait_for(client.read_head(), HANDSHAKE_S)
        except TimeoutError:
            return "unanswered"
        except Lost:
            return "cut"
    if status not in HANDSHAKE_STATUS:
        raise Wrong(f"a handshake was answered with {status}")
    return f"status {status}"


async def play_http(port: int, rng: random.Random, sent: list[bytes]) -> str:
    """One request over HTTP; the kind of its answer."""
    case = bodies.draw_body(rng)
    path = bodies.PATHS[case.endpoint]
    line, head, must = "POST {} HTTP/1.1", {"content-type": "application/json"}, case.must
    if rng.random() < 0.06:
        must = "any"
        line, head = rng.choice(
            (
                ("GET {} HTTP/1.1", head),
                ("DELETE {} HTTP/1.1", head),
                ("POST {}x HTTP/1.1", head),
                (line, {}),
                (line, {"content-type": "text/plain"}),
                (line, {"content-type": "application/json; charset=latin-1"}),
                (line, {**head, "accept": "\xff", "origin": "null"}),
                (line, {**head, "host": "evil.example"}),
                (line, {**head, "expect": "100-continue"}),
            )
        )
    headers = {"host": "localhost", "connection": "close", "content-length": str(len(case.text)), **head}
    lines = [line.format(path), *(f"{name}: {value}" for name, value in headers.items())]
    request = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + case.text
    sent.append(request)
    async with RawWebSocket.tcp(port) as client:
        client.send(request)
        status, headers = await client.read_head()
        while status == 100:
            status, headers = await client.read_head()
        body = await asyncio.wait_for(client.reader.read(), ANSWER_S)
    found = check_http(status, headers, _dechunked(body) if "chunked" in headers.get("transfer-encoding", "") else body)
    if must == "ok" and found != "ok":
        raise Wrong(f"a null was answered with {found}: {body[-300:]!r}")
    if must == "refuse":
        _check_refusal(found, case, json.loads(body)["error"]["param"] if status != 200 else None)
    return found if found != "ok" else "200"


def _check_refusal(found: str, case: bodies.BodyCase, param: str | None) -> None:
    if found == "ok":
        raise Wrong(f"a wrong value of {case.param} was taken")
    if case.param is not None and found != "malformed_json" and not str(param).startswith(case.param):
        raise Wrong(f"a wrong value of {case.param} was refused with {found}, which names {param}")


def _dechunked(data: bytes) -> bytes:
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        body += data[:length]
        data = data[length + 2 :]
        if length == 0:
            return body
    raise Wrong("a chunked body without its end")


class StreamPlayer:
    """Bodies over native WebSockets: many on one socket, until one costs it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._context: object | None = None
        self._client: RawWebSocket | None = None
        self._count = 0

    async def close(self) -> None:
        if self._context is not None:
            await self._context.__aexit__(None, None, None)  # type: ignore[attr-defined]
        self._context = self._client = None

    async def play(self, rng: random.Random, sent: list[bytes]) -> str:
        if self._client is None:
            context = RawWebSocket.open(self._port)
            self._client = await context.__aenter__()
            self._context = context
        self._count += 1
        case = bodies.draw_stream_body(rng)
        text = self._envelope(rng, case)
        sent.append(text)
        try:
            found = await self._exchange(self._client, text, f"n{self._count}")
        except BaseException:
            await self.close()
            raise
        if found.startswith("close"):
            await self.close()
        if case.must == "ok" and found != "done" and text == self._good:
            raise Wrong(f"a null was answered with {found}")
        return found

    def _envelope(self, rng: random.Random, case: bodies.BodyCase) -> bytes:
        """The body as a create; one in five with something odd around it."""
        name = f"s{self._count}"
        parts = {"type": '"create"', "id": f'"{name}"', "endpoint": f'"{case.endpoint}"'}
        body = case.text.decode("utf-8", "surrogateescape")
        self._good = _object(parts | {"body": body})
        if rng.random() < 0.8:
            return self._good
        key = rng.choice(("type", "id", "endpoint", "body", "detach", "deadline_ms", "priority", "odd"))
        changed = parts | {"body": body, key: bodies.to_text(bodies.odd_value(rng)).decode("utf-8", "surrogateescape")}
        if rng.random() < 0.3:
            changed.pop(rng.choice(list(changed)))
        text = _object(changed)
        return bodies.mutated(rng, text) if rng.random() < 0.3 else text

    async def _exchange(self, client: RawWebSocket, text: bytes, nonce: str) -> str:
        """Send it, and a ping behind it; read until both are answered."""
        client.send(frame(TEXT, text), frame(TEXT, say("ping", t=nonce)))
        waits_for, ponged, found = _expected_id(text), False, ""
        while True:
            received = await client.read()
            if received.opcode == CLOSE:
                if received.close_code not in (4400, 1007):
                    raise Wrong(f"a message was answered with close {received.close_code}")
                return f"close {received.close_code}"
            if received.opcode != TEXT:
                continue
            message = json.loads(received.data)
            check_frame(message)
            if message == {"type": "pong", "t": nonce}:
                ponged = True
            elif message["type"] == "error":
                found = str(message["error"]["code"])
            elif message["type"] == "done":
                found = "done"
            elif message["type"] == "created":
                waits_for = message["id"]
            if ponged and (found or waits_for is None):
                return found or "no answer"


def _object(parts: dict[str, str]) -> bytes:
    pairs = ",".join(f"{json.dumps(key)}:{value}" for key, value in parts.items())
    return ("{" + pairs + "}").encode("utf-8", "surrogateescape")


def _expected_id(text: bytes) -> str | None:
    """The id of the stream that the message asks for, if it clearly does: its answer may come after the pong."""
    try:
        value = json.loads(text.decode())
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict) and value.get("type") == "create" and isinstance(value.get("id"), str):
        return value["id"] if _ID.match(value["id"]) else None
    return None
