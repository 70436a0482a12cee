"""Padding: sizes that say nothing about a token."""

import json
import re

import pytest

from headrace.serving.edge.obfuscation import obfuscation


def size(*parts: object) -> int:
    return sum(len(json.dumps(part, ensure_ascii=False, separators=(",", ":")).encode()) for part in parts)


@pytest.mark.parametrize(
    ("length", "padded"),
    [(0, 32), (1, 32), (30, 32), (31, 64), (62, 64), (63, 128), (4094, 4096), (4095, 8192), (8191, 12_288)],
)
def test_sizes_come_in_steps(length: int, padded: int) -> None:
    assert 2 + length + len(obfuscation("x" * length)) == padded


@pytest.mark.parametrize("parts", [("é🙂", None, None), ('"\n\x01', (1, 49151), []), ("a", [], [{"logprob": -0.1}])])
def test_content_counts_as_json(parts: tuple[object, ...]) -> None:
    assert (size(*parts) + len(obfuscation(*parts))) in (32, 64)


def test_padding_is_random_and_needs_no_escapes() -> None:
    assert obfuscation("abcd", random_bytes=bytes) == "A" * 26
    one, two = obfuscation("abcd"), obfuscation("abcd")
    assert one != two
    assert re.fullmatch(r"[A-Za-z0-9_-]{26}", one)
