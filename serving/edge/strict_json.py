"""JSON text from strangers: strict, bounded, and with duplicate keys found.

``orjson`` is the gate, because it refuses what ``json`` lets pass: NaN, infinities, lone surrogates. ``json`` builds
the value of a short text, because it can see repeated keys and keeps large integers whole; for a long one it is too
slow.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

MAX_DEPTH = 64
"""Deepest nesting of arrays and objects."""

MAX_CONTAINERS = 20_000
"""Most arrays and objects of one text: each object costs a Python call, and 4 MiB of "{}," would hold 1.4 million."""

MAX_KEYS = 65_536
"""Most keys of one text, over all objects: 4 MiB of them take 0.4 s, twice as long as anything else of that size."""

MAX_COMMAS = 600_000
"""Most commas of one text: more than as many token ids as may wait by default (524,288) need."""

LONG_BYTES = 64 << 10
"""A longer text has the value that orjson gave it, in which integers beyond 64 bits are floats. Of 4 MiB, json would
hold the interpreter for 260 ms (numbers such as 1.2345678901234567e-300) where orjson takes 20; of 205 kB with 5,000
messages 10 ms, orjson and the search for repeated keys 6."""

_REPEATS = "an object repeats a key"
_NESTED = frozenset((dict, list))
_OPENS, _CLOSES, _COLON, _COMMA = 1, -1, 2, 3
_KIND = np.zeros(256, np.int8)
_KIND[list(b"[{")], _KIND[list(b"]}")] = _OPENS, _CLOSES
_KIND[list(b":")], _KIND[list(b",")] = _COLON, _COMMA
_NO_STRUCTURE = bytes(byte for byte in range(256) if byte not in b'[]{}:,"')

Kinds = np.ndarray[Any, np.dtype[np.int8]]
"""Of brackets, colons and commas, in the order of a text."""


class NotJson(ValueError):
    """The text is not JSON at all, or nested too deep. The message says where, and repeats nothing of the text."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """value: what was read. fault: why it must be refused although it could be read (NaN, a lone surrogate, a
    repeated key); None when it is strict JSON."""

    value: object
    fault: str | None


def parse(text: str | bytes) -> Parsed:
    """Read one JSON value. Linear in the length; recursion is bounded before any parser runs. Raises NotJson."""
    try:
        data = text.encode() if isinstance(text, str) else text
        data.decode()
    except UnicodeError:
        raise NotJson("the text is not UTF-8") from None
    structure = _checked_structure(data)
    is_long = len(data) > LONG_BYTES
    fault: str | None = None
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        fault = f"the text is not strict JSON: {error}"
    else:
        if is_long:
            return Parsed(value, _REPEATS if _repeats_a_key(value, data, structure) else None)
    duplicates: list[str] = []

    def build(pairs: list[tuple[str, object]]) -> dict[str, object]:
        built = dict(pairs)
        if len(built) != len(pairs):
            duplicates.append(_REPEATS)
        return built

    try:
        # A long text comes here only to be refused; its floats are not worth their time.
        value = json.loads(data.decode(), object_pairs_hook=build, parse_float=str if is_long else None)
    except (ValueError, RecursionError):
        raise NotJson(fault or "the text is not JSON") from None
    return Parsed(value, fault or (duplicates[0] if duplicates else None))


def _repeats_a_key(value: object, data: bytes, structure: Kinds | None) -> bool:
    """Whether the value has fewer keys than its text has colons. structure: as far as it is known."""
    num_keys = _num_keys(value)
    if data.count(b":") == num_keys:
        return False
    kinds = _structure(data) if structure is None else structure
    return bool(np.count_nonzero(kinds == _COLON) > num_keys)


def _num_keys(value: object) -> int:
    """Of all objects in it; scalars are passed over at C speed."""
    count, containers = 0, [value]
    while containers:
        container = containers.pop()
        items: Collection[object] = ()
        if isinstance(container, dict):
            count += len(container)
            items = container.values()
        elif isinstance(container, list):
            items = container
        if not _NESTED.isdisjoint(map(type, items)):
            containers.extend(item for item in items if type(item) in _NESTED)
    return count


def _checked_structure(data: bytes) -> Kinds | None:
    """None where counting bytes was enough. Raises NotJson for too deep, or too many containers, keys or commas."""
    if (
        data.count(b"[") + data.count(b"{") <= MAX_DEPTH
        and data.count(b":") <= MAX_KEYS
        and data.count(b",") <= MAX_COMMAS
    ):
        return None
    kinds = _structure(data)
    if np.count_nonzero(kinds == _COMMA) > MAX_COMMAS:
        raise NotJson(f"the text has more than {MAX_COMMAS} commas between values")
    if np.count_nonzero(kinds == _COLON) > MAX_KEYS:
        raise NotJson(f"the text has more than {MAX_KEYS} keys")
    if np.count_nonzero(kinds == _OPENS) > MAX_CONTAINERS:
        raise NotJson(f"the text has more than {MAX_CONTAINERS} arrays and objects")
    depths = np.cumsum(kinds[kinds < _COLON], dtype=np.int32)
    if len(depths) and int(depths.max()) > MAX_DEPTH:
        raise NotJson(f"arrays and objects are nested deeper than {MAX_DEPTH}")
    return kinds


def _structure(data: bytes) -> Kinds:
    """Without what strings hold."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    text = np.frombuffer(data.translate(None, _NO_STRUCTURE), np.uint8)
    is_quote = text == ord('"')
    is_inside = np.cumsum(is_quote, dtype=np.uint8) & 1
    kinds: Kinds = _KIND[text[(is_inside | is_quote) == 0]]
    return kinds
