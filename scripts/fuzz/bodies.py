"""Broken request bodies, drawn from the server's own field table, and how strictly each must be answered.

Each field is left out, null, of a wrong type, at an edge, huge, not finite, or odd Unicode; then, of some, bytes of the
JSON text are changed. The values that must be refused are told from the kind of a field, and not by the server's code.
"""

import json
import random
from dataclasses import dataclass
from typing import Any

from headrace.serving.edge.fields import (
    DETOKENIZE_FIELDS,
    FIELDS,
    STREAM_OPTION_FIELDS,
    TOKENIZE_FIELDS,
    Endpoint,
    Field,
    Treatment,
)
from headrace.serving.edge.values import BiasMap, Flag, OnlyDefault, Real, ScalarMap, StopStrings, Text, TokenIds, Whole

PATHS = {
    "chat": "/v1/chat/completions",
    "completion": "/v1/completions",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}
RAW = (
    "1e400", "-1e400", "NaN", "Infinity", "-Infinity", "01", "+1", ".5", "1.", "0x10", "1_000", "'a'", "undefined",
    '"\\x41"', '"\\u12"', '"\\ud83d"', '"\\ude00\\ud83d"', "[1,]", '{"a":1,"a":2}', "/**/1", "9" * 400, "-" + "9" * 30,
    "1e-400", "-0.0", "[" * 70 + "]" * 70, '"' + "\\u0000" * 9 + '"', '"\t"', "nul", "true false", "", "{", '"',
)  # fmt: skip
"""Values as JSON text, some of which are not JSON."""
ODD_TEXT = (
    "", " ", "\x00", "\ud800", "\udc00\ud800", "\ufeff", "\uffff", "\U0010ffff", "\u202e", "a\u0301" * 100, "\u200b",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467", "<|end|>", "<|assistant|>", "{{ 7*7 }}", "%s%n", "../../etc/passwd",
    "' OR 1=1 --", "x" * 5_000, "\n" * 300, "NaN", "null", "true", "1e400", "０１",
)  # fmt: skip
NUMBERS = (
    0, -1, 1, 2, 64, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, 0.5, -0.5, 1e-320, 1e308, -1e308,
)  # fmt: skip
CONTAINERS: tuple[Any, ...] = (
    [], {}, [[]], [{}], {"": 1}, {"a": {"b": [1]}}, [None], ["a", 1, None], [0] * 2_000, {"type": "text"},
    {str(i): i for i in range(150)}, [[[[[[[[1]]]]]]]],
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BodyCase:
    """A body for one endpoint. text: the JSON, or what became of it. must: "ok", "refuse" or "any" typed answer.
    param: the field that a refusal names, where that is certain."""

    endpoint: str
    text: bytes
    must: str
    param: str | None = None


def draw_body(rng: random.Random) -> BodyCase:
    endpoint = rng.choices(tuple(PATHS), (40, 40, 12, 8))[0]
    return _draw(rng, endpoint)


def draw_stream_body(rng: random.Random) -> BodyCase:
    """For the native WebSocket, which has the two endpoints that generate."""
    return _draw(rng, rng.choice(("chat", "completion")))


def base_body(rng: random.Random, endpoint: str) -> dict[str, Any]:
    """A good body whose answer is short."""
    words = " ".join(rng.choices(("river", "mill", "ü", "stone"), k=rng.randrange(1, 8)))
    if endpoint == "tokenize":
        return {"prompt": words}
    if endpoint == "detokenize":
        return {"tokens": list(words.encode())}
    short = {"max_tokens": rng.randrange(1, 4), "temperature": 0}
    if endpoint == "chat":
        return {"messages": [{"role": "user", "content": words}], **short}
    return {"prompt": words, **short}


def fields_of(endpoint: str) -> tuple[Field, ...]:
    if endpoint == "tokenize":
        return TOKENIZE_FIELDS
    if endpoint == "detokenize":
        return DETOKENIZE_FIELDS
    return tuple(item for item in FIELDS if Endpoint(endpoint) in item.endpoints)


def _draw(rng: random.Random, endpoint: str) -> BodyCase:
    body = base_body(rng, endpoint)
    way = rng.choices(("null", "wrong", "odd", "unknown", "missing", "inner", "bytes"), (8, 27, 25, 4, 4, 14, 18))[0]
    if way == "null":
        item = rng.choice([item for item in fields_of(endpoint) if item.name not in body or item.name in _OPTIONAL])
        return _case(endpoint, body | {item.name: None}, "ok")
    if way == "wrong":
        item = rng.choice([item for item in fields_of(endpoint) if surely_wrong(rng, item) is not None])
        return _case(endpoint, body | {item.name: surely_wrong(rng, item)}, "refuse", item.name)
    if way == "unknown":
        name = rng.choice(("temprature", "x", "__proto__", "max-tokens", "\ud800", "a" * 100, "", "Model"))
        return _case(endpoint, body | {name: 1}, "refuse")
    if way == "missing":
        body.pop(next(iter(body)))
        return _case(endpoint, body, "refuse")
    if way == "inner":
        return _inner(rng, endpoint, body)
    for item in rng.choices(fields_of(endpoint), k=rng.choice((1, 1, 2, 3))):
        body[item.name] = odd_value(rng)
    text = to_text(body)
    return BodyCase(endpoint, mutated(rng, text) if way == "bytes" else text, "any")


_OPTIONAL = frozenset({"temperature", "max_tokens"})


def _case(endpoint: str, body: dict[str, Any], must: str, param: str | None = None) -> BodyCase:
    return BodyCase(endpoint, to_text(body), must, param)


def _inner(rng: random.Random, endpoint: str, body: dict[str, Any]) -> BodyCase:
    """Something odd inside of what has a shape of its own."""
    if endpoint == "chat":
        message = body["messages"][0]
        message[rng.choice(("role", "content", "name", "tool_calls", "tool_call_id", "extra"))] = odd_value(rng)
        body["messages"] = rng.choice(([message], [message] * 3, [message, odd_value(rng)], odd_value(rng)))
    elif endpoint == "completion":
        body["prompt"] = rng.choice((odd_value(rng), [odd_value(rng)], [odd_value(rng), "a"], [[odd_value(rng)]]))
    if endpoint in ("chat", "completion") and rng.random() < 0.5:
        option = rng.choice(STREAM_OPTION_FIELDS)
        body |= {"stream": True, "stream_options": {option.name: odd_value(rng)}}
    return _case(endpoint, body, "any")


def surely_wrong(rng: random.Random, item: Field) -> Any:
    """A value that no version of the server may take for this field; None where its kind does not say."""
    number = ("1", True, [], {}, [1])
    match item.kind:
        case Flag():
            return rng.choice((0, 1, "true", [], {}, 1.5))
        case Whole(low, high):
            beyond = (low - 1,) if high is None else (low - 1, high + 1)
            return rng.choice((*number, 1.5, 1e300, *beyond))
        case Real(low, high):
            return rng.choice((*number, high + 1, low - 1, 10**400))
        case Text(max_chars):
            return rng.choice((1, True, [], {}, ["a"], *(("x" * (max_chars + 1),) if max_chars < 10_000 else ())))
        case StopStrings(max_items, max_chars):
            return rng.choice((1, True, {}, [1], [""], [["a"]], ["a"] * (max_items + 1), "x" * (max_chars + 1)))
        case TokenIds():
            return rng.choice(("1", 1, {}, [-1], [1.5], ["1"], [True], [2**31], [None]))
        case BiasMap(_, limit):
            return rng.choice(([], "x", 1, {"a": 1}, {"1": "x"}, {"1": limit + 1}, {"-1": 1}, {"1": None}))
        case ScalarMap():
            return rng.choice(([], "x", 1, {"a": []}, {"a": {}}))
        case OnlyDefault() if item.treatment is Treatment.REFUSED:
            return rng.choice(({"odd": [1]}, "\u2603 odd", 123_456, ["odd"]))
    return None


@dataclass(frozen=True, slots=True)
class RawValue:
    """Written into the JSON text as it is."""

    text: str


def odd_value(rng: random.Random) -> Any:
    pool: tuple[Any, ...] = rng.choice((NUMBERS, ODD_TEXT, CONTAINERS, (None, True, False), RAW))
    value = rng.choice(pool)
    if pool is RAW:
        return RawValue(value)
    return "y" * 100_000 if rng.random() < 0.01 else value


def to_text(value: Any) -> bytes:
    """As JSON, with NaN, lone surrogates and raw values as they are."""
    return _written(value).encode("utf-8", "surrogatepass")


def _written(value: Any) -> str:
    if isinstance(value, RawValue):
        return value.text
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{_written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) and _is_whole(value) else json.dumps(value)


def _is_whole(text: str) -> bool:
    return not any(0xD800 <= ord(char) < 0xE000 for char in text)


def mutated(rng: random.Random, text: bytes) -> bytes:
    """A few bytes changed, put in, taken out or doubled; or the end cut off."""
    data = bytearray(text)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.randrange(len(data) + 1)
        way = rng.randrange(5)
        if way == 0 and at < len(data):
            data[at] = rng.choice((rng.randrange(256), data[at] ^ (1 << rng.randrange(8))))
        elif way == 1:
            data[at:at] = rng.choice(
                (rng.randbytes(1), b'"', b"{", b"}", b",", b":", b"\\", b"\xed\xa0\x80", b"[" * 80)
            )
        elif way == 2:
            del data[at : at + rng.choice((1, 2, 9))]
        elif way == 3:
            data[at:at] = data[at : at + 20]
        elif rng.random() < 0.3:
            del data[at:]
    return bytes(data)
