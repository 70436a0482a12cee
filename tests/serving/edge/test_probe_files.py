"""Files of probe records; and the shipped one of the default model against what transformers says."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.serving.core.errors import ConfigError
from headrace.serving.edge.probe_files import SHIPPED, read_record, read_records, record_bytes, shipped_records
from tests.numerics.golden import INT16_LOGPROB_TOLERANCE, LOGPROB_TOLERANCE, references

FILE = SHIPPED / "smollm2-135m.json"


def test_a_file_is_what_was_written(tmp_path: Path) -> None:
    record = read_record(FILE)
    assert record_bytes(record) == FILE.read_bytes()
    copy = tmp_path / "copy.json"
    copy.write_bytes(record_bytes(record))
    assert read_record(copy) == record
    (tmp_path / "other.json").write_bytes(record_bytes(replace(record, made="by hand")))
    (tmp_path / "README.md").write_text("not a record")
    assert [found.made for found in read_records((tmp_path,))] == [record.made, "by hand"]
    assert read_records((FILE, copy)) == (record, record)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is no probe record"),
        ("[]", "is no probe record"),
        ('{"format": 1}', "is no probe record"),
        ("\udcff", "is no probe record"),
        (FILE.read_text().replace("0.001", "-1", 1), "tolerance must be above 0"),
        (FILE.read_text().replace("headrace-probe/1", "headrace-probe/9"), "format is not"),
        (FILE.read_text().replace('"max_context":8192', '"max_context":4096'), "changed by hand"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "record.json"
    file.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ConfigError, match=says) as refused:
        read_record(file)
    assert "headrace probe record" in str(refused.value) and str(file) in str(refused.value)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_record(tmp_path / "absent")
    with pytest.raises(ConfigError, match="directory without a probe record"):
        read_records((tmp_path,))
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate((4 << 20) + 1)
    with pytest.raises(ConfigError, match="more than"):
        read_record(large)


def test_shipped_records_can_be_read_and_have_different_contracts() -> None:
    records = shipped_records()
    assert records and len({record.fingerprint for record in records}) == len(records)
    assert all(len(prompt.ids) >= 4 for record in records for prompt in record.prompts)


def test_the_default_model_was_recorded_as_transformers_has_it() -> None:
    """Every prompt of the record is one of the golden file: same prompt ids, same answer, same logprobs."""
    golden = {reference.prompt_ids: reference for reference in references()}
    record = read_record(FILE)
    is_exact = record.contract["activations"] == "exact"
    tolerance = LOGPROB_TOLERANCE if is_exact else INT16_LOGPROB_TOLERANCE
    for prompt in record.prompts:
        reference = golden[prompt.prompt_ids]
        assert prompt.ids == reference.ids[: len(prompt.ids)]
        for token_id, step, expected in zip(prompt.ids, prompt.top, reference.logprobs, strict=False):
            assert abs(dict(step)[token_id] - expected) < tolerance
        if prompt.messages is not None:
            said = [(turn.role, turn.content) for turn in prompt.messages]
            assert reference.messages is not None
            assert said == [(turn["role"], turn["content"]) for turn in reference.messages]


def test_the_file_has_a_line_for_each_prompt() -> None:
    prompts = json.loads(FILE.read_text())["prompts"]
    assert len(FILE.read_text().splitlines()) == len(prompts) + 10
