"""O12: text that is no JSON, or no Unicode, or far too deep, is refused with a type; nothing recurses, nothing dies."""

import json
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed

from tests.cases.case_client import TIMEOUT_S, CaseClient, strict
from tests.live import LiveServer

pytestmark = pytest.mark.usefixtures("checks")

MALFORMED = {
    "half a pair": rb'{"prompt":"emoji \ud83d"}',
    "second half": rb'{"prompt":"\udcf0"}',
    "halves in the wrong order": rb'{"prompt":"\ude00\ud83d"}',
    "half a pair in a key": rb'{"prompt":"x","\ud83d":1}',
    "20,000 brackets": b"[" * 20_000,
    "a million brackets": b"[" * 1_000_000,
    "a million closed brackets": b'{"prompt":' + b"[" * 500_000 + b"]" * 500_000 + b"}",
    "a million objects": b'{"a":' * 700_000,
    "a repeated key": b'{"prompt":"x","max_tokens":1,"max_tokens":5}',
    "a repeated key within": b'{"prompt":"x","logit_bias":{"5":1,"5":2}}',
    "something behind it": b'{"prompt":"x","max_tokens":1}{}',
    "a byte order mark": b'\xef\xbb\xbf{"prompt":"x","max_tokens":1}',
    "UTF-16": '{"prompt":"x","max_tokens":1}'.encode("utf-16"),
    "no UTF-8": b'{"prompt":"\xff","max_tokens":1}',
    "a raw NUL": b'{"prompt":"a\x00b","max_tokens":1}',
    "a list": b'[{"prompt":"x"}]',
    "a number": b"5",
    "a string": b'"x"',
    "null": b"null",
    "nothing": b"",
}
MAX_GROWTH_KB = 128 << 10
"""Of the edge, for bodies of at most 3.5 MB."""


def peak_kb(process_id: int) -> int:
    """The most memory that the process has had."""
    status = Path(f"/proc/{process_id}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def test_over_http_each_is_a_bad_request(client: CaseClient, live_server: LiveServer) -> None:
    before_kb = peak_kb(live_server.process.pid)
    for body in MALFORMED.values():
        refusal = client.refusal("completion", body)
        assert (refusal.status, refusal.code) == (400, "malformed_json"), body[:50]
        assert len(refusal.message) < 300
    assert peak_kb(live_server.process.pid) - before_kb < MAX_GROWTH_KB


def test_in_the_body_of_a_create_the_socket_stays_open(client: CaseClient) -> None:
    """What is readable but not strict costs its own stream only."""
    for name in ("half a pair", "second half", "halves in the wrong order", "half a pair in a key", "a repeated key"):
        (frame,) = client.frames("completion", MALFORMED[name].decode())
        assert (frame["type"], frame["error"]["code"]) == ("error", "malformed_json"), name


def test_what_is_beyond_reading_closes_its_socket_as_documented(client: CaseClient) -> None:
    """4400 for text that is no JSON object, and 1007, by the WebSocket standard, for text that is not UTF-8."""
    unreadable = ["20,000 brackets", "a million brackets", "a million objects", "something behind it"]
    unreadable += ["a byte order mark", "a raw NUL", "a list", "a number", "a string", "null", "nothing"]
    for name in unreadable:
        with client.welcomed() as socket:
            socket.send(MALFORMED[name].decode())
            with pytest.raises(ConnectionClosed) as closed:
                socket.recv(TIMEOUT_S)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 4400, name
    with client.welcomed() as socket:
        socket.send(MALFORMED["no UTF-8"], text=True)
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(TIMEOUT_S)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1007


def test_keys_that_nobody_has(client: CaseClient) -> None:
    """Neither a NUL nor a megabyte of a key is shown again."""
    for key in ("a\0b", "k" * 1_000_000, "", "__proto__", "\N{REPLACEMENT CHARACTER}"):
        refusal = client.refused_alike("completion", {"prompt": "x", "max_tokens": 1, key: 1})
        assert (refusal.status, refusal.code) == (400, "unknown_field")
        assert len(refusal.message) < 200
        assert "\0" not in refusal.message


def test_a_proper_pair_and_a_nul_are_text(client: CaseClient) -> None:
    """The control: escapes that do mean something."""
    for escaped, ids in ((r"\ud83d\ude00", [10813, 242, 218]), (r"a\u0000b", client_ids(client, "a\0b"))):
        body = f'{{"prompt":"{escaped}","max_tokens":1,"return_token_ids":true}}'
        answer = strict(client.post("completion", body.encode()).content)
        assert answer["choices"][0]["prompt_token_ids"] == ids


def client_ids(client: CaseClient, text: str) -> list[int]:
    answer = client.http.post(
        "/tokenize", content=json.dumps({"prompt": text}), headers={"content-type": "application/json"}
    )
    ids: list[int] = strict(answer.content)["tokens"]
    return ids
