"""The field table: each field applied, inert or refused by name; unknown names with a hint; nothing echoed."""

import math

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.serving.edge.bodies import parse_body
from headrace.serving.edge.errors import ApiError
from headrace.serving.edge.fields import FIELDS, STREAM_OPTION_FIELDS, Endpoint, Treatment, check_fields, table
from headrace.serving.edge.values import OnlyDefault

MINIMAL = {
    Endpoint.CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    Endpoint.COMPLETION: {"prompt": "hi"},
}
CASES = [(endpoint, name) for endpoint in Endpoint for name in table(endpoint)]


def error_of(endpoint: Endpoint, body: dict[str, object]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_body(endpoint, body)
    return caught.value


def test_a_name_has_one_meaning_per_endpoint() -> None:
    for endpoint in Endpoint:
        names = [item.name for item in FIELDS if endpoint in item.endpoints]
        assert len(names) == len(set(names))


@pytest.mark.parametrize(("endpoint", "name"), CASES)
def test_null_is_the_default_of_every_field(endpoint: Endpoint, name: str) -> None:
    if name in ("messages", "prompt"):
        assert error_of(endpoint, {name: None}).code == "missing_field"
    else:
        assert parse_body(endpoint, MINIMAL[endpoint] | {name: None}) == parse_body(endpoint, MINIMAL[endpoint])


@pytest.mark.parametrize("item", [item for item in FIELDS if item.treatment is Treatment.REFUSED], ids=lambda i: i.name)
def test_refused_fields_pass_at_their_default_and_nowhere_else(item) -> None:  # type: ignore[no-untyped-def]
    assert isinstance(item.kind, OnlyDefault)
    for endpoint in item.endpoints:
        plain = parse_body(endpoint, MINIMAL[endpoint])
        for value in item.kind.values:
            assert parse_body(endpoint, MINIMAL[endpoint] | {item.name: value}) == plain
        for value in (7, "sevenfold", True if False in item.kind.values else 0.5, {"a": 1}, ["x"]):
            error = error_of(endpoint, MINIMAL[endpoint] | {item.name: value})
            assert (error.status, error.code, error.param) == (400, "unsupported_field", item.name)
            assert item.name in error.message
            assert "sevenfold" not in error.message


@pytest.mark.parametrize("item", [item for item in FIELDS if item.treatment is Treatment.INERT], ids=lambda i: i.name)
def test_inert_fields_change_nothing(item) -> None:  # type: ignore[no-untyped-def]
    for endpoint in item.endpoints:
        body = MINIMAL[endpoint] | {item.name: "x"}
        assert parse_body(endpoint, body) == parse_body(endpoint, MINIMAL[endpoint])


def test_applied_fields_arrive() -> None:
    given_values = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": 3, "repetition_penalty": 1.2,
        "presence_penalty": -1, "frequency_penalty": 2, "logit_bias": {"5": 1.5}, "allowed_token_ids": [5, 6, 5],
    }  # fmt: skip
    body = MINIMAL[Endpoint.COMPLETION] | given_values | {"logprobs": 2, "min_tokens": 1, "max_tokens": 4, "stop": "x"}
    parsed = parse_body(Endpoint.COMPLETION, body)
    for name, value in given_values.items():
        expected = {"logit_bias": ((5, 1.5),), "allowed_token_ids": (5, 6)}.get(name, value)
        assert getattr(parsed.sampling, name) == expected
    assert parsed.sampling.num_logprobs == 2
    assert (parsed.min_tokens, parsed.max_tokens, parsed.stop, parsed.has_seed) == (1, 4, ("x",), True)


@pytest.mark.parametrize(
    ("sent", "meant"),
    [("temprature", "temperature"), ("Temperature", "temperature"), ("max_token", "max_tokens"), ("topk", "top_k")],
)
def test_unknown_fields_name_the_nearest_known_one(sent: str, meant: str) -> None:
    error = error_of(Endpoint.CHAT, MINIMAL[Endpoint.CHAT] | {sent: 1})
    assert (error.status, error.code, error.param) == (400, "unknown_field", sent)
    assert f"Did you mean {meant}?" in error.message


@pytest.mark.parametrize("name", ["", "x" * 65, "a\nb", "a\0b", "😀", "x" * 1_000_000, "</script>"])
def test_odd_names_are_refused_and_not_repeated(name: str) -> None:
    error = error_of(Endpoint.CHAT, MINIMAL[Endpoint.CHAT] | {name: 1})
    assert (error.code, error.param) == ("unknown_field", None)
    assert len(error.message) < 200
    assert not name or name not in error.message


def test_unknown_fields_can_be_ignored_with_a_warning() -> None:
    body = MINIMAL[Endpoint.CHAT] | {"mirostat": 2, "bad\r\nname": 1}
    parsed = parse_body(Endpoint.CHAT, body, allow_unknown=True)
    assert parsed.options.ignored_fields == ("mirostat", "(unprintable)")
    with pytest.raises(ApiError, match="priority"):
        parse_body(Endpoint.CHAT, body | {"priority": 3}, allow_unknown=True)


NUMBERS = ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, "0.5", "NaN", True, [1], {}, -200, 1e300])
def test_numbers_are_finite_in_range_and_numbers(name: str, value: object) -> None:
    error = error_of(Endpoint.COMPLETION, {"prompt": "x", name: value})
    assert error.param == name
    assert error.code in ("invalid_type", "invalid_value")
    assert "nan" not in error.message.lower().replace(name, "")
    orjson.dumps(error.body())


@pytest.mark.parametrize("name", ["max_tokens", "top_k", "seed", "min_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [1.5, 5.0, "5", True, [5], {}, -1, math.nan])
def test_integers_are_integers(name: str, value: object) -> None:
    assert error_of(Endpoint.COMPLETION, {"prompt": "x", name: value}).param == name


def test_minus_zero_is_zero() -> None:
    parsed = parse_body(Endpoint.COMPLETION, {"prompt": "x", "temperature": -0.0})
    assert math.copysign(1, parsed.sampling.temperature) == 1


@pytest.mark.parametrize("name", [item.name for item in STREAM_OPTION_FIELDS] + ["chunk_size"])
def test_stream_options_have_a_table_too(name: str) -> None:
    error = error_of(Endpoint.CHAT, MINIMAL[Endpoint.CHAT] | {"stream_options": {name: "x"}})
    assert error.param == f"stream_options.{name}"


ODD_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.just(10**400), st.just("x" * 10_000),
    st.lists(st.one_of(st.none(), st.integers(), st.text(max_size=5), st.floats()), max_size=4),
    st.dictionaries(st.text(max_size=5), st.one_of(st.none(), st.integers(), st.floats(), st.text()), max_size=3),
)  # fmt: skip


@pytest.mark.parametrize("endpoint", Endpoint)
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_value_in_any_field_is_parsed_or_refused_by_name(endpoint: Endpoint, data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(table(endpoint))), min_size=1, max_size=3, unique=True))
    body = MINIMAL[endpoint] | {name: data.draw(ODD_VALUES) for name in names}
    try:
        parse_body(endpoint, body)
    except ApiError as error:
        assert 400 <= error.status < 500
        orjson.dumps(error.body())
        assert len(error.message) < 1000


def test_check_fields_keeps_only_applied_values() -> None:
    checked = check_fields(Endpoint.CHAT, MINIMAL[Endpoint.CHAT] | {"user": "u", "n": 1, "top_k": 0})
    assert set(checked.values) == {"messages", "top_k"}


@pytest.mark.parametrize("endpoint", Endpoint)
@pytest.mark.parametrize(("name", "value"), [("priority", 1), ("deadline_ms", 500), ("expect_contract", "fp_1")])
def test_what_belongs_beside_a_body_is_told_where(endpoint: Endpoint, name: str, value: object) -> None:
    with pytest.raises(ApiError) as refused:
        check_fields(endpoint, {name: value})
    assert refused.value.code == "unsupported_field"
    assert f"the header x-headrace-{name.replace('_', '-')}" in refused.value.message
    assert "`create`" in refused.value.message
