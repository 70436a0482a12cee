"""Structure is counted before anything is built: exact limits, and nothing inside a string counts (case O33)."""

import json
import random
import re

import pytest

from headrace.serving.edge.strict_json import (
    LONG_BYTES,
    MAX_COMMAS,
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_KEYS,
    NotJson,
    parse,
)


def keys(count: int) -> str:
    return "{" + ",".join(f'"{i}":1' for i in range(count)) + "}"


@pytest.mark.parametrize(
    ("at_limit", "beyond", "word"),
    [
        (keys(MAX_KEYS), keys(MAX_KEYS + 1), "keys"),
        ("[" + "[]," * (MAX_CONTAINERS - 2) + "[]]", "[" + "[]," * (MAX_CONTAINERS - 1) + "[]]", "arrays and objects"),
        ("[" * MAX_DEPTH + "]" * MAX_DEPTH, "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested deeper"),
        ("[" + "1," * MAX_COMMAS + "1]", "[" + "1," * (MAX_COMMAS + 1) + "1]", "commas"),
    ],
    ids=["keys", "containers", "depth", "commas"],
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
    limits = {"MAX_DEPTH": 3, "MAX_CONTAINERS": 6, "MAX_KEYS": 5, "MAX_COMMAS": 5}
    for name, value in limits.items():
        monkeypatch.setattr(f"headrace.serving.edge.strict_json.{name}", value)
    string = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
    rng, seen = random.Random(33), set()
    for _ in range(20_000):
        text = "".join(rng.choices('[]{}:,"\\a', k=rng.randint(1, 30)))
        outside = string.sub("", text)
        if "\\" in outside:
            continue
        depth = deepest = 0
        for character in outside:
            depth += (character in "[{") - (character in "]}")
            deepest = max(deepest, depth)
        many = sum(map(outside.count, "[{")) > 6 or outside.count(":") > 5 or outside.count(",") > 5
        expected = deepest > 3 or many
        try:
            parse(text)
        except NotJson as error:
            refused = "nested" in str(error) or "more than" in str(error)
        else:
            refused = False
        assert refused == expected, text
        seen.add(expected)
    assert seen == {True, False}


def random_json(rng: random.Random, depth: int = 0) -> str:
    """Keys are few, so that some objects repeat one; strings hold what structure is made of."""
    kind = rng.randrange(7 if depth < 4 else 4)
    if kind < 4:
        return ("1", "-2.5e3", rng.choice(('"a"', '":"', '"{,\\\\\\""')), "null")[kind]
    items = [random_json(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 4:
        return "[" + ", ".join(items) + "]"
    return "{" + ", ".join(f'"{rng.choice("ab:[")}": {item}' for item in items) + "}"


def test_a_long_text_has_the_value_and_the_fault_of_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, texts = random.Random(7), []
    texts = [random_json(rng) for _ in range(5_000)]
    short = [parse(text) for text in texts]
    monkeypatch.setattr("headrace.serving.edge.strict_json.LONG_BYTES", 0)
    assert [parse(text) for text in texts] == short
    assert len([parsed for parsed in short if parsed.fault is not None]) > 100


def test_a_long_text_that_is_refused_still_tells_its_id() -> None:
    """One cut emoji must not close the socket with its other streams."""
    text = '{"id": "r1", "n": 1.5, "type": "create", "prompt": "' + "x" * LONG_BYTES + '\\ud83d"}'
    parsed = parse(text)
    assert parsed.fault is not None and isinstance(parsed.value, dict)
    assert (parsed.value["id"], parsed.value["type"]) == ("r1", "create")


def test_json_reads_no_float_of_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 MiB of them take it 260 ms, in which nothing else of the process runs (case O33)."""
    given: list[object] = []
    loads = json.loads

    def watched(text: str, **options: object) -> object:
        given.append(options["parse_float"])
        return loads(text, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(json, "loads", watched)
    slow = ",".join(["1.2345678901234567e-300"] * 20_000)
    assert parse(f"[{slow}]").fault is None and given == []
    assert parse(f"[{slow}, NaN]").fault is not None and given == [str]
