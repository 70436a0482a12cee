"""The tenant file: what it can say, what is refused by name, and when it is read again."""

import logging
import os
import textwrap
from pathlib import Path

import pytest

from headrace.serving.core.errors import ConfigError
from headrace.serving.core.rate_limit import Rate
from headrace.serving.core.request import Priority
from headrace.serving.core.tenant_policy import BudgetLimits, TenantPolicy
from headrace.serving.edge.shared_prefixes import read_prefixes
from headrace.serving.edge.tenants import SETTINGS, TenantFile, read_policies

FULL = """
[default]
streams = 8
requests_per_second = 5
deadline_ms = 30_000

[tenants.alice]
weight = 2.5
max_priority = "normal"
streams = 64
queued_requests = 32
queued_tokens = 10_000
tokens_in_flight = 50_000
pages = 100
requests_per_second = 20.5
request_burst = 40
tokens_per_second = 1000
token_burst = 8000
deadline_ms = 60_000
sees_tenants = true

[tenants.bob]
max_priority = "low"
"""


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_file_with_everything(tmp_path: Path) -> None:
    file = TenantFile(written(tmp_path / "tenants.toml", FULL), ("alice", "bob", "carol"))
    assert file.of("alice") == TenantPolicy(
        weight=2.5,
        max_priority=Priority.NORMAL,
        limits=BudgetLimits(streams=64, queued_requests=32, queued_tokens=10_000, tokens_in_flight=50_000, pages=100),
        requests=Rate(20.5, 40),
        tokens=Rate(1000, 8000),
        deadline_ms=60_000,
        sees_tenants=True,
    )
    default = TenantPolicy(limits=BudgetLimits(streams=8), requests=Rate(5, 5), deadline_ms=30_000)
    assert file.of("carol") == file.of("") == default
    assert file.of("bob").max_priority is file.of("bob").default_priority is Priority.LOW
    assert file.of("bob").limits.streams == 8
    assert all(name in FULL for name in SETTINGS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[defaults]", ("defaults", "[default]")),
        ("default = 3", ("[default]", "table")),
        ("tenants = 3", ("[tenants]",)),
        ("[tenants]\nalice = 3", ("[tenants.alice]", "table")),
        ("[default]\nwieght = 1", ("wieght", "weight")),
        ("[default]\nweight = 0", ("weight", "0.001 to 1000")),
        ("[default]\nweight = true", ("weight", "a number")),
        ("[default]\nweight = nan", ("weight", "a number")),
        ("[default]\nweight = inf", ("weight", "1000")),
        ('[default]\nweight = "1"', ("weight", "a number")),
        ('[default]\nmax_priority = "urgent"', ("max_priority", '"high", "normal", "low"')),
        ("[default]\nmax_priority = 1", ("max_priority",)),
        ("[tenants.alice]\nstreams = 0", ("[tenants.alice] streams", "an integer from 1")),
        ("[default]\nstreams = 1.5", ("streams", "an integer")),
        ("[default]\nstreams = true", ("streams", "an integer")),
        ("[default]\nrequests_per_second = -1", ("requests_per_second",)),
        ("[default]\nrequest_burst = 5", ("request_burst", "requests_per_second")),
        ("[tenants.alice]\ntoken_burst = 5", ("[tenants.alice] token_burst", "tokens_per_second")),
        ("[default]\ndeadline_ms = 600_001", ("deadline_ms", "600000")),
        ("[default]\nsees_tenants = 1", ("sees_tenants", "true, false")),
        ("[tenants.mallory]", ("[tenants.mallory]", "alice")),
        ("[default", ("TOML",)),
    ],
)
def test_what_cannot_be_meant_is_named(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    path = written(tmp_path / "tenants.toml", text)
    with pytest.raises(ConfigError) as caught:
        TenantFile(path, ("alice",))
    for word in (str(path), *words):
        assert word in str(caught.value)


def test_a_tenants_table_needs_keys(tmp_path: Path) -> None:
    path = written(tmp_path / "tenants.toml", "[tenants.alice]")
    with pytest.raises(ConfigError, match="without --api-keys only"):
        TenantFile(path, ())


def test_no_file_and_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        TenantFile(tmp_path / "none.toml", ())
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        TenantFile(tmp_path / "bytes.toml", ())


def test_it_is_read_again_when_it_changes_and_a_bad_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path / "tenants.toml", "[default]\nweight = 1")
    now = [0.0]
    file = TenantFile(path, (), clock=lambda: now[0])
    written(path, "[default]\nweight = 2\n")
    assert file.of("").weight == 1
    now[0] += 1.5
    assert file.of("").weight == 2
    for text in ("[default]\nweight = 0 ", "[default"):
        written(path, text)
        now[0] += 1.5
        with caplog.at_level(logging.ERROR):
            assert file.of("").weight == 2
        assert "stay as they were" in caplog.text
    os.remove(path)
    now[0] += 1.5
    assert file.of("").weight == 2
    written(path, "[default]\nweight = 4   ")
    now[0] += 1.5
    assert file.of("").weight == 4


def test_the_file_in_the_readme_can_be_read(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "README.md").read_text().split("```toml\n")[1].split("```")[0]
    default, tenants = read_policies(written(tmp_path / "tenants.toml", textwrap.dedent(text)))
    assert (default.limits.streams, default.max_priority.name, default.deadline_ms) == (64, "NORMAL", 60_000)
    assert (tenants["ops"].max_priority.name, tenants["ops"].sees_tenants, tenants["ops"].tokens) == (
        "HIGH", True, Rate(2000.0, 2000.0),
    )  # fmt: skip


def test_a_file_that_no_parser_gets_to_the_end_of_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "deep.toml", "a = " + "[" * 100_000)
    with pytest.raises(ConfigError, match=r"deep.toml is not TOML"):
        read_policies(path)
    with pytest.raises(ConfigError, match=r"deep.toml is not TOML"):
        read_prefixes(path)
