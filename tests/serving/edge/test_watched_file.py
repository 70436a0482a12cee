"""Files that are read again: bounded, and never on the event loop where that takes long."""

import asyncio
import logging
import threading
from pathlib import Path

import pytest

from headrace.serving.core.errors import ConfigError
from headrace.serving.edge.watched_file import WatchedFile, read_text

LOG = logging.getLogger("headrace.tests")


async def test_a_slow_file_is_read_beside_the_event_loop(tmp_path: Path) -> None:
    path, now, may_read = tmp_path / "f", [0.0], threading.Event()
    path.write_text("one")
    may_read.set()

    def read(path: Path) -> str:
        assert may_read.wait(10)
        return path.read_text()

    file = WatchedFile(path, read, what="file", of="words", log=LOG, clock=lambda: now[0], is_slow=True)
    may_read.clear()
    path.write_text("three")
    now[0] += 2
    assert file.value == "one"
    now[0] += 2
    assert file.value == "one"  # and nobody else reads meanwhile
    may_read.set()
    for _ in range(500):
        if file.value == "three":
            return
        await asyncio.sleep(0.01)
    pytest.fail("the change was never read")


def test_a_file_without_end_costs_no_more_than_its_limit() -> None:
    with pytest.raises(ConfigError, match="key file /dev/zero has more than 1000 bytes"):
        read_text(Path("/dev/zero"), "key file", 1000)
