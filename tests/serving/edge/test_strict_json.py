"""Structure is counted before anything is built: exact limits, and nothing inside a string counts (case O33)."""

import random
import re

import pytest

from headrace.serving.edge.strict_json import MAX_CONTAINERS, MAX_DEPTH, MAX_KEYS, NotJson, parse


def keys(count: int) -> str:
    return "{" + ",".join(f'"{i}":1' for i in range(count)) + "}"


@pytest.mark.parametrize(
    ("at_limit", "beyond", "word"),
    [
        (keys(MAX_KEYS), keys(MAX_KEYS + 1), "keys"),
        ("[" + "[]," * (MAX_CONTAINERS - 2) + "[]]", "[" + "[]," * (MAX_CONTAINERS - 1) + "[]]", "arrays and objects"),
        ("[" * MAX_DEPTH + "]" * MAX_DEPTH, "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested deeper"),
    ],
    ids=["keys", "containers", "depth"],
)
def test_limits_are_exact(at_limit: str, beyond: str, word: str) -> None:
    assert parse(at_limit).fault is None
    with pytest.raises(NotJson, match=word):
        parse(beyond)
    assert parse(f'["{beyond[:200_000].translate(str.maketrans({chr(34): chr(39)}))}", "\\\\"]').fault is None


def test_a_string_without_end_hides_nothing_before_it() -> None:
    with pytest.raises(NotJson, match="nested deeper"):
        parse("[" * 100 + '"' + "]" * 100)


def test_counting_agrees_with_a_slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random texts of brackets, quotes and escapes; a backslash outside a string is no JSON and is left out."""
    limits = {"MAX_DEPTH": 3, "MAX_CONTAINERS": 6, "MAX_KEYS": 5}
    for name, value in limits.items():
        monkeypatch.setattr(f"headrace.serving.edge.strict_json.{name}", value)
    string = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
    rng, seen = random.Random(33), set()
    for _ in range(20_000):
        text = "".join(rng.choices('[]{}:"\\a', k=rng.randint(1, 30)))
        outside = string.sub("", text)
        if "\\" in outside:
            continue
        depth = deepest = 0
        for character in outside:
            depth += (character in "[{") - (character in "]}")
            deepest = max(deepest, depth)
        expected = deepest > 3 or sum(map(outside.count, "[{")) > 6 or outside.count(":") > 5
        try:
            parse(text)
        except NotJson as error:
            refused = "nested" in str(error) or "more than" in str(error)
        else:
            refused = False
        assert refused == expected, text
        seen.add(expected)
    assert seen == {True, False}
