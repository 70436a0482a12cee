"""JSON text from strangers: strict, bounded, and with duplicate keys found.

``json`` builds the value, because it alone can see repeated keys and keeps large integers whole; ``orjson`` runs
before it as the gate, because it refuses what ``json`` lets pass: NaN, infinities, lone surrogates.
"""

import json
import re
from dataclasses import dataclass

import numpy as np
import orjson

MAX_DEPTH = 64
"""Deepest nesting of arrays and objects."""

MAX_CONTAINERS = 20_000
"""Most arrays and objects of one text: each object costs a Python call, and 4 MiB of "{}," would hold 1.4 million."""

# Possessive quantifiers and an optional end: an unterminated string costs one pass, not one pass per quote in it.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_BRACES_TO_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(c for c in range(256) if c not in b"[]{}")


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
    _check_nesting(data)
    fault: str | None = None
    try:
        orjson.loads(data)
    except orjson.JSONDecodeError as error:
        fault = f"the text is not strict JSON: {error}"
    duplicates: list[str] = []

    def build(pairs: list[tuple[str, object]]) -> dict[str, object]:
        built = dict(pairs)
        if len(built) != len(pairs):
            duplicates.append("an object repeats a key")
        return built

    try:
        value = json.loads(data.decode(), object_pairs_hook=build)
    except (ValueError, RecursionError):
        raise NotJson(fault or "the text is not JSON") from None
    return Parsed(value, fault or (duplicates[0] if duplicates else None))


def _check_nesting(data: bytes) -> None:
    """Raises NotJson for too deep or too many containers; 20 ms for the worst 4 MiB."""
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return
    brackets = _STRING.sub(b"", data).translate(_BRACES_TO_BRACKETS, _NOT_BRACKETS)
    if len(brackets) > 2 * MAX_CONTAINERS:
        raise NotJson(f"the text has more than {MAX_CONTAINERS} arrays and objects")
    steps = ord("\\") - np.frombuffer(brackets, np.uint8).astype(np.int32)  # "[" is 91: +1, "]" is 93: -1
    if len(steps) and int(np.cumsum(steps).max()) > MAX_DEPTH:
        raise NotJson(f"arrays and objects are nested deeper than {MAX_DEPTH}")
