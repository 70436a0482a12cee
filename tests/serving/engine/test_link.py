"""Framing and the engine's end of the link, over real socket pairs."""

import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.serving.core.events import Finished, Timings, TokenEvent
from headrace.serving.core.plan import TokenLogprobs
from headrace.serving.core.request import (
    CancelReason,
    FinishReason,
    Rejection,
    RejectionReason,
    Request,
    RequestId,
    SamplingParams,
    StopRule,
)
from headrace.serving.engine.link import (
    EngineLink,
    FrameDecoder,
    LinkClosed,
    LinkError,
    decode_to_edge,
    decode_to_engine,
    encode_frame,
)
from headrace.serving.engine.messages import Cancel, Drain, Failed, Probe, Refused, Starting, Stats, Step, Submit

REQUEST = Request(
    request_id=RequestId(7),
    prompt_ids=(1, 2, 3),
    sampling=SamplingParams(temperature=0.5, logit_bias=((4, -100.0),), allowed_token_ids=(4, 5), num_logprobs=2),
    stop=StopRule(max_tokens=9, stop_token_ids=(2,)),
    cache_namespace=bytes(range(32)),
    tenant="a",
)
STEP = Step(
    step_id=3,
    tokens=(
        TokenEvent(
            request_id=RequestId(7),
            index=0,
            token_id=5,
            logprobs=TokenLogprobs(chosen=-0.25, rank=1, top=((5, -0.25), (6, float("-inf")))),
        ),
    ),
    finished=(
        Finished(
            request_id=RequestId(7),
            reason=FinishReason.CANCELLED,
            prompt_tokens=3,
            completion_tokens=1,
            cached_tokens=0,
            timings=Timings(queue_ms=0.5, prefill_ms=1.0, decode_ms=2.0, first_token_ms=None, preemptions=0),
            cancel_reason=CancelReason.SHUTDOWN,
        ),
    ),
    refused=(),
    stats=Stats(running=1, nonce=None),
)


@pytest.fixture
def pair() -> Iterator[tuple[EngineLink, socket.socket]]:
    engine_end, edge_end = socket.socketpair()
    link = EngineLink(engine_end, send_timeout_s=0.2)
    yield link, edge_end
    link.close()
    edge_end.close()


def read_one(sock: socket.socket) -> bytes:
    decoder = FrameDecoder()
    while True:
        bodies = decoder.feed(sock.recv(1 << 16))
        if bodies:
            return bodies[0]


@pytest.mark.parametrize(
    "message", [Submit(REQUEST), Cancel(RequestId(7), CancelReason.DISCONNECT), Drain(), Probe(4)], ids=repr
)
def test_what_the_edge_sends_arrives_equal(message: object) -> None:
    (body,) = FrameDecoder().feed(encode_frame(message))
    assert decode_to_engine(body) == message


@pytest.mark.parametrize("message", [STEP, Starting("x", 1, 2), Failed("no"), Stats(steps=2, nonce=1)], ids=repr)
def test_what_the_engine_sends_arrives_equal(message: object) -> None:
    (body,) = FrameDecoder().feed(encode_frame(message))
    assert decode_to_edge(body) == message


@given(st.lists(st.binary(max_size=300), max_size=6), st.lists(st.integers(1, 40), min_size=1))
def test_frames_survive_any_cutting(bodies: list[bytes], sizes: list[int]) -> None:
    stream = b"".join(len(b).to_bytes(4, "big") + b for b in bodies)
    decoder = FrameDecoder()
    got: list[bytes] = []
    start = turn = 0
    while start < len(stream):
        size = sizes[turn % len(sizes)]
        got += decoder.feed(stream[start : start + size])
        start, turn = start + size, turn + 1
    assert got == bodies
    assert not decoder.is_inside_frame


def test_a_frame_over_the_limit_is_refused_before_it_is_stored() -> None:
    decoder = FrameDecoder(max_frame_bytes=100)
    assert decoder.feed((100).to_bytes(4, "big") + bytes(100)) == [bytes(100)]
    with pytest.raises(LinkError, match="101 bytes"):
        decoder.feed((101).to_bytes(4, "big"))
    with pytest.raises(LinkError, match="frame limit of 10"):
        encode_frame(Starting("a long text", 0, 1), max_frame_bytes=10)


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x80", encode_frame(Drain())[4:], encode_frame(Failed("x"))[4:-1]], ids=repr
)
def test_a_body_that_is_no_message_is_a_link_error(body: bytes) -> None:
    with pytest.raises(LinkError, match="unreadable"):
        decode_to_edge(body)


def test_commands_arrive_until_the_edge_closes(pair: tuple[EngineLink, socket.socket]) -> None:
    link, edge = pair
    edge.sendall(encode_frame(Submit(REQUEST)) + encode_frame(Drain()))
    edge.close()
    assert [decode_to_engine(body) for body in link.bodies()] == [Submit(REQUEST), Drain()]


def test_an_end_inside_a_frame_is_an_error(pair: tuple[EngineLink, socket.socket]) -> None:
    link, edge = pair
    edge.sendall(encode_frame(Probe(1))[:-1])
    edge.close()
    with pytest.raises(LinkError, match="inside a frame"):
        list(link.bodies())


def test_close_wakes_the_reader(pair: tuple[EngineLink, socket.socket]) -> None:
    link, _ = pair
    reader = threading.Thread(target=lambda: list(link.bodies()), daemon=True)
    reader.start()
    link.close()
    reader.join(10)
    assert not reader.is_alive()


def test_sending_to_a_dead_edge_raises(pair: tuple[EngineLink, socket.socket]) -> None:
    link, edge = pair
    edge.close()
    with pytest.raises(LinkClosed):
        link.send(Failed("x"))


def test_an_edge_that_stops_reading_cannot_hold_the_engine_for_ever(pair: tuple[EngineLink, socket.socket]) -> None:
    link, edge = pair
    big = Failed("x" * 100_000)
    with pytest.raises(LinkClosed, match="send time limit"):
        for _ in range(1000):
            link.send(big)


def test_both_sides_write_at_once_without_deadlock(pair: tuple[EngineLink, socket.socket]) -> None:
    """More than the kernel buffers in both directions; the engine reads on a thread of its own, the edge always
    reads."""
    link, edge = pair
    count = 300
    submit = Submit(REQUEST)
    big = Failed("y" * 20_000)
    got_engine: list[object] = []
    got_edge: list[object] = []

    def engine_reads() -> None:
        got_engine.extend(decode_to_engine(body) for body in link.bodies())

    def edge_reads() -> None:
        decoder = FrameDecoder()
        while len(got_edge) < count:
            got_edge.extend(decode_to_edge(body) for body in decoder.feed(edge.recv(1 << 16)))

    def edge_writes() -> None:
        for _ in range(count * 10):
            edge.sendall(encode_frame(submit))
        edge.shutdown(socket.SHUT_WR)

    threads = [threading.Thread(target=f, daemon=True) for f in (engine_reads, edge_reads, edge_writes)]
    for thread in threads:
        thread.start()
    for _ in range(count):
        link.send(big)
    for thread in threads:
        thread.join(30)
    assert got_edge == [big] * count
    assert got_engine == [submit] * count * 10


def test_frames_of_two_sending_threads_do_not_mix(pair: tuple[EngineLink, socket.socket]) -> None:
    """The reader thread answers Refused while the step loop sends steps."""
    link, edge = pair
    messages = [Failed("a" * 5000), Failed("b" * 7000)]

    def send(message: Failed) -> None:
        for _ in range(100):
            link.send(message)

    threads = [threading.Thread(target=send, args=(m,), daemon=True) for m in messages]
    for thread in threads:
        thread.start()
    decoder = FrameDecoder()
    got: list[object] = []
    while len(got) < 200:
        got += [decode_to_edge(body) for body in decoder.feed(edge.recv(1 << 16))]
    assert sorted(map(repr, got)) == sorted(map(repr, messages * 100))


def test_a_lone_refusal_is_a_message_of_its_own() -> None:
    refused = Refused(RequestId(1), Rejection(reason=RejectionReason.QUEUE_FULL, message="full", retry_after_ms=5))
    (body,) = FrameDecoder().feed(encode_frame(refused))
    assert decode_to_edge(body) == refused
