"""``headrace contract`` and ``headrace probe`` against the real edge with an engine of known answers."""

import asyncio
import json
import socket
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from headrace.serving.app.probe_client import TEXTS
from headrace.serving.app.probe_command import contract, probe
from headrace.serving.app.readiness import revision_of
from headrace.serving.core.errors import ConfigError
from headrace.serving.edge.probe_files import read_record
from tests.serving.bench.test_bench import serving
from tests.serving.edge.fakes import FakeEngine, ready


async def invoke(command: click.Command, *arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, command, list(arguments), standalone_mode=False)


async def test_contracts_are_printed_and_compared(tmp_path: Path) -> None:
    engine = FakeEngine(ready_info=ready(numerics={"jax": "1"}))
    async with serving(engine) as server:
        printed = await invoke(contract, server.base)
        saved = tmp_path / "contract.json"
        saved.write_text(printed.stdout)
        same = await invoke(contract, "--diff", server.base, str(saved))
        engine.ready_info = ready(weights="int8", numerics={"jax": "2"})
        other = await invoke(contract, "--diff", str(saved), server.base)
    document = json.loads(printed.stdout)
    assert (printed.return_value, same.return_value, other.return_value) == (0, 0, 1)
    assert same.stdout == f"the same: {document['fingerprint']} {document['numerics_hash']}\n"
    assert other.stdout.splitlines() == ["contract.weights: native | int8", "numerics.jax: 1 | 2"]


async def test_a_record_is_made_and_checked(tmp_path: Path) -> None:
    engine, file = FakeEngine(), tmp_path / "record.json"
    async with serving(engine) as server:
        made = await invoke(probe, "record", server.base, "-o", str(file), "--tokens", "5")
        assert made.exception is None and made.return_value == 0, made.output
        record = read_record(file)
        assert [prompt.text for prompt in record.prompts] == [text for _, text in TEXTS] + [None]
        assert all(prompt.ids == tuple(b"Hello") for prompt in record.prompts)
        assert (await invoke(contract, "--diff", str(file), server.base)).return_value == 0
        good = await invoke(probe, "check", server.base, str(file))
        assert (good.return_value, good.stdout) == (0, "as recorded: 4 prompts, 20 steps within 0.001\n")
        engine.reply = b"Help!"
        ids = await invoke(probe, "check", server.base, str(file))
        assert ids.return_value == 1 and "ids differ at step 3: 112 instead of 108" in ids.stdout
        engine.ready_info = ready(model_hash="cd" * 32)
        weights = await invoke(probe, "check", server.base, str(file))
        assert weights.return_value == 1 and weights.stdout.startswith("differs: weights (hash of the model) differs")


async def test_a_server_of_two_minds_is_not_recorded(tmp_path: Path) -> None:
    engine, file = FakeEngine(), tmp_path / "record.json"
    engine.choose = lambda request, index: len(engine.submitted) % 250
    async with serving(engine) as server:
        refused = await invoke(probe, "record", server.base, "-o", str(file))
    assert isinstance(refused.exception, click.ClickException)
    assert "does not agree with itself" in refused.exception.message and not file.exists()


async def test_a_tolerance_under_which_all_is_a_tie_is_refused(tmp_path: Path) -> None:
    async with serving(FakeEngine()) as server:
        refused = await invoke(probe, "record", server.base, "-o", str(tmp_path / "x"), "--tolerance", "1")
    assert isinstance(refused.exception, click.ClickException)
    assert "only 0 steps" in refused.exception.message and "smaller --tolerance" in refused.exception.message


def test_wrong_use(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    empty = tmp_path / "empty.json"
    empty.write_text("{}")
    loose = tmp_path / "loose.json"
    loose.write_text('{"contract": {"dtype": 1.5}, "numerics": {}}')
    for command, arguments, error, says in (
        (contract, (), click.UsageError, "give a URL"),
        (contract, (url, "--diff", url, url), click.UsageError, "give a URL"),
        (contract, (url,), click.ClickException, "cannot be reached"),
        (contract, ("--diff", str(empty), str(empty)), ConfigError, "holds no contract"),
        (
            contract,
            ("--diff", str(loose), str(loose)),
            ConfigError,
            "loose.json holds no contract: a value",
        ),
        (contract, ("--diff", "absent", url), ConfigError, "neither a URL nor a file"),
        (contract, ("h:8000", "--api-key-file", str(empty)), ConfigError, "is not a server's URL"),
        (probe, ("check", url, str(empty)), ConfigError, "is no probe record"),
        (probe, ("record", url, "-o", str(tmp_path / "x")), click.ClickException, "cannot be reached"),
    ):
        result = CliRunner().invoke(command, list(arguments), standalone_mode=False)
        with pytest.raises(error, match=says):
            raise result.exception or AssertionError("not refused")


def test_the_revision_is_the_commit_of_a_repository() -> None:
    commit = "ab" * 20
    assert revision_of(Path("hub/models--org--name/snapshots") / commit) == commit
    assert revision_of(Path("models") / commit) is None
    assert revision_of(Path("hub/snapshots/main")) is None
