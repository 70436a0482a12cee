"""Canonical form, hashes, differences and expectations."""

import pytest

from headrace.serving.core.contract import (
    BadExpectation,
    Contract,
    canonical_json,
    differences,
    parse_expectation,
    unmet,
)

PARTS = {"model": "ab" * 32, "dtype": "float32", "stop_ids": [0, 2], "adapter": None, "quantization": {"F32": 1}}
NUMERICS = {"jax": "0.10.2", "threads": "2"}


def test_the_canonical_form_is_one() -> None:
    assert canonical_json({"b": [1, True, None], "a": "é\n"}) == b'{"a":"\\u00e9\\n","b":[1,true,null]}'
    assert canonical_json({"a": (1,), "b": {}}) == canonical_json({"b": {}, "a": [1]})
    assert Contract(PARTS, NUMERICS).fingerprint == Contract(dict(reversed(PARTS.items())), {}).fingerprint


@pytest.mark.parametrize("value", [1.0, {"a": [0.5]}, float("nan"), {1: "a"}, b"x", {"a": {1}}, object()])
def test_what_prints_differently_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        canonical_json(value)


def test_integers_are_those_that_every_parser_reads() -> None:
    assert canonical_json(2**53) == b"9007199254740992"
    with pytest.raises(ValueError, match="2\\^53"):
        canonical_json(2**53 + 1)


@pytest.mark.parametrize("name", PARTS)
def test_every_part_counts_and_is_named(name: str) -> None:
    other = {**PARTS, name: "other"}
    assert Contract(other, NUMERICS).fingerprint != Contract(PARTS, NUMERICS).fingerprint
    assert Contract(other, NUMERICS).numerics_hash == Contract(PARTS, NUMERICS).numerics_hash
    (found,) = differences(PARTS, other)
    assert (found.part, found.there) == (name, "other")
    (found,) = differences(PARTS, {key: value for key, value in PARTS.items() if key != name})
    assert (found.part, found.there) == (name, "absent")


def test_differences_are_short_and_none_where_only_the_spelling_differs() -> None:
    assert differences({"a": [1]}, {"a": (1,)}) == ()
    (found,) = differences({"model": "ab" * 32, "x": 1}, {"model": "cd" * 32, "x": 1})
    assert (found.here, found.there, found.word) == ("abababababab…", "cdcdcdcdcdcd…", "weights (hash of the model)")
    (found,) = differences({"text": "y" * 1000}, {"text": ""})
    assert len(found.here) < 100


def test_expectations() -> None:
    served = Contract(PARTS, NUMERICS)
    fingerprint, numerics = served.fingerprint, served.numerics_hash
    for text in (fingerprint, numerics, f"{fingerprint},{numerics}", f" {numerics} , {fingerprint}"):
        assert unmet(parse_expectation(text), served) is None
    other = "fp_" + "0" * 64
    assert unmet(parse_expectation(f"{other},{numerics}"), served) == f"the contract served here is {fingerprint}"
    wrong = unmet(parse_expectation(f"nm_{'0' * 64},{other}"), served)
    assert wrong is not None and fingerprint in wrong and numerics in wrong


@pytest.mark.parametrize(
    "text",
    ["", "fp_", "fp_" + "0" * 63, "fp_" + "G" * 64, "0" * 64, "fp_" + "0" * 64 + ",", f"fp_{'0' * 64},fp_{'1' * 64}"],
)
def test_expectations_that_cannot_be_read(text: str) -> None:
    with pytest.raises(BadExpectation, match="fp_ and 64 hex digits"):
        parse_expectation(text)
