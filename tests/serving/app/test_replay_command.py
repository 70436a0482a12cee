"""The journal of real engine processes, and what ``headrace replay`` makes of it."""

import asyncio
import json
from pathlib import Path

from click.testing import CliRunner

from headrace.serving.app.build import EngineOptions, FakeOptions, engine_launch
from headrace.serving.app.replay_command import replay
from headrace.serving.core.errors import ConfigError
from headrace.serving.core.events import Finished
from headrace.serving.edge.engine_client import EngineClient
from headrace.serving.engine.journal_file import JournalOptions
from tests.serving.edge.engine_streams import Stream, kill_nine, running, until

LIMIT = 1 << 24


def run_replay(*arguments: str) -> tuple[int, str]:
    """Exit code and standard output. Raises what the command raises."""
    done = CliRunner().invoke(replay, arguments, standalone_mode=False, catch_exceptions=False)
    return done.return_value, done.stdout


async def test_a_killed_engine_leaves_a_journal_and_the_next_one_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = JournalOptions(path=str(path), limit_bytes=LIMIT)
    options = EngineOptions(
        model="none", fake=FakeOptions(step_ms=2), num_slots=4, context=256, chunk_tokens=32, journal=journal
    )
    async with running(EngineClient(engine_launch(options), restart=True)) as client:
        lost = [Stream(client, max_tokens=200) for _ in range(3)]
        await lost[0].until(lambda s: len(s.ids) > 60)
        await asyncio.sleep(0.15)  # Records reach the file ten times a second.
        await kill_nine(client)
        await lost[0].end()
        await until(lambda: client.ready_info is not None)
        stream = Stream(client, max_tokens=9)
        assert isinstance(await stream.end(), Finished)
        await until(lambda: client.stats.running == 0 and client.stats.journal_bytes is not None)
        assert not client.stats.journal_stopped
    code, text = run_replay(str(path))
    assert code == 0, text
    assert "2 segments" in text and "Every plan and every event is as recorded." in text
    assert "segment 2 ends: the engine ended" in text

    lines = path.read_bytes().splitlines(keepends=True)
    place = max(i for i, line in enumerate(lines) if b'"type":"result"' in line)
    result = json.loads(lines[place])
    result["decode"][0] ^= 1
    path.write_bytes(b"".join([*lines[:place], json.dumps(result).encode() + b"\n", *lines[place + 1 :]]))
    code, text = run_replay(str(path))
    assert code == 1
    assert f"Difference at record {place + 1} (segment 2" in text and "recorded: digest" in text
    code, text = run_replay("--json", str(path))
    report = json.loads(text)
    assert code == 1 and not report["equal"] and report["difference"]["record"] == place + 1


def test_what_is_no_journal_is_said_with_its_line(tmp_path: Path) -> None:
    for content, says in ((b"hello\n", "is no journal"), (b"", "0 segments")):
        path = tmp_path / "file"
        path.write_bytes(content)
        try:
            code, text = run_replay(str(path))
        except ConfigError as error:
            code, text = 2, str(error)
        assert (code, says in text) == (2 if content else 0, True), text
