"""What is a message, what is refused, and what costs the client its socket."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.serving.edge import messages
from headrace.serving.edge.messages import Cancel, Create, Fatal, Hello, Invalid, Ping, Resume, decode

CREATE = '{"type":"create","id":"r1","endpoint":"chat","body":BODY}'
GOOD_IDS = ["a", "r1", "A.b-c_D", "x" * 64, "__proto__", "..", "-"]
BAD_IDS = ["", "x" * 65, "a b", "a\n", "a\0", "é", "🙂", "a/b", "../a", "%s", "x" * 1_000_000, None, 5, ["a"], {}]


def create(**changes: object) -> str:
    return json.dumps({"type": "create", "id": "r1", "endpoint": "chat", "body": {"a": 1}} | changes)


def refusal(text: str) -> Invalid:
    with pytest.raises(Invalid) as caught:
        decode(text)
    return caught.value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"type":"hello"}', Hello()),
        ('{"type":"hello","token":"k","client":"page/1"}', Hello(token="k", client="page/1")),
        ('{"type":"cancel","id":"a"}', Cancel(id="a")),
        ('{"type":"resume","session":"s","id":"a"}', Resume(session="s", id="a")),
        ('{"type":"resume","session":"s","id":"a","after":0}', Resume(session="s", id="a", after=0)),
        ('{"type":"ping"}', Ping()),
        ('{"type":"ping","t":1.5}', Ping(t=1.5)),
        ('{"type":"ping","t":"x","unknown":[1]}', Ping(t="x")),
        (' \n{"id":"a","type":"cancel"}\t', Cancel(id="a")),
    ],
)
def test_good_messages(text: str, expected: object) -> None:
    assert decode(text) == expected


@pytest.mark.parametrize("stream_id", GOOD_IDS)
def test_good_ids(stream_id: str) -> None:
    message = decode(create(id=stream_id))
    assert isinstance(message, Create) and message.id == stream_id and message.body == {"a": 1}


@pytest.mark.parametrize("stream_id", BAD_IDS, ids=lambda value: repr(value)[:12])
def test_bad_ids_are_refused_and_not_repeated(stream_id: object) -> None:
    invalid = refusal(create(id=stream_id))
    assert invalid.error.code in ("invalid_id", "invalid_type")
    assert invalid.error.param == "id"
    assert invalid.named_id is None and not invalid.is_create
    assert len(invalid.error.message) < 200


@pytest.mark.parametrize(
    ("text", "code", "param"),
    [
        ("{}", "missing_field", "type"),
        ('{"type":7}', "unknown_type", "type"),
        ('{"type":"shout"}', "unknown_type", "type"),
        ('{"type":"cancel"}', "missing_field", "id"),
        (create(endpoint="embedding"), "invalid_value", "endpoint"),
        (create(endpoint=None), "invalid_type", "endpoint"),
        (create(body=[1]), "invalid_type", "body"),
        (create(body="{}"), "invalid_type", "body"),
        (create(detach="yes"), "invalid_type", "detach"),
        (create(deadline_ms=0), "invalid_value", "deadline_ms"),
        (create(deadline_ms=600_001), "invalid_value", "deadline_ms"),
        (create(deadline_ms=1.5), "invalid_type", "deadline_ms"),
        (create(deadline_ms=True), "invalid_type", "deadline_ms"),
        (create(priority=0), "invalid_type", "priority"),
        (create(priority="urgent"), "invalid_value", "priority"),
        ('{"type":"resume","session":"s","id":"a","after":-1}', "invalid_value", "after"),
        ('{"type":"resume","session":"s","id":"a","after":1.5}', "invalid_type", "after"),
        ('{"type":"resume","session":"%s","id":"a"}' % ("s" * 65), "invalid_value", "session"),
        ('{"type":"ping","t":{}}', "invalid_type", "t"),
        ('{"type":"ping","t":true}', "invalid_type", "t"),
        ('{"type":"ping","t":99999999999999999999999}', "invalid_value", "t"),
        ('{"type":"hello","token":7}', "invalid_type", "token"),
        ('{"type":"hello","client":"a\\nb"}', "invalid_value", "client"),
    ],
)
def test_refused_by_field(text: str, code: str, param: str) -> None:
    invalid = refusal(text)
    assert (invalid.error.code, invalid.error.param) == (code, param)


def test_defaults_of_refused_fields_are_accepted() -> None:
    assert isinstance(decode(create(deadline_ms=None, priority=None, detach=True)), Create)


@pytest.mark.parametrize(
    "body",
    [
        '{"prompt":"emoji \\ud83d"}',
        '{"prompt":"\\udcf0"}',
        '{"t":NaN}',
        '{"t":-Infinity}',
        '{"t":1e999}',
        '{"max_tokens":1,"max_tokens":5}',
        '{"a":{"b":1,"\\u0062":2}}',
    ],
)
def test_readable_but_refused_json_keeps_the_socket(body: str) -> None:
    invalid = refusal(CREATE.replace("BODY", body))
    assert invalid.error.code == "malformed_json" and invalid.error.status == 400
    assert invalid.named_id == "r1" and invalid.is_create


def test_a_whole_surrogate_pair_passes() -> None:
    message = decode('{"type":"create","id":"r1","endpoint":"chat","body":{"prompt":"\\ud83d\\ude00 \\u0000"}}')
    assert isinstance(message, Create) and message.body == {"prompt": "😀 \0"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "[]",
        "7",
        "null",
        '"x"',
        '{"type":"ping"',
        '{"type":"ping"} x',
        '{"type":"ping"}{"type":"ping"}',
        '\ufeff{"type":"ping"}',
        "{'type':'ping'}",
        '{"type":"ping","t":"a\nb"}',
        "\ud83d",
        "[" * 20_000,
        "[" * 1_000_000,
        '{"a":' * 100_000,
        '{"type":"ping","t":' + "[" * 65 + "]" * 65 + "}",
        "[" + "{}," * 30_000 + "{}]",
        "1" * 100_000,
        "x" * (messages.MAX_FRAME_BYTES + 1),
    ],
    ids=lambda text: repr(text[:20]),
)
def test_what_is_not_an_object_of_json_is_fatal(text: str) -> None:
    with pytest.raises(Fatal) as caught:
        decode(text)
    assert len(str(caught.value)) < 300


def test_depth_64_is_allowed_in_a_frame() -> None:
    body = '{"a":' * 62 + "{}" + "}" * 62
    assert isinstance(decode(CREATE.replace("BODY", body)), Create)
    with pytest.raises(Fatal, match="64"):
        decode(CREATE.replace("BODY", f'{{"a":{body}}}'))


def test_brackets_in_strings_are_not_nesting() -> None:
    text = create(body={"prompt": '[{"\\' * 50_000})
    assert isinstance(decode(text), Create)


def test_errors_never_repeat_what_was_sent() -> None:
    secret = "S3CRET"
    for text in (create(endpoint=secret), create(body=secret), create(detach=secret), create(id=secret + " ")):
        assert secret not in refusal(text).error.message
    assert secret not in refusal(json.dumps({"type": secret})).error.message


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "id", "t", "x"]) | st.text(), inner)
        ),
        max_leaves=8,
    )
)
def test_any_value_decodes_or_is_refused(value: object) -> None:
    with suppress(Fatal, Invalid):
        decode(json.dumps(value))


@given(st.text())
def test_any_text_decodes_or_is_refused(text: str) -> None:
    with suppress(Fatal, Invalid):
        decode(text)


def test_encoding_leaves_out_what_was_not_asked_for() -> None:
    delta = messages.Delta(id="a", seq=1, index=0, text="é\n", n=2)
    assert json.loads(messages.encode(delta)) == {
        "type": "delta", "id": "a", "seq": 1, "index": 0, "text": "é\n", "n": 2,
    }  # fmt: skip
