"""Workload files: what is written is read again, and what is wrong is named by file, line and field."""

import json
from pathlib import Path

import pytest

from headrace.serving.bench.workload import Workload
from headrace.serving.bench.workload_fields import (
    FORMAT,
    HEADER_FIELDS,
    HEADER_MEANINGS,
    MEANINGS,
    PLAIN_FIELDS,
    SAMPLING_FIELDS,
)
from headrace.serving.bench.workload_file import load_workload, parse_workload
from headrace.serving.core.errors import ConfigError

HEADER = '{"format": "headrace-workload/1", "seed": 3, "prefixes": {"a": {"words": 4}, "b": [5, 6]}}'
FULL = (
    '{"at_s": 0.5, "prompt": {"words": 2}, "max_tokens": 4, "tenant": "gold", "priority": "high", "deadline_ms": 900, '
    '"cancel_after_s": 0.25, "shared_prefix": "a", "temperature": 0.7, "seed": 5, "stop": ["x"], "ignore_eos": true, '
    '"top_k": null}'
)
REST = (
    '{"at_s": 0.5, "prompt": [1, 2], "max_tokens": 1, "shared_prefix": "b", "priority": 2}',
    '{"at_s": 2, "prompt": {"tokens": 3}, "max_tokens": 7}',
    '{"at_s": 2, "prompt": "as it is", "max_tokens": 7}',
)


def parse(*lines: str) -> object:
    return parse_workload("\n".join(lines).encode(), "w.jsonl")


def test_a_file_has_what_its_lines_say(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text("\n".join((HEADER, FULL, "", *REST)) + "\n")
    found = load_workload(path)
    assert (found.seed, found.duration_s, found.offered_per_s, found.tenants) == (3, 2, 2.0, ("gold",))
    first = found.requests[0]
    assert (first.at_s, first.max_tokens, first.tenant, first.priority) == (0.5, 4, "gold", "high")
    assert (first.deadline_ms, first.cancel_after_s, first.shared_prefix) == (900, 0.25, "a")
    assert first.sampling == {"temperature": 0.7, "seed": 5, "stop": ["x"], "ignore_eos": True}
    prompt = found.prompt(0)
    assert isinstance(prompt, str) and len(prompt.split()) == 6
    assert found.body(0) == {"prompt": prompt, "max_tokens": 4, **first.sampling}
    assert found.prompt(1) == [5, 6, 1, 2]
    assert len(found.prompt(2)) == 3 and found.prompt(3) == "as it is"
    assert [found.estimated_prompt_tokens(index) for index in range(4)] == [6, 4, 3, 3]
    assert found.estimated_prompt_tokens(0, tokens_per_word=1.5) == 9
    # The prompt is the one that a closed loop of the same seed asks.
    closed = Workload(streams=1, requests=3, max_tokens=1, prompt_tokens=3, seed=3)
    assert found.prompt(2) == closed.prompt(2)


def test_lines_give_an_equal_workload_and_the_hash_knows_them() -> None:
    found = parse_workload("\n".join((HEADER, FULL, *REST)).encode(), "w")
    again = parse_workload("\n".join(found.lines()).encode(), "w")
    assert again == found and again.hash == found.hash
    described = parse_workload("\n".join((HEADER.replace("{", '{"description": "x", ', 1), FULL, *REST)).encode(), "w")
    assert described.hash == found.hash
    for changed in (HEADER.replace("3", "4", 1), HEADER.replace("5", "7")):
        assert parse_workload("\n".join((changed, FULL, *REST)).encode(), "w").hash != found.hash
    assert parse_workload("\n".join((HEADER, FULL)).encode(), "w").hash != found.hash


def request(**changes: object) -> str:
    return json.dumps({"at_s": 1.0, "prompt": "x", "max_tokens": 1, **changes})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "no JSON"),
        ("[]", "not a JSON object"),
        ('{"at_s": 1, "at_s": 1}', "'at_s' is there twice"),
        ('{"at_s": NaN}', "NaN is no number of JSON"),
        (request(at_s=-1), "'at_s' must be a number from 0 to 604,800"),
        (request(at_s=0.5), "'at_s' is 0.5, before the 1 of the request above"),
        (request(at_s=True), "'at_s' must be a number"),
        (request(at_s=None), "'at_s' is missing"),
        ('{"at_s": 1, "prompt": "x"}', "'max_tokens' is missing"),
        (request(max_tokens=0), "'max_tokens' must be a whole number from 1 to 100,000"),
        (request(max_tokens=1.0), "'max_tokens' must be a whole number"),
        (request(max_token=1), "unknown field 'max_token'; did you mean 'max_tokens'"),
        (request(zzz=1), "unknown field 'zzz'; there are at_s, prompt"),
        (request(prompt=""), "'prompt' must be text"),
        (request(prompt={"words": 1, "tokens": 1}), "'prompt' must be text"),
        (request(prompt={"words": 0}), "'prompt.words' must be a whole number from 1"),
        (request(prompt=[1, "2"]), "'prompt' must be a whole number from 0"),
        (request(tenant="a b"), "'tenant': a name has"),
        (request(priority=1.5), "'priority' must be a whole number"),
        (request(deadline_ms=0), "'deadline_ms' must be"),
        (request(cancel_after_s=-1), "'cancel_after_s' must be"),
        (request(shared_prefix="c"), "'shared_prefix' is 'c', which the header's prefixes have not"),
        (request(shared_prefix="b"), "'shared_prefix' and 'prompt' must both be"),
        (request(top_p=0), "'top_p' must be a number above 0 to 1"),
        (request(ignore_eos=1), "'ignore_eos' must be true or false"),
        (request(stop=[""]), "'stop' must be text"),
        (request(stop_token_ids="a"), "'stop_token_ids' must be a list"),
    ],
)
def test_what_is_wrong_is_named(line: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(HEADER, request(), line)
    assert str(caught.value).startswith("w.jsonl, line 3: ") and says in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ((), "w.jsonl is empty"),
        ((HEADER,), "a header and no request"),
        ((request(),), "line 1: the first line must be a header with format"),
        (('{"format": "headrace-workload/2"}',), "line 1: .* and has 'headrace-workload/2'"),
        (('{"format": "headrace-workload/1", "seed": -1}',), "line 1: 'seed' must be"),
        (('{"format": "headrace-workload/1", "prefixes": {"a b": "x"}}',), "line 1: 'prefixes': a name has"),
        (('{"format": "headrace-workload/1", "prefixes": {"a": 1}}',), "line 1: 'prefixes.a' must be text"),
        (
            ('{"format": "headrace-workload/1", "duration_s": 0.5}', request()),
            "line 1: duration_s is 0.5, and",
        ),
    ],
)
def test_headers(lines: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(*lines)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_workload(tmp_path / "no")


def test_every_field_has_a_meaning() -> None:
    assert list(MEANINGS) == [*PLAIN_FIELDS, *SAMPLING_FIELDS]
    assert list(HEADER_MEANINGS) == list(HEADER_FIELDS)
    assert FORMAT in HEADER_MEANINGS["format"]


def test_the_page_names_every_field_as_the_help_does() -> None:
    page = (Path(__file__).resolve().parents[3] / "BENCHMARKS.md").read_text()
    for name, meaning in {**HEADER_MEANINGS, **MEANINGS}.items():
        assert f"`{name}`" in page and meaning in page, name
    example = page.partition("```\n{")[2].partition("```")[0]
    found = parse_workload(("{" + example).encode(), "BENCHMARKS.md")
    assert len(found.requests) == 2 and found.requests[1].cancel_after_s == 2
