"""JSON text from strangers: strict, bounded, and with duplicate keys found.

``json`` builds the value, because it alone can see repeated keys and keeps large integers whole; ``orjson`` runs
before it as the gate, because it refuses what ``json`` lets pass: NaN, infinities, lone surrogates.
"""

import json
from dataclasses import dataclass

import numpy as np
import orjson

MAX_DEPTH = 64
"""Deepest nesting of arrays and objects."""

MAX_CONTAINERS = 20_000
"""Most arrays and objects of one text: each object costs a Python call, and 4 MiB of "{}," would hold 1.4 million."""

MAX_KEYS = 65_536
"""Most keys of one text, over all objects: 4 MiB of them take 0.4 s, twice as long as anything else of that size."""

_OPENS, _CLOSES, _COLON = 1, -1, 2
_KIND = np.zeros(256, np.int8)
_KIND[list(b"[{")], _KIND[list(b"]}")], _KIND[list(b":")] = _OPENS, _CLOSES, _COLON


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
    _check_structure(data)
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


def _check_structure(data: bytes) -> None:
    """Raises NotJson for too deep, too many containers or too many keys; the same 30 ms for any 4 MiB."""
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH and data.count(b":") <= MAX_KEYS:
        return
    without_escapes = data.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
    text = np.frombuffer(without_escapes, np.uint8)
    is_outside = ~np.cumsum(text == ord('"'), dtype=np.uint8) & 1
    kinds = _KIND[text] * is_outside.view(np.int8)
    kinds = kinds[kinds != 0]
    if np.count_nonzero(kinds == _COLON) > MAX_KEYS:
        raise NotJson(f"the text has more than {MAX_KEYS} keys")
    if np.count_nonzero(kinds == _OPENS) > MAX_CONTAINERS:
        raise NotJson(f"the text has more than {MAX_CONTAINERS} arrays and objects")
    depths = np.cumsum(kinds[kinds != _COLON], dtype=np.int32)
    if len(depths) and int(depths.max()) > MAX_DEPTH:
        raise NotJson(f"arrays and objects are nested deeper than {MAX_DEPTH}")
