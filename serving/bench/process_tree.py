"""All processes of a server on this machine: stopped and continued together, their memory and their time. Linux."""

import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from headrace.serving.core.errors import ConfigError

PROC = Path("/proc")
Parsed = TypeVar("Parsed")
MAX_ROUNDS = 5
"""Of looking for processes that came while others were being stopped."""
SETTLE_S = 0.5


@dataclass(frozen=True, slots=True)
class _Entry:
    parent: int
    session: int
    cpu_ticks: int


def has_proc() -> bool:
    return (PROC / "self" / "stat").exists()


@dataclass(frozen=True, slots=True)
class ProcessTree:
    """root: its process id. The tree: it and what descends from it, and the sessions that any of these lead."""

    root: int

    def check(self) -> None:
        """Raises: ConfigError where it is not there, or is one that this process depends on."""
        pids = self.pids()
        if self.root not in pids:
            raise ConfigError(f"there is no process {self.root} here; give the pid of the server, or none")
        if os.getpid() in pids:
            raise ConfigError(f"process {self.root} runs this bench, too: stopping it would stop both")

    def pids(self) -> list[int]:
        """The root first, then its descendants by generation; empty where it has ended."""
        entries = _entries()
        if self.root not in entries:
            return []
        children, members = defaultdict(list), defaultdict(list)
        for pid, entry in entries.items():
            children[entry.parent].append(pid)
            members[entry.session].append(pid)
        found = [self.root]
        seen = {self.root}
        for pid in found:  # grows while it is walked
            for other in (*children[pid], *members[pid]):
                if other not in seen:
                    seen.add(other)
                    found.append(other)
        return found

    def pause(self) -> None:
        """Stops all, the root first, so that nobody is left to miss the others; returns when they have stopped, or
        after SETTLE_S, where one of them waits for a disk."""
        done: set[int] = set()
        for _ in range(MAX_ROUNDS):
            new = [pid for pid in self.pids() if pid not in done]
            if not new:
                break
            _signal(new, signal.SIGSTOP)
            done.update(new)
        until_s = time.monotonic() + SETTLE_S
        while not self.is_paused() and time.monotonic() < until_s:
            time.sleep(0.002)

    def resume(self) -> None:
        """The other way round: the root finds the others at work."""
        _signal(self.pids()[::-1], signal.SIGCONT)

    def end(self, number: int) -> None:
        """number: of a signal, to all."""
        _signal(self.pids(), number)

    def is_paused(self) -> bool:
        """Whether every process that lives is stopped."""
        states = [_read(pid, "stat", _state) for pid in self.pids()]
        return all(state in ("T", "Z") for state in states if state)

    def pss_bytes(self) -> int | None:
        """Proportional set size: memory that several processes share counts once in all. None: not to be read."""
        found = [_read(pid, "smaps_rollup", _pss) for pid in self.pids()]
        known = [value for value in found if value is not None]
        return sum(known) if known else None

    def cpu_s(self) -> float:
        """User and system time of the processes that live."""
        entries = _entries()
        ticks = sum(entries[pid].cpu_ticks for pid in self.pids() if pid in entries)
        return ticks / os.sysconf("SC_CLK_TCK")


def _entries() -> dict[int, _Entry]:
    found = {}
    for folder in PROC.iterdir() if has_proc() else ():
        if folder.name.isdecimal():
            entry = _read(int(folder.name), "stat", _entry)
            if entry is not None:
                found[int(folder.name)] = entry
    return found


def _fields(text: str) -> list[str]:
    """Of a stat line, from the state on: the name before may hold anything, parentheses and spaces too."""
    return text[text.rindex(")") + 2 :].split()


def _entry(text: str) -> _Entry:
    fields = _fields(text)
    return _Entry(parent=int(fields[1]), session=int(fields[3]), cpu_ticks=int(fields[11]) + int(fields[12]))


def _state(text: str) -> str:
    return _fields(text)[0]


def _pss(text: str) -> int | None:
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return None


def _read(pid: int, name: str, parse: Callable[[str], Parsed]) -> Parsed | None:
    """None where the process has ended, or is another user's."""
    try:
        return parse((PROC / str(pid) / name).read_text())
    except (OSError, ValueError, IndexError):
        return None


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
