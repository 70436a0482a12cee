"""O07: NaN, infinities and numbers of the wrong type are refused by name and never reach the device."""

import json

import pytest

from tests.cases.case_client import CaseClient, Refusal, strict

pytestmark = pytest.mark.usefixtures("checks")

REAL_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias.28",
)
WHOLE_FIELDS = ("max_tokens", "max_completion_tokens", "min_tokens", "top_k", "seed")


def with_field(name: str, value: str) -> str:
    """The JSON text of a small request, with the raw text of one value."""
    outer, _, inner = name.partition(".")
    text = f'{{"{inner}":{value}}}' if inner else value
    limit = "" if name == "max_tokens" else '"max_tokens":1,'
    return f'{{"prompt":"x",{limit}"{outer}":{text}}}'


def refused(client: CaseClient, body: str) -> Refusal:
    """By both doors alike; the socket of the native one stays open."""
    refusal = client.refusal("completion", body.encode())
    (frame,) = client.frames("completion", body)
    error = frame["error"]
    assert (frame["type"], frame["status"], error["code"]) == ("error", refusal.status, refusal.code)
    assert error["param"] == refusal.param
    assert refusal.status == 400
    return refusal


def test_what_is_no_json_number(client: CaseClient) -> None:
    """A literal too large for a float is infinite; JSON itself sets no limit, and readers differ."""
    for value in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 400):
        for name in ("temperature", "logit_bias.28", "max_tokens"):
            refusal = refused(client, with_field(name, value))
            assert refusal.code == "malformed_json"
            assert value.strip("-") not in refusal.message


def test_real_fields(client: CaseClient) -> None:
    """The field is named, its value is not repeated."""
    for name in REAL_FIELDS:
        for value in ('"NaN"', '"0.5"', "true", "[1]", "{}", '"12345678"'):
            refusal = refused(client, with_field(name, value))
            assert (refusal.code, refusal.param) == ("invalid_type", name)
            assert value.strip('"') not in refusal.message.replace(name, "")
        for value in ("-101.25", "1e308", "9" * 300):
            refusal = refused(client, with_field(name, value))
            assert (refusal.code, refusal.param) == ("invalid_value", name)
            assert value not in refusal.message


def test_whole_fields(client: CaseClient) -> None:
    for name in WHOLE_FIELDS:
        for value in ("1.5", "1.0", '"5"', "true", "[1]"):
            refusal = refused(client, with_field(name, value))
            assert (refusal.code, refusal.param) == ("invalid_type", name)
        for value in ("-1", "9" * 300):
            refusal = refused(client, with_field(name, value))
            assert refusal.param == name.replace("completion_", "" if value != "-1" else "completion_")
            assert value not in refusal.message


def test_deadlines_are_refused_by_name(client: CaseClient) -> None:
    for value in ("1000", "1.5", '"5"', "true", "0", "-1", "1e12"):
        refusal = refused(client, with_field("deadline_ms", value))
        assert (refusal.code, refusal.param) == ("unsupported_field", "deadline_ms")


def test_null_and_minus_zero_are_defaults_and_zero(client: CaseClient) -> None:
    nothing = dict.fromkeys((*REAL_FIELDS[:-1], "logit_bias", *WHOLE_FIELDS))
    body = json.dumps({"prompt": "x", **nothing, "max_tokens": 1}).replace('"temperature": null', '"temperature": -0.0')
    answer = client.post("completion", body.encode())
    assert answer.status_code == 200, answer.text
    zeros = dict.fromkeys(("temperature", "min_p", "presence_penalty", "frequency_penalty"), -0.0)
    plain = client.post("completion", {"prompt": "x", "max_tokens": 1, **zeros})
    assert strict(plain.content)["choices"] == strict(answer.content)["choices"]
