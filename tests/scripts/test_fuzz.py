"""The fuzzers against the edge in this process, a few hundred cases; and their oracles, which must find faults."""

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from headrace.serving.edge.bodies import parse_body
from headrace.serving.edge.errors import ApiError, ErrorCode
from headrace.serving.edge.fields import Endpoint
from headrace.serving.edge.http_json import parse_object
from scripts.fuzz.bodies import draw_stream_body, odd_value, to_text
from scripts.fuzz.frames import FrameCase, Outcome, Reader, WireFrame, draw_case
from scripts.fuzz.oracle import Wrong, check_error, check_frame, check_http
from scripts.fuzz.play import play_frames, play_handshake
from tests.raw_websocket import CLOSE, CONT, PING, TEXT
from tests.serving.edge.live_edge import running_edge

NO = (False, False)
NUM_CONNECTIONS, NUM_HANDSHAKES, NUM_BODIES = 300, 40, 2_000


async def test_broken_connections_end_as_the_model_says_and_the_server_goes_on() -> None:
    ends: Counter[str] = Counter()

    async def play(number: int) -> None:
        sent: list[bytes] = []
        rng = random.Random(f"gate/{number}")
        way = play_handshake if number < NUM_HANDSHAKES else play_frames
        try:
            ends[await way(edge.port, rng, sent)] += 1
        except Exception as error:
            raise AssertionError(f"case {number}: {error!r} after {sent}") from error

    async with running_edge() as edge:
        for start in range(0, NUM_CONNECTIONS, 10):
            await asyncio.gather(*(play(number) for number in range(start, start + 10)))
        async with edge.opened() as client:
            await client.create("r", text="still served")
            assert (await client.until_end("r"))[-1]["type"] == "done"
    assert {"answers", "left open", "close 1002", "close 1007", "close 1009", "close 4400", "status 400"} <= ends.keys()


def test_every_body_is_taken_or_refused_with_a_typed_error() -> None:
    """And as strictly as the fuzzer is certain of."""
    codes: Counter[str] = Counter()
    for number in range(NUM_BODIES):
        case = draw_stream_body(random.Random(f"gate/{number}"))
        try:
            parse_body(Endpoint(case.endpoint), parse_object(case.text))
            code, param = "ok", None
        except ApiError as error:
            code, param = check_error(error.body()["error"], error.status), error.param
        codes[code] += 1
        if case.must == "ok":
            assert code == "ok", (number, case)
        if case.must == "refuse":
            assert code != "ok", (number, case)
            assert case.param is None or code == "malformed_json" or str(param).startswith(case.param), (number, case)
    assert codes["ok"] > NUM_BODIES / 20 and len(codes) >= 7


@pytest.mark.parametrize(
    ("frames", "outcome"),
    [
        ([WireFrame(opcode=PING)], Outcome(frozenset(), True, True)),
        ([WireFrame(opcode=TEXT, data=b"{", fin=False)], Outcome(frozenset(), True, False)),
        ([WireFrame(opcode=CONT)], Outcome(frozenset({1002}), False, False)),
        ([WireFrame(opcode=TEXT, data=b"\xff"), WireFrame(opcode=3)], Outcome(frozenset({1007, 1002}), False, False)),
        ([WireFrame(opcode=TEXT, data=b"[]")], Outcome(frozenset({4400}), False, False)),
        ([WireFrame(opcode=CLOSE, data=b"\x0f\xa0"), WireFrame(opcode=PING)], Outcome(frozenset({4000}), *NO, True)),
        ([WireFrame(opcode=TEXT, claimed=1 << 40)], Outcome(frozenset({1009}), False, False)),
        ([WireFrame(opcode=PING, data=b"x", claimed=5)], Outcome(frozenset(), True, False)),
    ],
)  # fmt: skip
def test_the_model_of_connections(frames: list[WireFrame], outcome: Outcome) -> None:
    assert Reader().run(frames) == outcome


def test_a_seed_draws_the_same_cases() -> None:
    def drawn() -> list[FrameCase]:
        return [draw_case(random.Random(f"1/{number}")) for number in range(50)]

    assert drawn() == drawn()
    assert len({case.sent for case in drawn()}) > 45
    assert [odd_value(random.Random(n)) for n in range(50)] == [odd_value(random.Random(n)) for n in range(50)]


def error(code: str = "invalid_type", **changes: Any) -> dict[str, Any]:
    return {"message": "x must be y.", "type": "invalid_request_error", "param": "x", "code": code} | changes


def test_the_oracle_takes_what_is_typed_and_nothing_else() -> None:
    assert check_error(error(), 400) == "invalid_type"
    for wrong, status in (
        (error(), 500),
        (error(ErrorCode.INTERNAL, type="server_error"), 500),
        (error("step_failed"), 500),
        (error(type="server_error"), 400),
        (error(message=""), 400),
        (error(extra=1), 400),
        ("Internal Server Error", 500),
    ):
        with pytest.raises(Wrong):
            check_error(wrong, status)
    json_kind = {"content-type": "application/json"}
    assert check_http(200, json_kind, b'{"choices":[]}') == "ok"
    for status, headers, body in (
        (500, {"content-type": "text/plain"}, b"Internal Server Error"),
        (200, json_kind, b""),
        (200, json_kind, to_text({"error": error()})),
        (200, {"content-type": "text/event-stream"}, b'data: {"choices":[]}\n\n'),
        (404, json_kind, b"{}"),
    ):
        with pytest.raises(Wrong):
            check_http(status, headers, body)
    check_frame({"type": "error", "id": None, "status": 400, "error": error()})
    with pytest.raises(Wrong):
        check_frame({"type": "error", "id": None, "status": 200, "error": error()})
