"""Streams of a session without sockets: frames, merging, turns, ids, cancel."""

import json

import pytest

from headrace.serving.core.plan import TokenLogprobs
from headrace.serving.core.request import CancelReason, FinishReason
from headrace.serving.edge.bodies import JobOptions
from headrace.serving.edge.errors import ApiError, ErrorCode
from headrace.serving.edge.fields import Endpoint
from tests.serving.edge.scripted import Script
from tests.serving.edge.session_peer import ALICE, Host, Peer, codes, kinds, opened

# Streams


def test_one_stream() -> None:
    peer = opened()
    script = peer.create("r1")
    assert peer.read() == [
        {
            "type": "created", "id": "r1", "seq": 0, "request_id": "req_" + "0" * 32, "model": "scripted",
            "created": 1, "queue_depth": 0, "choices": 1, "contract": "fp_test",
        }
    ]  # fmt: skip
    script.tokens(b"He")
    assert peer.read() == [{"type": "delta", "id": "r1", "seq": 1, "index": 0, "text": "He", "n": 2}]
    script.tokens(b"y")
    script.finish(FinishReason.STOP, stop_token_id=9)
    assert peer.read() == [
        {"type": "delta", "id": "r1", "seq": 2, "index": 0, "text": "y", "n": 1},
        {
            "type": "done", "id": "r1", "seq": 3,
            "choices": [{"index": 0, "finish_reason": "stop", "stop_reason": 9}],
            "usage": {
                "prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6,
                "prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": {"reasoning_tokens": 0},
            },
            "metrics": {
                "queue_ms": 1.0, "prefill_ms": 2.0, "first_token_ms": 4.0, "decode_ms": 3.0, "preemptions": 0,
                "preempted_ms": 0.0, "preempted": [], "cached_tokens": 0,
            },
            "contract": "fp_test",
        },
    ]  # fmt: skip
    assert peer.session.num_streams == 0


def test_output_nobody_takes_is_merged_and_each_stream_has_its_turn() -> None:
    peer = opened()
    one, two = peer.create("one"), peer.create("two")
    peer.read()
    for _ in range(1000):
        one.tokens(b"a")
    two.tokens(b"b")
    first, second = peer.read(2)
    assert (first["id"], first["n"], first["text"]) == ("one", 1000, "a" * 1000)
    one.tokens(b"a")
    assert (second["id"], second["n"]) == ("two", 1)
    assert [(frame["id"], frame["seq"], frame["n"]) for frame in peer.read()] == [("one", 2, 1)]


def test_a_busy_stream_does_not_starve_another() -> None:
    peer = opened()
    scripts = [peer.create(name) for name in ("a", "b", "c")]
    peer.read()
    order = []
    for _ in range(4):
        for script in scripts:
            script.tokens(b"x")
        order += [frame["id"] for frame in peer.read(1)]
    assert order == ["a", "b", "c", "a"]


def test_chat_has_its_role_once_and_token_ids_when_asked() -> None:
    peer = opened()
    options = JobOptions(return_token_ids=True, ignored_fields=("foo",))
    peer.send("create", id="r", endpoint="chat", body={})
    script = Script(0, endpoint=Endpoint.CHAT, choices=2, options=options)
    peer.starting["r"].started(script.job)
    script.tokens(b"a", 0)
    script.tokens(b"b", 1)
    created, *deltas = peer.read()
    script.tokens(b"c", 1)
    deltas += peer.read()
    assert created["prompt_token_ids"] == [[1, 2, 3], [1, 2, 3]] and created["ignored_fields"] == ["foo"]
    assert [(d["index"], d.get("role"), d["token_ids"]) for d in deltas] == [
        (0, "assistant", [97]), (1, "assistant", [98]), (1, None, [99]),
    ]  # fmt: skip


def test_merged_logprobs_come_in_frames_of_bounded_size() -> None:
    peer = opened()
    options = JobOptions(return_token_ids=True, logprobs=True)
    script = peer.create("r", script=Script(0, options=options))
    script.tokens(b"x" * 600, logprobs=TokenLogprobs(chosen=-0.5, rank=1, top=()))
    script.finish()
    _, *deltas, done = peer.read()
    assert [delta["n"] for delta in deltas] == [256, 256, 88]
    assert "".join(delta["text"] for delta in deltas) == "x" * 600
    assert all(len(delta["token_ids"]) == len(delta["logprobs"]) == delta["n"] for delta in deltas)
    assert deltas[0]["logprobs"][0]["logprob"] == -0.5 and deltas[0]["logprobs"][0]["token_id"] == ord("x")
    assert [frame["seq"] for frame in (*deltas, done)] == [1, 2, 3, 4]


def test_a_stream_with_choices_ends_once_with_all_of_them() -> None:
    peer = opened()
    script = peer.create("r", script=Script(0, choices=3))
    for index in (2, 0, 1):
        script.tokens(b"x", index)
        script.finish(FinishReason.LENGTH, index)
    frames = peer.read()
    assert kinds(frames) == ["created", "delta", "delta", "delta", "done"]
    assert [choice["index"] for choice in frames[-1]["choices"]] == [0, 1, 2]
    assert frames[-1]["usage"]["completion_tokens"] == 3


def test_one_failed_choice_ends_the_stream_and_stops_the_others() -> None:
    peer = opened()
    script = peer.create("r", script=Script(0, choices=2))
    script.tokens(b"x", 0)
    script.finish(FinishReason.ERROR, 1, error_code="poisoned", error_message="no")
    frames = peer.read()
    assert kinds(frames) == ["created", "delta", "error"] and codes(frames[-1:]) == ["poisoned"]
    assert script.cancels == [CancelReason.CLIENT]
    script.tokens(b"late", 0)
    assert peer.read() == []


def test_a_lost_engine_is_an_error_of_every_stream() -> None:
    peer = opened()
    scripts = [peer.create("a"), peer.create("b")]
    peer.read()
    for script in scripts:
        script.lose()
    assert [(f["id"], f["seq"], f["status"], f["error"]["code"]) for f in peer.read()] == [
        ("a", 1, 503, "engine_lost"), ("b", 1, 503, "engine_lost"),
    ]  # fmt: skip


def test_a_refused_request_is_the_terminal_frame_of_its_stream() -> None:
    peer = opened()
    peer.send("create", id="r", endpoint="chat", body={})
    peer.starting["r"].fail(ApiError(ErrorCode.QUEUE_FULL, "full", retry_after_ms=500))
    (frame,) = peer.read()
    assert (frame["id"], frame["seq"], frame["status"], frame["retry_after_ms"]) == ("r", 0, 429, 500)
    assert frame["error"] == {"type": "overloaded", "code": "queue_full", "message": "full", "param": None}
    peer.create("r").finish()
    assert kinds(peer.read()) == ["created", "done"]


# Ids


def test_a_duplicate_id_is_refused_and_the_live_stream_untouched() -> None:
    peer = opened()
    script = peer.create("r")
    peer.read()
    create = {"type": "create", "id": "r", "endpoint": "chat"}
    for text in (json.dumps(create | {"body": {}}), json.dumps(create)):
        (frame,) = peer.text(text)
        assert frame["id"] is None and frame["id_rejected"] == "r" and "seq" not in frame
    assert peer.frames[-2]["error"]["code"] == "duplicate_id"
    script.tokens(b"x")
    script.finish()
    assert [(frame["type"], frame["seq"]) for frame in peer.read()] == [("delta", 1), ("done", 2)]


def test_an_id_may_be_used_again_at_once_many_times() -> None:
    peer = opened()
    for turn in range(1000):
        script = peer.create("r")
        if turn % 2:
            peer.send("cancel", id="r")
        else:
            script.finish()
        peer.read()
    by_kind = [kind for kind in kinds(peer.frames) if kind != "welcome"]
    assert by_kind == ["created", "done"] * 1000


def test_one_id_on_two_sockets_is_two_streams() -> None:
    host = Host()
    one, two = opened(host=host), opened(host=host)
    first, second = one.create("r"), two.create("r")
    one.send("cancel", id="r")
    assert (first.cancels, second.cancels) == ([CancelReason.CLIENT], [])


def test_too_many_streams() -> None:
    peer = opened(max_streams=2)
    script = peer.create("a")
    peer.create("b")
    peer.read()
    (frame,) = peer.send("create", id="c", endpoint="chat", body={})
    assert (frame["id"], frame["seq"], frame["status"], frame["error"]["code"]) == ("c", 0, 429, "too_many_streams")
    script.finish()
    peer.read()
    peer.create("c")


def test_a_revoked_key_starts_nothing_but_keeps_what_runs() -> None:
    peer = Peer(identity=ALICE)
    peer.read()
    script = peer.create("r")
    peer.read()
    del peer.host.keys["key-a"]
    (refused,) = peer.send("create", id="s", endpoint="chat", body={})
    assert (refused["status"], refused["error"]["code"]) == (401, "invalid_api_key")
    script.finish()
    assert kinds(peer.read()) == ["done"]


# Cancel


@pytest.mark.parametrize("after", range(5))
def test_cancel_at_every_point_ends_once(after: int) -> None:
    peer = opened()
    script = peer.create("r")
    for _ in range(after):
        script.tokens(b"x")
        peer.read()
    peer.send("cancel", id="r")
    peer.send("cancel", id="r")
    script.tokens(b"late")
    done = peer.frames[-1]
    assert done["type"] == "done" and done["choices"][0]["finish_reason"] == "cancelled"
    assert done["usage"]["completion_tokens"] == after
    assert script.cancels == [CancelReason.CLIENT]
    assert peer.send("cancel", id="r") == [], "a cancel that comes too late is not an error"
    assert [f["seq"] for f in peer.frames if f["type"] != "welcome"] == list(range(len(peer.frames) - 1))


def test_cancel_while_preparing_cancels_when_it_starts() -> None:
    peer = opened()
    peer.send("create", id="r", endpoint="chat", body={})
    assert peer.send("cancel", id="r") == []
    script = Script(0)
    peer.starting["r"].started(script.job)
    assert script.cancels == [CancelReason.CLIENT]
    assert kinds(peer.read()) == ["created", "done"]


def test_cancel_races_with_the_last_token() -> None:
    peer = opened()
    script = peer.create("r")
    script.tokens(b"x")
    script.finish(FinishReason.STOP)
    frames = peer.send("cancel", id="r")
    assert frames[-1]["choices"][0]["finish_reason"] == "stop" and script.cancels == []
