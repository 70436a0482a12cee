"""A file of the operator's that is read again when it changes; one that cannot be used then changes nothing.

Reading is bounded: a file that grows without end, or a device in its place, costs no more than its limit.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from headrace.serving.core.errors import ConfigError

RELOAD_CHECK_S = 1.0
"""How often, at most, the file is looked at."""

T = TypeVar("T")

Stamp = tuple[int, int, int]


class WatchedFile(Generic[T]):
    """What one file says. All methods run in one thread."""

    def __init__(
        self,
        path: Path,
        read: Callable[[Path], T],
        *,
        what: str,
        of: str,
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
        is_slow: bool = False,
    ) -> None:
        """what: the file, such as "key file"; of: what it says, in the plural, for log lines. is_slow: where an event
        loop runs, changes are read beside it, and count from the end of that; else they count at once.

        Raises: ConfigError, as read does."""
        self._path, self._read, self._clock = path, read, clock
        self._what, self._of, self._log, self._is_slow = what, of, log, is_slow
        self._stamp = self._stamp_now()
        self._value = read(path)
        self._checked_s = clock()
        self._is_reading = False

    @property
    def value(self) -> T:
        """Looks at the file first, if that was not done lately."""
        now_s = self._clock()
        if now_s - self._checked_s >= RELOAD_CHECK_S and not self._is_reading:
            self._checked_s = now_s
            self._look()
        return self._value

    def _look(self) -> None:
        try:
            stamp = self._stamp_now()
        except ConfigError as error:
            self._keep(error)
            return
        if stamp == self._stamp:
            return
        self._stamp = stamp
        loop = _running_loop() if self._is_slow else None
        if loop is None:
            self._read_again()
            return
        self._is_reading = True
        loop.run_in_executor(None, self._read_again)

    def _read_again(self) -> None:
        try:
            self._value = self._read(self._path)
            self._log.info("read %s again from %s", self._of, self._path)
        except ConfigError as error:
            self._keep(error)
        finally:
            self._is_reading = False

    def _keep(self, error: ConfigError) -> None:
        self._log.error("%s stay as they were: %s", self._of, error)

    def _stamp_now(self) -> Stamp:
        """Changes when the file is written or replaced."""
        try:
            status = self._path.stat()
        except OSError as error:
            raise ConfigError(f"the {self._what} {self._path} cannot be read: {error.strerror}") from None
        return status.st_mtime_ns, status.st_size, status.st_ino


def read_text(path: Path, what: str, max_bytes: int) -> str:
    """UTF-8. what: the file, for errors. Raises: ConfigError naming it and the limit."""
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
        if len(raw) > max_bytes:
            raise ConfigError(f"the {what} {path} has more than {max_bytes} bytes")
        return raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        text = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError(f"the {what} {path} cannot be read: {text}") from None


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
